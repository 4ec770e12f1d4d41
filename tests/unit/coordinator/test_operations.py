"""Scale and drain over loopback gRPC, with scripted workers and a launcher that only keeps names."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.launcher_link import stay_attached
from coordinator.roster import Roster
from loopline.client.operator import Operator
from loopline.errors import OperatorError
from loopline.identity import Role, WorkerState
from loopline.launcher_messages import LauncherReport, WorkerCounts
from loopline.messages import Cancel, Drain, Pair
from loopline.wire._generated.loopline.v1 import cluster_pb2, cluster_pb2_grpc, loopline_pb2
from loopline.wire.channel import open_channel
from tests.unit.coordinator.builders import heartbeat
from tests.unit.coordinator.cluster import DRAIN_LIMIT_S, ScriptedCluster, ScriptedWorker, until
from tests.unit.coordinator.test_service import Answer, message, run


class NameKeeper:
    """A launcher whose workers are names."""

    def __init__(self, launcher: str = "one", counts: WorkerCounts = WorkerCounts(1, 2)) -> None:  # noqa: B008 - frozen
        self.changed = asyncio.Event()
        self.roster = Roster()
        self.roster.want(counts)
        self._id = launcher

    def report(self, revision: int) -> LauncherReport:
        return LauncherReport(self._id, "127.0.0.1", True, self.roster.wanted, revision, self.roster.kept())

    def want(self, counts: WorkerCounts) -> None:
        for name in self.roster.want(counts).leave:
            self.roster.ended(name)


@asynccontextmanager
async def attached(cluster: ScriptedCluster, keeper: NameKeeper) -> AsyncIterator[asyncio.Event]:
    stopping = asyncio.Event()
    link = asyncio.ensure_future(stay_attached(cluster.address, keeper, stopping))
    try:
        yield stopping
    finally:
        stopping.set()
        await link


async def launcher(cluster: ScriptedCluster) -> loopline_pb2.Launcher | None:
    status = await cluster.stub.GetStatus(loopline_pb2.GetStatusRequest())
    return status.launcher if status.HasField("launcher") else None


async def until_kept(cluster: ScriptedCluster, names: list[str] | None) -> None:
    async with asyncio.timeout(10):
        while True:
            found = await launcher(cluster)
            if (None if found is None else [worker.name for worker in found.workers]) == names:
                return
            await asyncio.sleep(0.01)


def is_ready(cluster: ScriptedCluster) -> bool:
    """Whether there is a decode worker to give requests to."""
    views = cluster.dispatcher.membership().with_role(Role.DECODE)
    return any(view.state is WorkerState.READY for view in views)


def test_a_launcher_is_scaled_by_its_coordinator() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        keeper = NameKeeper()
        with Operator(cluster.address) as operator:
            with pytest.raises(OperatorError, match="no launcher is attached"):
                await asyncio.to_thread(operator.scale, decode=1)
            async with attached(cluster, keeper):
                await until_kept(cluster, ["prefill-0", "decode-0", "decode-1"])
                scaled = await asyncio.to_thread(operator.scale, decode=3)
                assert (scaled.prefill_before, scaled.decode_before) == (1, 2)
                assert (scaled.prefill, scaled.decode) == (1, 3)
                await until_kept(cluster, ["prefill-0", "decode-0", "decode-1", "decode-2"])
                await asyncio.to_thread(operator.scale, prefill=0, decode=1)
                await until_kept(cluster, ["decode-0"])
                with pytest.raises(OperatorError, match="decode is 5000; allowed: 0 to 1000"):
                    await asyncio.to_thread(operator.scale, decode=5000)
            await until_kept(cluster, None)

    run(script)


def test_a_second_launcher_is_refused_until_the_first_has_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def script(cluster: ScriptedCluster) -> None:
        async with attached(cluster, NameKeeper()) as stopping:
            await until_kept(cluster, ["prefill-0", "decode-0", "decode-1"])
            async with attached(cluster, NameKeeper("two", WorkerCounts(0, 1))):
                await until(lambda: "FAILED_PRECONDITION another launcher" in caplog.text, "it is refused")
                stopping.set()
                await until_kept(cluster, ["decode-0"])

    run(script)


def test_a_report_without_its_parts_is_refused() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        async with open_channel(cluster.address) as channel:
            call = cluster_pb2_grpc.ClusterStub(channel).AttachLauncher()  # type: ignore[no-untyped-call]
            await call.write(cluster_pb2.LauncherReport(launcher="one"))
            assert "LauncherReport.wanted: missing" in (await call.details())

    run(script)


def drains(worker: ScriptedWorker) -> list[Drain]:
    return [heard for heard in worker.heard if isinstance(heard, Drain)]


def test_a_worker_that_drains_gets_nothing_new_and_what_it_hands_over_costs_no_attempt() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, first = await cluster.pair(pause_at=1)
        answer = Answer(cluster, message(max_tokens=8))
        await until(lambda: bool(first.held), "the answer runs")
        with Operator(cluster.address) as operator:
            ordered = await asyncio.to_thread(operator.drain, "decode-0")
            assert (ordered.uuid, ordered.limit_s) == (first.peer.worker.uuid, DRAIN_LIMIT_S)
            assert not ordered.returns
            await until(lambda: drains(first) == [Drain(DRAIN_LIMIT_S)], "the order arrives")
            assert not cluster.dispatcher.readiness.serving or not is_ready(cluster)
            await first.send(heartbeat())  # older than the order, as far as it says
            second = cluster.attach("decode-1")
            await until(lambda: is_ready(cluster), "another decode worker is there")
            await first.die()
            await answer.whole()
            assert answer.failure is None
            assert [row for row in second.heard if isinstance(row, Cancel)] == []
            with pytest.raises(OperatorError, match="no worker is named 'decode-0'; there are: prefill-0, decode-1"):
                await asyncio.to_thread(operator.drain, "decode-0")
            with pytest.raises(OperatorError, match="limit_s is -1; allowed: 0 to 86400"):
                await asyncio.to_thread(operator.drain, "decode-1", limit_s=-1.0)

    run(script)


def test_a_draining_worker_is_paired_with_nobody() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        cluster.dispatcher.drain_worker("decode-0", 1.0)
        late = cluster.attach("prefill-1")
        await until(lambda: late.coordinator_epoch > 0, "it joined")
        assert [heard for heard in late.heard if isinstance(heard, Pair)] == []

    run(script)
