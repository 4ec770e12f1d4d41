"""Workers that take whole requests, as the coordinator sees them: no link, no prefill worker, one round trip."""

from dataclasses import replace

import pytest

from coordinator.effects import Ending, Requeue, Send
from coordinator.life import Books, State
from coordinator.policies import make_policy
from coordinator.registry import Joined, Registry
from coordinator.router import Router
from coordinator.tracker import Tracker
from loopline.identity import Cause, HandoffKey, Role, WorkerState
from loopline.launcher_messages import KeptWorker, WorkerCounts
from loopline.messages import (
    LocalPrefillStarted,
    PrefixReport,
    Register,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
)
from loopline.request import FinishReason
from tests.unit.coordinator import test_rebalance as rebalance
from tests.unit.coordinator.builders import (
    OTHER_FINGERPRINT,
    assigned,
    heartbeat,
    register,
    request,
    reserved,
    row,
    step,
)
from tests.unit.coordinator.cluster import ScriptedCluster, text_of, until
from tests.unit.coordinator.test_router import D0, P0, P1, Table, begin, cluster, decode_name
from tests.unit.coordinator.test_service import Answer, message, run
from tests.unit.coordinator.test_tracker import D2, Bench, D, cancels, the_end

U0, U1 = register("unified-0", Role.UNIFIED), register("unified-1", Role.UNIFIED)
KEY = HandoffKey("r1", 1)


# ---- joining


def test_one_unified_worker_is_ready_by_itself_and_paired_with_nobody() -> None:
    registry = Registry(3.0)
    for one in (U0, P0, D0):
        joined = registry.join(one, 0.0)
        assert isinstance(joined, Joined)
        assert [send.worker for send in joined.commands] == ([P0.peer.worker] if one is D0 else [])
    states = {view.peer.name: view.state for view in registry.snapshot(0.0, {}).workers}
    assert states == {"unified-0": "ready", "prefill-0": "starting", "decode-0": "starting"}
    assert registry.can_serve
    registry.heartbeat(U0.peer.worker, heartbeat(draining=True), 1.0)
    assert not registry.can_serve
    told = registry.lose(U0.peer.worker, proven=True)
    assert told == [], "nobody may hold something for it"
    assert registry.lose(P0.peer.worker, proven=True)[0].worker == D0.peer.worker


def test_the_largest_request_that_can_run() -> None:
    small = register("unified-0", Role.UNIFIED, total_blocks=8)
    large = register("unified-1", Role.UNIFIED, total_blocks=100, fingerprint=OTHER_FINGERPRINT)
    assert cluster().arena_tokens() is None
    assert cluster(P0).arena_tokens() is None
    assert cluster(P0, small).arena_tokens() == 8 * 16
    assert cluster(P0, D0, small).arena_tokens() == 64 * 16
    assert cluster(P0, D0, small, large).arena_tokens() == 100 * 16


# ---- routing


def test_it_needs_no_prefill_slot() -> None:
    assert decode_name(cluster(U0)) == "unified-0"
    assert decode_name(cluster(D0, U0)) == "unified-0", "nobody could prefill for the decode worker"
    full = {P0.peer.worker: tuple(assigned(name) for name in "abcd")}
    assert decode_name(cluster(P0, D0, U0, table=full)) == "unified-0"
    assert decode_name(cluster(P0, D0, U0, table={**full, U0.peer.worker: full[P0.peer.worker]})) is None
    assert decode_name(cluster(P0, D0, U0, table={U0.peer.worker: (assigned("a"),)})) == "decode-0"
    assert decode_name(cluster(U0, U1, table={U0.peer.worker: (assigned("a", token_loops=8),)})) == "unified-1"
    assert decode_name(cluster(U0, U1, refused=(U0,))) == "unified-1"


def test_a_prompt_that_no_paired_prefill_worker_can_hold_goes_to_a_unified_one() -> None:
    small = register("prefill-0", Role.PREFILL, total_blocks=2)
    busy: Table = {U0.peer.worker: (assigned("a"),)}
    assert decode_name(cluster(small, D0, U0, table=busy), prompt=32) == "decode-0"
    assert decode_name(cluster(small, D0, U0, table=busy), prompt=33) == "unified-0"
    assert decode_name(cluster(small, D0), prompt=33) is None
    assert decode_name(cluster(small, P1, D0, U0, table=busy), prompt=33) == "decode-0", "another one can"


