"""A coordinator moves a worker through its launcher; scripted workers, and a launcher that only keeps names."""

import re

import pytest

from coordinator.rebalance_watch import RebalanceWatch
from loopline.clock import MonotonicClock
from loopline.launcher_messages import WorkerCounts
from loopline.telemetry.metrics import registry_of
from tests.unit.coordinator.cluster import ScriptedCluster, until
from tests.unit.coordinator.test_operations import NameKeeper, attached
from tests.unit.coordinator.test_service import Answer, message, run

PATIENCE_S = 0.2


def test_a_prefill_worker_with_nothing_to_do_becomes_a_decode_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def script(cluster: ScriptedCluster) -> None:
        keeper = NameKeeper(counts=WorkerCounts(2, 1))
        watch = RebalanceWatch(cluster.dispatcher, cluster.fleet, MonotonicClock(), PATIENCE_S)
        cluster.attach("prefill-1")
        _, decode = await cluster.pair(max_running=1, pause_at=1)
        async with attached(cluster, keeper):
            await until(lambda: cluster.fleet.launcher is not None, "the launcher is attached")
            await until(lambda: all(worker.coordinator_epoch for worker in cluster.workers.values()), "all are there")
            answers = [Answer(cluster, message(max_tokens=4)) for _ in range(3)]
            watch.start()
            await until(lambda: keeper.roster.wanted == WorkerCounts(1, 2), "a worker moves")
            watch.stop()
            decode.go_on.set()
            for answer in answers:
                await answer.whole()
                assert answer.failure is None
        value = registry_of(cluster.dispatcher.metrics.collect).get_sample_value
        assert value("loopline_rebalances_total", {"to": "decode"}) == 1
        assert value("loopline_rebalances_total", {"to": "prefill"}) == 0

    run(script)
    (line,) = (line for line in caplog.messages if line.startswith("rebalance"))
    assert re.match(
        r"rebalance: decode was the bottleneck in \d+% of the last 0\.\d s; on average [12]\.\d requests", line
    )
    assert line.endswith("; from 2 prefill and 1 decode workers to 1 and 2")


def test_what_is_in_the_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def script(cluster: ScriptedCluster) -> None:
        watch = RebalanceWatch(cluster.dispatcher, cluster.fleet, MonotonicClock(), PATIENCE_S)
        _, decode = await cluster.pair(max_running=1, pause_at=1)
        answers = [Answer(cluster, message(max_tokens=4)) for _ in range(3)]
        watch.start()
        await until(lambda: "no worker moves: no launcher is attached" in caplog.text, "it is said")
        watch.stop()
        decode.go_on.set()
        for answer in answers:
            await answer.whole()

    run(script)
    assert caplog.text.count("no worker moves") == 1
