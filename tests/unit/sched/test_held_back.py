"""A policy that holds requests back: their chunks wait, others' do not, and they go on where they stopped."""

from collections.abc import Collection

from loopline.kv.ledger import Allocation
from loopline.sched.reservations import Reservations
from tests.support.scheduling import HoldPolicy, make, request, run_scripted


class Holding(HoldPolicy):
    """Holds back the requests whose names it has."""

    def __init__(self, *names: str) -> None:
        self.held = set(names)

    def may_compute(self, request_id: str) -> bool:
        return request_id not in self.held


class Sharing(Holding):
    """Requests with one beginning compute it once."""

    shares_prefixes = True


def test_a_held_request_is_skipped_and_others_go_on() -> None:
    policy = Holding()
    ledger, scheduler = make(policy=policy)
    for name in ("held", "other"):
        assert scheduler.submit(request(name, 20, 5)) is None
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["held", "other"]
    scheduler.commit(plan, run_scripted(plan))
    policy.held.add("held")
    rows = []
    while (plan := scheduler.plan()) is not None:
        assert plan.request_ids == ["other"]
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert [row.request_id for row in rows] == ["other"]
    assert scheduler.has_work
    policy.held.clear()
    chunks = []
    while (plan := scheduler.plan()) is not None:
        chunks += [(one.request_id, one.num_computed) for one in scheduler.commit(plan, run_scripted(plan)).chunks]
    assert chunks == [("held", 16), ("held", 20)]
    for name in ("held", "other"):
        allocation = scheduler.remove(name)
        assert allocation is not None
        ledger.release(allocation)
    ledger.audit()


def test_a_held_request_takes_nothing_of_the_steps_budget() -> None:
    _, scheduler = make(policy=Holding("first"))
    for name in ("first", "second", "third", "fourth"):
        assert scheduler.submit(request(name, 8, 5)) is None
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["second", "third", "fourth"]
    assert [run.num_tokens for run in plan.runs] == [8, 8, 8]


def test_a_held_request_can_be_removed() -> None:
    ledger, scheduler = make(policy=Holding("held"))
    assert scheduler.submit(request("held", 8, 5)) is None
    assert scheduler.plan() is None
    assert scheduler.has_work
    allocation = scheduler.remove("held")
    assert allocation is not None
    ledger.release(allocation)
    assert not scheduler.has_work
    ledger.audit()


def test_nobody_waits_for_the_prefix_of_a_held_request() -> None:
    """Three with one beginning: while the first computes the others wait; when it is held one of them computes it."""
    policy = Sharing()
    ledger, scheduler = make(policy=policy, parts=("weights",))
    for name in ("first", "second", "third"):
        assert scheduler.submit(request(name, 40, 5)) is None
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["first"]
    scheduler.commit(plan, run_scripted(plan))
    policy.held.add("first")
    rows = []
    while (plan := scheduler.plan()) is not None:
        assert "first" not in plan.request_ids
        assert len(plan.request_ids) == 1 or rows  # the third waits for the second
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert [row.request_id for row in rows] == ["second", "third"]
    policy.held.clear()
    while (plan := scheduler.plan()) is not None:
        assert plan.request_ids == ["first"]
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert rows[-1].request_id == "first"
    for name in ("first", "second", "third"):
        allocation = scheduler.remove(name)
        assert allocation is not None
        ledger.release(allocation)
    ledger.audit()


class OneAtATime(HoldPolicy):
    """Lets nobody in while a request is reserved."""

    reserved: Reservations

    def may_start(self, request_id: str, running: Collection[str], max_running: int, total_blocks: int) -> bool:
        return not len(self.reserved)


def test_a_reservation_that_starts_lets_in_who_waited_for_it() -> None:
    """No count of running requests or of blocks changes then."""
    policy = OneAtATime()
    _, scheduler = make(policy=policy)
    policy.reserved = scheduler.reserved
    reserved = scheduler.reserve(request("reserved", 8, 5))
    assert isinstance(reserved, Allocation)
    assert scheduler.submit(request("waits", 8, 5)) is None
    assert scheduler.plan() is None and scheduler.num_waiting == 1
    scheduler.start_reserved(reserved)
    plan = scheduler.plan()
    assert plan is not None and sorted(plan.request_ids) == ["reserved", "waits"]
