"""What decode workers may compute themselves needs no prefill worker that lives, or has room."""

import pytest

from coordinator.policies import LeastWork
from coordinator.prefix_source import SourceRule
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.snapshot import ClusterSnapshot
from loopline.identity import Role, WorkerState
from loopline.messages import PairReady, Register
from tests.unit.coordinator.builders import assigned, register, request
from tests.unit.coordinator.cluster import ScriptedCluster, until
from tests.unit.coordinator.test_service import Answer, message, run

P, D = register("prefill-0", Role.PREFILL, max_running=1, total_blocks=2), register("decode-0", Role.DECODE)
FULL = {P.peer.worker: (assigned("a"),)}
LOCAL, AUTO = SourceRule(choice="local"), SourceRule(local_below_tokens=40)


def snapshot_of(sources: SourceRule, *registers: Register, full: bool = False) -> ClusterSnapshot:
    registry = Registry(3.0, sources=sources)
    for one in registers:
        registry.join(one, 0.0)
    if P in registers:
        registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "tcp", 1.0))
    return registry.snapshot(0.0, FULL if full else {})


def is_placed(snapshot: ClusterSnapshot, prompt: int) -> bool:
    return Router(LeastWork()).begin(snapshot, 0.0).choose_decode(request("new", prompt=prompt)) is not None


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("registers", [(D,), (P, D)], ids=["gone", "there"])
def test_where_all_is_local_every_prompt_that_fits_is_placed(registers: tuple[Register, ...], full: bool) -> None:
    snapshot = snapshot_of(LOCAL, *registers, full=full)
    decode = snapshot.find(D.peer.worker)
    assert decode is not None and decode.state is WorkerState.READY
    assert snapshot.arena_tokens() == 64 * 16
    assert is_placed(snapshot, 5) and is_placed(snapshot, 900) and not is_placed(snapshot, 1024)


def test_short_prompts_need_no_prefill_worker_with_room() -> None:
    for snapshot in (snapshot_of(AUTO, D), snapshot_of(AUTO, P, D, full=True)):
        assert is_placed(snapshot, 39) and not is_placed(snapshot, 40)
    assert snapshot_of(AUTO, D).workers[0].state is WorkerState.STARTING
    assert is_placed(snapshot_of(AUTO, P, D), 30) and is_placed(snapshot_of(AUTO, P, D), 30)
    assert not is_placed(snapshot_of(SourceRule(), D), 5)


def test_a_long_prompt_keeps_only_workers_with_a_prefill_worker_for_it() -> None:
    placing = Router(LeastWork()).begin(snapshot_of(AUTO, D), 0.0)
    placing.hold(request("long", prompt=50))
    assert not placing.is_all_held
    assert placing.choose_decode(request("short")) is not None


def test_the_last_prefill_worker_dies_and_local_prompts_go_on() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, _ = await cluster.pair()
        await cluster.until_idle()
        await prefill.die()
        await until(lambda: len(cluster.dispatcher.snapshot().with_role(Role.PREFILL)) == 0, "it is lost")
        assert cluster.dispatcher.readiness.serving
        route = (await Answer(cluster, message()).whole()).finished.route
        assert (route.prefill, route.decode) == ("decode-0", "decode-0")

    run(script, routing={"prefix_source": "local"})


def test_a_decode_worker_alone_serves_where_all_is_local() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        cluster.attach("decode-0")
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        await Answer(cluster, message()).whole()

    run(script, routing={"prefix_source": "local"})


def test_short_prompts_go_on_without_prefill_workers() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, _ = await cluster.pair()
        await cluster.until_idle()
        await prefill.die()
        await until(lambda: len(cluster.dispatcher.snapshot().with_role(Role.PREFILL)) == 0, "it is lost")
        assert (await Answer(cluster, message()).whole()).finished.route.prefix_source == "local"

    run(script, routing={"local_prefill_below_tokens": 100})
