"""A request that finds no room keeps those workers from others that could run it, and no others."""

from coordinator.policies import LeastWork
from coordinator.router import Round, Router
from loopline.identity import Role
from loopline.messages import Register
from tests.unit.coordinator.builders import OTHER_FINGERPRINT, assigned, heartbeat, register, request
from tests.unit.coordinator.cluster import ScriptedCluster, until
from tests.unit.coordinator.test_router import D0, D1, P0, P1, Table, cluster
from tests.unit.coordinator.test_service import Answer, message, run

U0 = register("unified-0", Role.UNIFIED, total_blocks=8)
LARGE = request("large", prompt=100)  # 7 blocks of 16 tokens
SMALL_P, SMALL_D = register("prefill-0", Role.PREFILL, total_blocks=2), register("decode-0", Role.DECODE)
BUSY: Table = {U0.peer.worker: (assigned("a", max_kv_tokens=32),)}


def begin(*registers: Register, table: Table | None = None) -> Round:
    return Router(LeastWork()).begin(cluster(*registers, table=table), 0.0)


def test_others_go_to_workers_that_it_could_not_use() -> None:
    placing = begin(SMALL_P, SMALL_D, U0, table=BUSY)
    assert placing.choose_decode(LARGE) is None
    placing.hold(LARGE)
    assert not placing.is_all_held
    small = placing.choose_decode(request("small"))
    assert small is not None and small.peer.name == "decode-0"  # the unified worker has less work, and is kept
    assert placing.choose_decode(request("too", prompt=40)) is None  # fits the one that is kept, and no other


def test_a_round_is_over_when_all_are_kept() -> None:
    placing = begin(P0, D0, U0, table=BUSY | {D0.peer.worker: (assigned("b", max_kv_tokens=1024),)})
    placing.hold(LARGE)
    assert placing.is_all_held
    assert placing.choose_decode(request("small")) is None
    assert begin(P0).is_all_held  # nobody takes work: the first that waits ends it


def test_what_nobody_could_run_keeps_nobody() -> None:
    placing = begin(SMALL_P, SMALL_D, U0)
    placing.hold(request("never", prompt=1000))
    assert not placing.is_all_held
    assert placing.choose_decode(LARGE) is not None


def test_who_said_no_room_a_moment_ago_could_run_it_all_the_same() -> None:
    snapshot = cluster(P0, register("prefill-1", Role.PREFILL, total_blocks=1), D0, refused=(P0,))
    placing = Router(LeastWork()).begin(snapshot, 0.0)
    assert placing.choose_decode(LARGE) is None
    placing.hold(LARGE)
    assert placing.is_all_held and placing.choose_decode(request("small")) is None


def test_one_that_must_stay_in_its_group_keeps_its_group() -> None:
    other_prefill = register("prefill-1", Role.PREFILL, fingerprint=OTHER_FINGERPRINT)
    other = register("decode-1", Role.DECODE, fingerprint=OTHER_FINGERPRINT)
    placing = begin(P0, D0, other_prefill, other)
    placing.hold(LARGE, OTHER_FINGERPRINT)
    names = [placing.choose_decode(one) for one in (request("small"), LARGE)]
    assert [view and view.peer.name for view in names] == ["decode-0", "decode-0"]
    assert placing.choose_decode(request("small"), OTHER_FINGERPRINT) is None
    assert begin(P0, P1, D0, D1).choose_decode(LARGE) is not None


def test_small_requests_pass_one_that_waits_for_the_unified_worker() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        unified = cluster.attach("unified-0", total_blocks=24)
        cluster.attach("prefill-0", total_blocks=2)
        cluster.attach("decode-0")
        await until(lambda: len(cluster.dispatcher.snapshot().workers) == 3, "all have joined")
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        await until(lambda: all(view.state == "ready" for view in cluster.dispatcher.snapshot().workers), "ready")
        await cluster.until_idle()
        unified.pause_at = 1
        first = Answer(cluster, message(text=b"x" * 200, max_tokens=20))
        await until(lambda: bool(unified.held), "the unified worker is busy")
        second = Answer(cluster, message(text=b"y" * 200, max_tokens=20))
        await until(lambda: cluster.dispatcher.num_queued == 1, "the second one waits for it")
        for _ in range(3):
            small = await Answer(cluster, message()).whole()
            assert small.finished.route.decode == "decode-0"
        assert cluster.dispatcher.num_queued == 1
        unified.go_on.set()
        for answer in (await first.whole(), await second.whole()):
            assert answer.finished.route.decode == "unified-0"

    run(script)


def test_a_prompt_that_no_prefill_worker_can_hold_now_waits_alone() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, _ = await cluster.pair()
        await cluster.until_idle()
        await prefill.send(heartbeat(quarantined=30))
        await until(lambda: any(view.usable_blocks == 34 for view in cluster.dispatcher.snapshot().workers), "seen")
        large = Answer(cluster, message(text=b"x" * 600))
        await until(lambda: cluster.dispatcher.num_queued == 1, "38 blocks are too many")
        await Answer(cluster, message()).whole()
        await prefill.send(heartbeat())
        assert (await large.whole()).finished.route.decode == "decode-0"

    run(script)
