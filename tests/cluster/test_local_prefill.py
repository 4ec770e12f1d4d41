"""A conversation whose turns are prefilled on the decode worker, which has the KV of those before; and a third one
whose decode worker is killed as it begins to. Tokens are those of one engine without a cache; nothing stays held."""

from pathlib import Path

from loopline.client import Completion
from loopline.engine.local import LocalEngine
from loopline.settings import EngineSettings
from tests.support.asking import RETURN_S, alone, prompt_of
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import faulty, has_committed, is_ready
from tests.support.golden import SMALL

BLOCK = 16
FIRST, REST, ANSWER = 5 * BLOCK + 3, 5, 20
GROUPS: dict[str, dict[str, object]] = {
    "kv": {"prefix_cache": True},
    "routing": {"prefix_source": "local"},
}


def ask(cluster: Cluster, prompt: tuple[int, ...]) -> Completion:
    return cluster.client.complete(prompt, max_tokens=ANSWER, ignore_eos=True, deadline_s=RETURN_S)


def test_a_conversation_stays_on_its_decode_worker(tmp_path: Path) -> None:
    engine = LocalEngine(EngineSettings(model_path=str(SMALL), dtype="fp32", num_blocks=64, prefix_cache="off"))
    prompt = prompt_of(1, FIRST)
    with faulty(
        tmp_path, {"worker": "decode-0", "do": "kill", "at": "local", "nth": 4}, checkpoint=SMALL, **GROUPS
    ) as cluster:
        pid = cluster.workers()["decode-0"].pid
        first = ask(cluster, prompt)
        assert first.token_ids == alone(engine, prompt, ANSWER)
        check(first, cached=0)

        prompt += first.token_ids + prompt_of(2, REST)
        second = ask(cluster, prompt)
        assert second.token_ids == alone(engine, prompt, ANSWER)
        check(second, cached=(FIRST + ANSWER - 1) // BLOCK * BLOCK)
        assert second.finished is not None and second.finished.handoff is None
        cluster.wait_idle()
        assert cluster.workers()["decode-0"].blocks.cached > 0

        prompt += second.token_ids + prompt_of(3, REST)
        third = ask(cluster, prompt)  # its decode worker is killed; the probe was local, too
        assert has_committed(tmp_path, "decode-0", "kill at local 4")
        assert third.token_ids == alone(engine, prompt, ANSWER)
        check(third, cached=0)
        wait_until(lambda: is_ready(cluster, "decode-0", but_pid=pid), "it was started again")

        prompt += third.token_ids + prompt_of(4, REST)
        fourth = ask(cluster, prompt)
        assert fourth.token_ids == alone(engine, prompt, ANSWER)
        check(fourth, cached=(len(prompt) - REST - 1) // BLOCK * BLOCK)
        cluster.wait_idle()
    engine.close()


def check(answer: Completion, cached: int) -> None:
    """The decode worker computed the prompt, and that much of it was there."""
    assert answer.finished is not None
    route = answer.finished.route
    assert (route.prefill, route.decode, route.prefix_source) == ("decode-0", "decode-0", "local")
    assert answer.finished.usage.cached_tokens == cached
