"""Answers that go on after tokens that the client has already."""

import pytest

from loopline.wire._generated.loopline.v1 import loopline_pb2
from tests.unit.coordinator.cluster import ScriptedCluster, text_of, token_at
from tests.unit.coordinator.test_service import Answer, message, run


def test_an_answer_goes_on_from_delivered_tokens() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        delivered = [token_at(5), token_at(6)]
        answer = await Answer(cluster, message(max_tokens=5, delivered_token_ids=delivered)).whole()
        assert answer.ids == [token_at(position) for position in range(7, 10)]
        assert answer.text == text_of(range(7, 10))
        assert answer.finished.usage.completion_tokens == 5

    run(script)


@pytest.mark.parametrize(
    ("delivered", "stop", "reason", "text"),
    [
        (b"ab", b"", loopline_pb2.FINISH_REASON_LENGTH, ""),
        (b"ab", b"bc", loopline_pb2.FINISH_REASON_LENGTH, "b"),  # held back until the end
        (b"a", b"a", loopline_pb2.FINISH_REASON_STOP, ""),
        (b"ab", b"ab", loopline_pb2.FINISH_REASON_STOP, ""),
    ],
)
def test_an_answer_of_which_only_the_end_was_missed_needs_no_worker(
    delivered: bytes, stop: bytes, reason: int, text: str
) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        sampling = {"stop": [stop] if stop else [], "seed": 3}
        answer = Answer(cluster, message(max_tokens=2, delivered_token_ids=list(delivered), sampling=sampling))
        await answer.whole()
        assert (answer.events[0].accepted.seed, answer.ids, answer.text) == (3, [], text)
        assert (answer.finished.reason, answer.finished.has_text) == (reason, True)
        assert (answer.finished.usage.prompt_tokens, answer.finished.usage.completion_tokens) == (5, len(delivered))

    run(script)
