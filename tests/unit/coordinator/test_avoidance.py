"""Who fails is gone past for a while, and comes back; a link's fault is not its workers'."""

from coordinator.avoidance import Avoidance
from coordinator.effects import AttemptFailed
from coordinator.policies import LeastWork
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.snapshot import Avoided, ClusterSnapshot
from coordinator.tracker import Tracker
from loopline.holds import MOST_HOLD_S
from loopline.identity import Cause, Role
from loopline.messages import PairReady, Register
from tests.unit.coordinator.builders import VirtualClock, failed, granted, peer, register, request, reserved

P0, P1 = register("prefill-0", Role.PREFILL), register("prefill-1", Role.PREFILL)
D0, D1 = register("decode-0", Role.DECODE), register("decode-1", Role.DECODE)
PREFILL, DECODE = P0.peer.worker, D0.peer.worker


def cluster(*registers: Register) -> ClusterSnapshot:
    registry = Registry(3.0)
    for one in registers:
        registry.join(one, 0.0)
    for prefill in registers:
        for decode in registers:
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE:
                registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))
    return registry.snapshot(0.0, {})


def names(router: Router, snapshot: ClusterSnapshot, now_s: float) -> tuple[str | None, str | None]:
    """The decode worker that is chosen, and the prefill worker for one that waits at decode-0."""
    placing = router.begin(snapshot, now_s)
    decode = placing.choose_decode(request("new"))
    prefill = placing.choose_prefill(request("new"), DECODE)
    return decode and decode.peer.name, prefill and prefill.peer.name


def test_a_hold_ends_by_itself_and_grows_while_faults_go_on() -> None:
    avoidance = Avoidance(1.0, 8.0)
    assert avoidance.failed((DECODE,), 10.0) == 1.0
    assert avoidance.avoided(10.9).workers == {DECODE}
    assert avoidance.failed((DECODE,), 10.9) is None  # it was given before
    assert avoidance.avoided(11.0) == Avoided()
    assert [avoidance.failed((DECODE,), now_s) for now_s in (12.0, 15.0, 20.0, 29.0)] == [2.0, 4.0, 8.0, 8.0]
    assert avoidance.failed((DECODE,), 29.0 + 8.0 + 8.0) == 1.0  # it has been well for long
    avoidance.worker_gone(DECODE)
    assert avoidance.avoided(45.0) == Avoided()


def test_a_link_that_takes_its_time_to_fail_is_avoided_longer_each_time_it_is_tried() -> None:
    """Few requests, and each of them ends with the push timeout, which is as long as the longest hold."""
    clock, router, link, holds_s = VirtualClock(), Router(LeastWork()), (PREFILL, DECODE), []
    tracker = started(clock)
    for generation in range(1, 4):
        clock.s += 30.05
        effects = tracker.on_request_failed(PREFILL, failed("r1", Cause.TRANSFER_TIMEOUT, generation))
        assert isinstance(effects[0], AttemptFailed) and effects[0].fault == link
        router.failed(effects[0], clock.s, str)
        held_at_s = clock.s
        while router.avoidance.avoided(clock.s).links:
            clock.s += 0.5
        holds_s.append(clock.s - held_at_s)
        if generation < 3:
            place(tracker, generation + 1)
    assert holds_s == [1, 2, 4]


def test_a_worker_that_failed_is_gone_past_and_comes_back() -> None:
    router = Router(LeastWork())
    router.avoidance.failed((DECODE,), 0.0)
    snapshot = cluster(P0, P1, D0, D1)
    assert names(router, snapshot, 0.5) == ("decode-1", "prefill-0")
    assert names(router, snapshot, 1.0) == ("decode-0", "prefill-0")
    assert names(router, cluster(P0, D0), 0.5) == ("decode-0", "prefill-0")  # there is no other


def test_a_broken_link_is_avoided_and_its_workers_are_not() -> None:
    router = Router(LeastWork())
    router.avoidance.failed((PREFILL, DECODE), 0.0)
    assert names(router, cluster(P0, P1, D0, D1), 0.5) == ("decode-0", "prefill-1")
    one_writer = cluster(P0, D0, D1)
    assert names(router, one_writer, 0.5) == ("decode-1", "prefill-0")  # prefill-0 goes on with the other
    placing = router.begin(one_writer, 0.5)
    prefill = placing.choose_prefill(request("new"), D1.peer.worker)
    assert prefill is not None and prefill.worker == PREFILL
    assert names(router, cluster(P0, D0), 0.5) == ("decode-0", "prefill-0")
    assert names(router, one_writer, 0.0 + MOST_HOLD_S) == ("decode-0", "prefill-0")


def started(clock: VirtualClock | None = None) -> Tracker:
    tracker = Tracker(clock or VirtualClock())
    tracker.admit(request(), 60.0)
    place(tracker, 1)
    return tracker


def place(tracker: Tracker, generation: int) -> None:
    """The request's next generation, over the link from prefill-0 to decode-0."""
    tracker.reserve("r1", peer("decode-0"))
    tracker.on_reserved(DECODE, reserved("r1", generation))
    tracker.bind("r1", peer("prefill-0"))
    tracker.on_granted(DECODE, granted("r1", peer("prefill-0"), generation))


def test_an_attempt_says_whose_fault_it_was() -> None:
    link, causes = (PREFILL, DECODE), (Cause.TRANSFER_TIMEOUT, Cause.CORRUPTED, Cause.PEER_LOST, Cause.INCOMPLETE)
    for cause in causes:
        assert started().on_request_failed(PREFILL, failed("r1", cause))[0].fault == link  # type: ignore[union-attr]
    for worker in (PREFILL, DECODE):
        (effect, *_) = started().on_request_failed(worker, failed("r1", Cause.INTERNAL))
        assert effect.fault == (worker,)  # type: ignore[union-attr]
    (effect, *_) = started().on_worker_lost(DECODE, "decode-0")
    assert effect.fault == ()  # type: ignore[union-attr]