def test_a_probe_keeps_off_a_unified_worker_while_a_pair_is_ready() -> None:
    def chosen(*registers: Register) -> str | None:
        table: Table = {D0.peer.worker: (assigned("a"),)}  # so that any other request goes to the unified one
        view = begin(cluster(*registers, table=table)).choose_decode(request("probe"), in_pairs=True)
        return view.peer.name if view else None

    assert decode_name(cluster(P0, D0, U0, table={D0.peer.worker: (assigned("a"),)})) == "unified-0"
    assert chosen(P0, D0, U0) == "decode-0"
    assert chosen(D0, U0) == "unified-0"
    assert chosen(U0) == "unified-0"


def test_one_that_failed_is_avoided_while_there_is_another() -> None:
    router = Router(make_policy("least_work"))
    router.avoidance.failed((U0.peer.worker,), 0.0)

    def chosen(*workers: object) -> str | None:
        view = router.begin(cluster(*workers), 0.1).choose_decode(request("new"))  # type: ignore[arg-type]
        return view.peer.name if view else None

    assert chosen(U0, U1) == "unified-1"
    assert chosen(U0) == "unified-0"
    assert chosen(P0, D0, U0) == "decode-0"


def test_a_request_follows_its_cached_prefix() -> None:
    router, one = Router(make_policy("prefix_aware")), request("new", prompt=40)
    for worker in (U0, U1):
        router.joined(worker, 0.0)
    (digest, *_) = router.requests.digests(one, U1.fingerprint, 16)
    router.reported(U1.peer.worker, PrefixReport(1, True, 0, 1, digest[:8], b""), 0.0)
    chosen = router.begin(cluster(U0, U1), 0.0).choose_decode(one)
    assert chosen is not None and chosen.peer.name == "unified-1"


def test_a_session_stays_on_its_unified_worker() -> None:
    router, one = Router(make_policy("session_affinity")), replace(request("new"), session="s")
    placing = router.begin(cluster(U0, U1), 0.0)
    placing.placed(one, {}, {U1.peer.worker: assigned("new")})
    chosen = router.begin(cluster(U0, U1), 0.0).choose_decode(one)
    assert chosen is not None and chosen.peer.name == "unified-1"


# ---- a request's life


def whole(max_tokens: int = 4) -> tuple[Bench, Tracker]:
    bench = Bench(max_tokens=max_tokens)
    tracker = bench.tracker
    orders = tracker.reserve("r1", D, takes_whole=True)
    assert [type(order.message) for order in orders if isinstance(order, Send)] == [Reserve, StartLocalPrefill]
    return bench, tracker


def test_the_way_of_a_whole_request() -> None:
    _, tracker = whole(max_tokens=2)
    (given,) = tracker.assigned()[D.worker]
    assert (given.awaits_prefill, given.token_loops) == (False, (5 + 2) * 2), "all of the prompt is its work"
    assert tracker.on_reserved(D.worker, Reserved(KEY, cached_tokens=4)) == []
    assert (tracker.state("r1"), tracker.awaiting_prefill()) == (State.STARTING_LOCAL, [])
    assert tracker.assigned()[D.worker][0].token_loops == (1 + 2) * 2
    assert tracker.on_local_started(D.worker, LocalPrefillStarted(KEY)) == []
    tracker.on_step_tokens(D.worker, step(row("r1", 5, 50)))
    last = row("r1", 6, 51, finish=FinishReason.LENGTH)
    outcome = the_end(tracker.on_step_tokens(D.worker, step(last))).outcome
    assert (outcome.ending, outcome.stats, outcome.usage.cached_tokens) == (Ending.FINISHED, None, 4)
    assert (outcome.route.prefill, outcome.route.decode) == ("decode-0", "decode-0")
    assert not tracker.ignored


