"""When a worker changes its role: what a look says, and what follows from many."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.effects import Assigned
from coordinator.rebalance import COOL_DOWN, Hold, Move, RebalancePolicy, Sample, take_sample
from coordinator.registry import Registry
from coordinator.snapshot import Backlog
from loopline.identity import Role, WorkerId
from loopline.launcher_messages import KeptWorker, LauncherReport, WorkerCounts
from loopline.messages import PairReady, Register
from tests.unit.coordinator.builders import OTHER_FINGERPRINT, assigned, heartbeat, register, request

PATIENCE_S = 10.0
START_S = 1000.0
TWO_EACH = WorkerCounts(2, 2)
QUIET = Sample(
    ready=TWO_EACH,
    wanted=TWO_EACH,
    is_settled=True,
    num_groups=1,
    num_waiting=0,
    has_decode_room=True,
    prefill_busy=0,
    decode_held=0.0,
)
PREFILL_BOUND = replace(QUIET, num_waiting=8, prefill_busy=2, decode_held=0.1)
DECODE_BOUND = replace(QUIET, num_waiting=8, has_decode_room=False, decode_held=2.0)
UNSETTLED = replace(QUIET, is_settled=False)
BOUND = {Role.PREFILL: PREFILL_BOUND, Role.DECODE: DECODE_BOUND}
Decision = Move | Hold | None


def with_workers(sample: Sample, counts: WorkerCounts) -> Sample:
    """The same state of affairs with other numbers of workers, all as busy."""
    return replace(
        sample,
        ready=counts,
        wanted=counts,
        prefill_busy=counts.prefill if sample.prefill_busy else 0,
        decode_held=sample.decode_held * counts.decode / 2,
    )


def observe(policy: RebalancePolicy, samples: Sequence[Sample], start_s: float = START_S) -> list[tuple[int, Decision]]:
    """One look a second; the decisions with their seconds."""
    found = ((second, policy.observe(sample, start_s + second)) for second, sample in enumerate(samples))
    return [(second, decision) for second, decision in found if decision is not None]


def moves(policy: RebalancePolicy, samples: Sequence[Sample]) -> list[tuple[int, Move]]:
    return [(second, found) for second, found in observe(policy, samples) if isinstance(found, Move)]


# ---- many looks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "after"), [(Role.PREFILL, WorkerCounts(3, 1)), (Role.DECODE, WorkerCounts(1, 3))], ids=["prefill", "decode"]
)
def test_a_worker_moves_after_the_patience(to: Role, after: WorkerCounts) -> None:
    ((second, move),) = observe(RebalancePolicy(PATIENCE_S), [BOUND[to]] * 15)
    assert isinstance(move, Move)
    assert second == PATIENCE_S
    assert (move.to, move.before, move.after) == (to, TWO_EACH, after)
    assert (move.evidence.seconds, move.evidence.at_fault, move.evidence.num_waiting) == (PATIENCE_S, 1.0, 8.0)


def test_the_numbers_are_in_the_words() -> None:
    samples = [DECODE_BOUND] * 10 + [replace(QUIET, prefill_busy=1)]
    ((_, move),) = moves(RebalancePolicy(PATIENCE_S), samples)
    assert str(move.evidence) == (
        "in 91% of the last 10.0 s; on average 7.3 requests waited, 0.09 of 2 prefill workers were busy and the room of"
        " 1.82 of 2 decode workers was held by requests that generate"
    )


def test_short_gaps_do_not_matter() -> None:
    samples = [QUIET if second % 5 == 4 else PREFILL_BOUND for second in range(15)]
    assert len(moves(RebalancePolicy(PATIENCE_S), samples)) == 1
    samples = [QUIET if second % 2 else PREFILL_BOUND for second in range(60)]
    assert observe(RebalancePolicy(PATIENCE_S), samples) == []


@pytest.mark.parametrize(
    "sample",
    [
        QUIET,
        replace(QUIET, prefill_busy=2, decode_held=2.0),  # all are busy and nobody waits
        replace(PREFILL_BOUND, prefill_busy=1),  # a prefill worker has nothing to do
        replace(PREFILL_BOUND, decode_held=0.9),  # the decode worker that stays would have too little room
        replace(PREFILL_BOUND, decode_held=1.5),
        replace(DECODE_BOUND, prefill_busy=1),  # the prefill worker that stays would have no rest
        replace(DECODE_BOUND, prefill_busy=2),
    ],
)
def test_who_has_nothing_to_spare_keeps_it(sample: Sample) -> None:
    assert observe(RebalancePolicy(PATIENCE_S), [sample] * 40) == []


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (replace(PREFILL_BOUND, wanted=None), "no launcher is attached"),
        (replace(PREFILL_BOUND, num_groups=2), "there are 2 pairing groups"),
        (
            with_workers(PREFILL_BOUND, WorkerCounts(2, 1)),
            "the launcher keeps 1 decode worker, and one has to stay",
        ),
        (
            with_workers(DECODE_BOUND, WorkerCounts(1, 2)),
            "the launcher keeps 1 prefill worker, and one has to stay",
        ),
        (  # another one was started by hand
            replace(DECODE_BOUND, wanted=WorkerCounts(1, 2)),
            "the launcher keeps 1 prefill worker, and one has to stay",
        ),
    ],
)
def test_what_is_in_the_way_is_said_once_in_a_cool_down(sample: Sample, words: str) -> None:
    found = observe(RebalancePolicy(PATIENCE_S), [sample] * 60)
    assert [second for second, _ in found] == [10, 50]
    assert all(isinstance(hold, Hold) and hold.obstacle == words for _, hold in found)


def test_an_unsettled_cluster_begins_the_patience_anew() -> None:
    samples = [PREFILL_BOUND] * 9 + [UNSETTLED] + [PREFILL_BOUND] * 15
    assert [second for second, _ in moves(RebalancePolicy(PATIENCE_S), samples)] == [20]


def test_other_numbers_of_workers_begin_it_anew() -> None:
    other = with_workers(PREFILL_BOUND, WorkerCounts(2, 3))
    assert [second for second, _ in moves(RebalancePolicy(PATIENCE_S), [PREFILL_BOUND] * 9 + [other] * 15)] == [19]


def test_so_does_a_coordinator_that_stood_still() -> None:
    policy = RebalancePolicy(PATIENCE_S)
    assert observe(policy, [PREFILL_BOUND] * 9) == []
    assert [second for second, _ in observe(policy, [PREFILL_BOUND] * 15, START_S + 20)] == [10]


def test_the_way_back_takes_the_cool_down_and_the_patience() -> None:
    policy = RebalancePolicy(PATIENCE_S)
    found = observe(policy, [PREFILL_BOUND] * 11 + [with_workers(DECODE_BOUND, WorkerCounts(3, 1))] * 45)
    assert [type(decision) for _, decision in found] == [Move, Hold, Move]
    (first, _), (_, hold), (last, back) = found
    assert (first, last) == (10, 10 + COOL_DOWN * PATIENCE_S)
    assert isinstance(hold, Hold) and hold.obstacle == "the last move was less than 40 s ago"
    assert isinstance(back, Move) and back.after == TWO_EACH
    late = [PREFILL_BOUND] * 11 + [with_workers(QUIET, WorkerCounts(3, 1))] * 60
    late += [with_workers(DECODE_BOUND, WorkerCounts(3, 1))] * 12
    found = observe(RebalancePolicy(PATIENCE_S), late)
    (_, _), (last, _) = found
    assert last - (11 + 60) == pytest.approx(0.75 * PATIENCE_S, abs=1.0)  # most of a window shows it


# ---- properties ------------------------------------------------------------------------------------------------------

PHASES = st.lists(
    st.tuples(st.sampled_from([Role.PREFILL, Role.DECODE, None]), st.integers(1, 60)), min_size=1, max_size=12
)


def walk(
    phases: Sequence[tuple[Role | None, int]], counts: WorkerCounts, start_s: int = 3
) -> Iterator[tuple[int, Move]]:
    """A cluster that obeys: after a move it is unsettled for a while. The moves, with the number of their phase."""
    policy, now_s, settled_s = RebalancePolicy(PATIENCE_S), START_S, START_S
    for number, (bound, seconds) in enumerate(phases):
        for _ in range(seconds):
            now_s += 1
            sample = with_workers(QUIET if bound is None else BOUND[bound], counts)
            decision = policy.observe(replace(sample, is_settled=now_s >= settled_s), now_s)
            if isinstance(decision, Move):
                counts, settled_s = decision.after, now_s + start_s
                yield number, decision


@given(PHASES, st.integers(1, 4), st.integers(1, 4))
def test_the_total_stays_and_no_role_is_left_without_workers(
    phases: list[tuple[Role | None, int]], prefill: int, decode: int
) -> None:
    counts = WorkerCounts(prefill, decode)
    for _, move in walk(phases, counts):
        assert move.before == counts
        counts = move.after
        assert min(counts.prefill, counts.decode) >= 1
        assert counts.prefill + counts.decode == prefill + decode
        assert counts.of(move.to) == move.before.of(move.to) + 1


@given(st.lists(st.tuples(st.sampled_from(list(BOUND)), st.integers(1, int(COOL_DOWN * PATIENCE_S))), max_size=12))
def test_a_phase_that_is_no_longer_than_the_cool_down_has_at_most_one_move(phases: list[tuple[Role, int]]) -> None:
    numbers = [number for number, _ in walk(phases, WorkerCounts(4, 4))]
    assert len(numbers) == len(set(numbers))


@given(st.integers(2, 9), st.floats(0.3, 0.7), st.booleans())
def test_load_that_turns_faster_than_the_patience_moves_nobody(period: int, part: float, is_reversed: bool) -> None:
    first = min(period - 1, max(1, round(part * period)))
    phases = [(Role.PREFILL, first), (Role.DECODE, period - first)] * 40
    if is_reversed:
        phases.reverse()
    assert list(walk(phases, TWO_EACH)) == []


@given(st.integers(2, 9), st.integers(1, 8))
def test_such_load_never_moves_a_worker_back(period: int, first: int) -> None:
    phases = [(Role.PREFILL, min(first, period - 1)), (Role.DECODE, max(1, period - first))] * 60
    assert len({move.to for _, move in walk(phases, WorkerCounts(4, 4))}) <= 1


@given(st.lists(st.sampled_from([PREFILL_BOUND, DECODE_BOUND, QUIET, UNSETTLED]), max_size=200))
def test_moves_are_far_apart_and_have_reasons(samples: list[Sample]) -> None:
    found = moves(RebalancePolicy(PATIENCE_S), samples)
    for second, move in found:
        window = samples[second - int(PATIENCE_S) : second + 1]
        assert UNSETTLED not in window
        assert window.count(BOUND[move.to]) >= 0.75 * len(window)
    seconds = [second for second, _ in found]
    assert all(after - before >= COOL_DOWN * PATIENCE_S for before, after in pairwise(seconds))


# ---- one look --------------------------------------------------------------------------------------------------------

P0, P1 = register("prefill-0", Role.PREFILL), register("prefill-1", Role.PREFILL)
D0, D1 = register("decode-0", Role.DECODE), register("decode-1", Role.DECODE)
ALL = (P0, P1, D0, D1)
KEPT = tuple(KeptWorker(one.peer.name, one.role, False) for one in ALL)
REPORT = LauncherReport("one", "127.0.0.1", True, TWO_EACH, 0, KEPT)
NOTHING = Backlog(None, 0, 0)
QUEUED = Backlog(request("next"), 3, 0)
Table = dict[WorkerId, tuple[Assigned, ...]]


def cluster(*registers: Register) -> Registry:
    registry = Registry(3.0)
    for one in registers:
        registry.join(one, 0.0)
    for prefill in registers:
        for decode in registers:
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE:
                registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))
    return registry


def look(
    backlog: Backlog, table: Table | None = None, *, registry: Registry | None = None, report: LauncherReport = REPORT
) -> Sample:
    return take_sample((registry or cluster(*ALL)).snapshot(0.0, table or {}), backlog, report)


def rows(*request_ids: str, awaits: bool = False) -> tuple[Assigned, ...]:
    return tuple(assigned(request_id, awaits=awaits) for request_id in request_ids)


def test_a_quiet_cluster() -> None:
    assert look(NOTHING) == replace(QUIET, has_decode_room=False)
    assert look(NOTHING).bottleneck is None


def test_requests_that_wait_while_decode_workers_generate_all_they_can() -> None:
    table = {D0.peer.worker: rows("a", "b", "c", "d"), D1.peer.worker: rows("e", "f", "g", "h")}  # four slots each
    sample = look(QUEUED, table)
    assert (sample.num_waiting, sample.prefill_busy, sample.decode_held) == (3, 0, 2.0)
    assert sample.bottleneck is Role.DECODE


def test_decode_workers_without_blocks() -> None:
    large = (assigned("a", max_kv_tokens=16 * 64),)
    sample = look(QUEUED, {D0.peer.worker: large, D1.peer.worker: large})
    assert (sample.decode_held, sample.bottleneck) == (2.0, Role.DECODE)


def test_decode_slots_that_wait_for_prefill_are_prefills_fault() -> None:
    table = {
        P0.peer.worker: rows("a", "b"),
        P1.peer.worker: rows("e"),
        D0.peer.worker: rows("a", "b") + rows("c", "d", awaits=True),
        D1.peer.worker: rows("e", "f") + rows("g", "h", awaits=True),
    }
    sample = look(QUEUED, table)
    assert (sample.prefill_busy, sample.decode_held) == (2, 0.25)  # only f generates
    assert sample.bottleneck is Role.PREFILL


def test_reservations_that_no_prefill_worker_has_room_for() -> None:
    busy = {P0.peer.worker: rows("a"), P1.peer.worker: rows("b"), D0.peer.worker: rows("a", "b")}
    assert look(Backlog(None, 0, 2), busy).bottleneck is Role.PREFILL
    del busy[P1.peer.worker]
    assert look(Backlog(None, 0, 2), busy).bottleneck is None


def test_a_decode_worker_that_refused_has_no_room() -> None:
    registry = cluster(*ALL)
    registry.refused(D0.peer.worker)
    assert look(QUEUED, registry=registry).has_decode_room
    registry.refused(D1.peer.worker)
    assert not look(QUEUED, registry=registry).has_decode_room


def test_who_makes_a_cluster_unsettled() -> None:
    assert look(NOTHING).is_settled
    assert not look(NOTHING, registry=cluster(P0, P1, D0)).is_settled  # one has not joined, or is lost
    draining = cluster(*ALL)
    draining.heartbeat(P1.peer.worker, heartbeat(draining=True), 0.0)
    assert not look(NOTHING, registry=draining).is_settled
    starting = cluster(*ALL)
    starting.join(register("decode-9", Role.DECODE), 0.0)
    assert not look(NOTHING, registry=starting).is_settled
    assert not look(NOTHING, report=replace(REPORT, wanted=WorkerCounts(1, 3))).is_settled  # asked for, not taken yet
    leaving = (*KEPT, KeptWorker("decode-2", Role.DECODE, True))
    assert not look(NOTHING, report=replace(REPORT, workers=leaving)).is_settled


def test_workers_that_nobody_keeps_count_and_do_not_unsettle() -> None:
    by_hand = register("by-hand", Role.DECODE)
    registry = cluster(*ALL, by_hand)
    sample = look(NOTHING, registry=registry)
    assert (sample.is_settled, sample.ready, sample.wanted) == (True, WorkerCounts(2, 3), TWO_EACH)
    registry.lose(by_hand.peer.worker, proven=False)
    assert look(NOTHING, registry=registry).is_settled


def test_pairing_groups_are_counted() -> None:
    other = (replace(P1, fingerprint=OTHER_FINGERPRINT), replace(D1, fingerprint=OTHER_FINGERPRINT))
    assert look(NOTHING, registry=cluster(P0, D0, *other)).num_groups == 2


def test_without_a_launcher() -> None:
    sample = take_sample(cluster(*ALL).snapshot(0.0, {}), NOTHING, None)
    assert (sample.is_settled, sample.wanted) == (True, None)
