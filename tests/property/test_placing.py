"""Rounds of placing against the plain rules: who is placed, who waits, and whom those that wait keep from others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.effects import Assigned, Effect
from coordinator.placing import Placer
from coordinator.policies import LeastWork
from coordinator.prefix_source import SourceRule
from coordinator.queue import RequestQueue
from coordinator.router import Router
from coordinator.snapshot import ClusterSnapshot, WorkerView
from coordinator.tracker import Tracker
from loopline.bench import router_plain
from loopline.identity import Role, WorkerId
from loopline.request import Limits, Request
from tests.property.test_router import requests, snapshots
from tests.unit.coordinator.builders import VirtualClock

LIMITS = Limits(vocab_size=1000, context_tokens=1000, max_loops=4, arena_tokens=1000)
queues = st.lists(requests(), min_size=1, max_size=12, unique_by=lambda one: one.request_id)


def placed(queue: Iterable[Request], snapshot: ClusterSnapshot) -> list[str | None]:
    """The name of the worker that each got in one round; None: it waits."""
    clock, waiting = VirtualClock(), RequestQueue(100)
    tracker = Tracker(clock)
    for one in queue:
        tracker.admit(one, 100.0)
        waiting.put(one.request_id, clock.now_s())

    def carry_out(effects: Iterable[Effect]) -> None:
        """Nobody listens."""

    placer = Placer(clock, tracker, waiting, Router(LeastWork()), carry_out, SourceRule())
    placer.place((), snapshot, LIMITS, None)
    workers = [tracker.decode_worker(one.request_id) for one in queue]
    names = {view.worker: view.peer.name for view in snapshot.workers}
    return [None if worker is None else names[worker] for worker in workers]


def row_on(one: Request, view: WorkerView) -> Assigned:
    """As the tracker has it right after Reserve."""
    is_whole = view.role is Role.UNIFIED
    work = (one.params.max_tokens + one.num_known_tokens * is_whole) * one.params.loops
    known = one.num_known_tokens
    return Assigned(one.request_id, known, one.max_kv_tokens, work, not is_whole, num_started_tokens=known)


def place_round(
    queue: Sequence[Request], snapshot: ClusterSnapshot, row_on: Callable[[Request, WorkerView], Assigned]
) -> list[WorkerView | None]:
    """Who gets each of the queue's requests in one round, the one with the least work first: a request without room
    keeps whoever could run it from all behind it. `row_on`: its row once it is given."""
    given: list[WorkerView | None] = []
    held: set[WorkerId] = set()
    empty = emptied(snapshot)
    for request in queue:
        able = [view for view in router_plain.decode_candidates(request, snapshot) if view.worker not in held]
        chosen = min(able, key=router_plain.preference, default=None)
        given.append(chosen)
        if chosen is None:
            held |= {view.worker for view in router_plain.decode_candidates(request, empty)}
        else:
            snapshot = router_plain.with_request(snapshot, {chosen.worker: row_on(request, chosen)})
    return given


def emptied(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """The same workers with nothing to do, none of which has said "no room"."""
    return replace(snapshot, workers=tuple(replace(view, assigned=(), refused=False) for view in snapshot.workers))


@given(snapshot=snapshots(), queue=queues)
def test_a_round_places_what_the_plain_rules_place(snapshot: ClusterSnapshot, queue: list[Request]) -> None:
    expected = place_round(queue, snapshot, row_on)
    assert placed(queue, snapshot) == [view and view.peer.name for view in expected]


@given(snapshot=snapshots(), queue=queues)
def test_who_is_first_in_line_for_a_worker_is_passed_by_nobody(snapshot: ClusterSnapshot, queue: list[Request]) -> None:
    """Whatever comes behind a request changes nothing for it, and what waits gets nothing that one before it could
    use."""
    names = placed(queue, snapshot)
    for end in range(len(queue)):
        assert placed(queue[:end], snapshot) == names[:end]


@given(snapshot=snapshots(), queue=queues)
def test_what_nobody_here_could_run_holds_back_nobody(snapshot: ClusterSnapshot, queue: list[Request]) -> None:
    empty = emptied(snapshot)
    could = [one for one in queue if router_plain.decode_candidates(one, empty)]
    names = dict(zip((one.request_id for one in queue), placed(queue, snapshot), strict=True))
    assert [names[one.request_id] for one in could] == placed(could, snapshot) if could else not any(names.values())