def test_without_room_it_goes_elsewhere_and_the_order_that_came_with_it_is_nothing() -> None:
    _, tracker = whole()
    assert tracker.on_reserved(D.worker, reserved("r1", cause=Cause.NO_ROOM))[-1] == Requeue("r1")
    assert tracker.on_local_started(D.worker, LocalPrefillStarted(KEY, Cause.UNKNOWN)) == []
    assert (tracker.state("r1"), tracker.request("r1").attempt) == (State.QUEUED, 1)
    tracker.reserve("r1", D2)  # a decode worker this time
    assert tracker.on_reserved(D2.worker, reserved("r1", 2)) == []
    assert tracker.awaiting_prefill() == ["r1"]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("answered", [True, False])
def test_what_got_lost_is_seen(answered: bool, knows: bool) -> None:
    """Of Reserve and the order that goes with it, or of the answers."""
    bench, tracker = whole()
    if answered:
        tracker.on_reserved(D.worker, Reserved(KEY))
    bench.clock.s += 6.0
    effects = tracker.look({D.worker: Books(bench.clock.s, frozenset({KEY} if knows else ()))})
    assert cancels(effects) == [("uuid-decode-0", 1)] and effects[-1] == Requeue("r1")


# ---- a coordinator with scripted workers


def test_a_cluster_of_one_unified_worker_serves() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        unified = cluster.attach("unified-0")
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        assert len(unified.heard_of(StartLocalPrefill)) == 1, "the probe took the whole way"
        answer = await Answer(cluster, message(max_tokens=4)).whole()
        assert answer.text == text_of(range(5, 9))
        assert (answer.finished.route.prefill, answer.finished.route.decode) == ("unified-0", "unified-0")
        assert not answer.finished.HasField("handoff")
        await cluster.until_idle()
        await unified.die()
        await until(lambda: not cluster.dispatcher.readiness.serving, "it is missed")

    run(script)


def test_a_lost_unified_worker_is_replaced_by_whoever_there_is() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        unified = cluster.attach("unified-0", pause_at=2)
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        asked = Answer(cluster, message(max_tokens=6))
        await until(lambda: len(unified.heard_of(Reserve)) > 1, "it has the request")
        prefill, _ = cluster.attach("prefill-0"), cluster.attach("decode-0")
        await unified.die()
        answer = await asked.whole()
        assert answer.text == text_of(range(5, 11))
        assert answer.finished.route.prefill == "prefill-0"
        assert prefill.heard_of(StartPrefill)

    run(script)


def test_a_full_unified_worker_says_so_and_is_asked_again_after_its_heartbeat() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        unified = cluster.attach("unified-0")
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        await cluster.until_idle()
        unified.refusals.append(Cause.NO_ROOM)
        asked = Answer(cluster, message(max_tokens=4))
        await until(lambda: not unified.refusals, "it refuses")
        await until(lambda: cluster.dispatcher.num_queued == 1, "the request waits")
        await unified.send(heartbeat())
        assert (await asked.whole()).text == text_of(range(5, 9))

    run(script)


# ---- rebalance leaves them alone


def test_workers_of_the_other_roles_move_beside_them() -> None:
    counts = WorkerCounts(2, 2, 1)
    kept = (*rebalance.KEPT, KeptWorker("unified-0", Role.UNIFIED, False))
    registry = rebalance.cluster(*rebalance.ALL, U0)
    report = replace(rebalance.REPORT, wanted=counts, workers=kept)
    sample = rebalance.look(rebalance.NOTHING, registry=registry, report=report)
    assert (sample.is_settled, sample.ready) == (True, counts)
    bound = replace(rebalance.PREFILL_BOUND, ready=counts, wanted=counts)
    (_, move), *_ = rebalance.moves(rebalance.RebalancePolicy(rebalance.PATIENCE_S), [bound] * 40)
    assert move.after == WorkerCounts(3, 1, 1)


def test_a_cluster_of_unified_workers_alone_has_no_bottleneck_between_roles() -> None:
    counts = WorkerCounts(0, 0, 2)
    busy = replace(rebalance.DECODE_BOUND, ready=counts, wanted=counts)
    assert busy.bottleneck is None
    assert not rebalance.observe(rebalance.RebalancePolicy(rebalance.PATIENCE_S), [busy] * 40)


def test_draining_is_seen_in_its_state() -> None:
    registry = Registry(3.0)
    registry.join(U0, 0.0)
    registry.drain("unified-0", 5.0)
    (view,) = registry.snapshot(0.0, {}).workers
    assert view.state is WorkerState.DRAINING
