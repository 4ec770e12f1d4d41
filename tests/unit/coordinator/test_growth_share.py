"""The coordinator counts a worker's room as the worker does: with the part of the growth that it promises."""

from dataclasses import replace

import pytest

from coordinator.policies import LeastWork
from coordinator.registry import Refused, Registry
from coordinator.router import Router
from loopline.identity import Role
from loopline.settings import promised_tokens
from tests.unit.coordinator.builders import assigned, register, request
from tests.unit.coordinator.cluster import ScriptedCluster, until
from tests.unit.coordinator.test_router import cluster
from tests.unit.coordinator.test_service import Answer, message, run

LONG = request("new", prompt=16, max_tokens=113)  # 128 tokens at most: 8 blocks


@pytest.mark.parametrize(("share", "count"), [(1.0, 2), (0.5, 3), (0.0, 16)])
def test_as_many_as_the_worker_would_take(share: float, count: int) -> None:
    unified = register("unified-0", Role.UNIFIED, total_blocks=16, max_running=99, growth_share=share)
    placing = Router(LeastWork()).begin(cluster(unified), 0.0)
    given = 0
    while placing.choose_decode(LONG) is not None:
        one = replace(assigned(f"r{given}", max_kv_tokens=128), num_known_tokens=16, num_started_tokens=16)
        placing.placed(LONG, {}, {unified.peer.worker: one})
        given += 1
    assert given == count


def test_what_was_written_counts_where_it_is_more_than_what_was_promised() -> None:
    unified = register("unified-0", Role.UNIFIED, total_blocks=16, growth_share=0.5)
    row = replace(assigned("a", max_kv_tokens=128), num_started_tokens=16)
    kept = []
    for known in (16, 72, 100, 129):
        table = {unified.peer.worker: (replace(row, num_known_tokens=known),)}
        kept.append(cluster(unified, table=table).workers[0].sums.most_blocks)
    assert kept == [5, 5, 7, 8]


def test_what_could_not_end_alone_is_given_to_nobody() -> None:
    unified = register("unified-0", Role.UNIFIED, total_blocks=7, growth_share=0.0)
    assert Router(LeastWork()).begin(cluster(unified), 0.0).choose_decode(LONG) is None


def test_a_promise_is_between_what_is_known_and_the_most() -> None:
    assert [promised_tokens(16, 128, share) for share in (0.0, 0.5, 1.0)] == [16, 72, 128]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_worker_with_another_share_does_not_join(share: float) -> None:
    refused = Registry(3.0).join(register("unified-0", Role.UNIFIED, growth_share=share), 0.0)
    assert isinstance(refused, Refused) and f"growth_share is {share}; allowed: 0 to 1" in refused.reason


def test_more_requests_run_at_once_where_less_growth_is_promised() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        worker = cluster.attach("unified-0", total_blocks=8, growth_share=0.0, pause_at=1)
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        answers = [Answer(cluster, message(max_tokens=100)) for _ in range(4)]  # 7 blocks each at most
        await until(lambda: len(worker.held) == 4, "all run")
        worker.go_on.set()
        for answer in answers:
            assert len((await answer.whole()).ids) == 100

    run(script)
