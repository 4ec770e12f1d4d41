import pytest

from coordinator.queue import HEAD_START_S, Outflow, RequestQueue
from loopline.errors import Overloaded


def filled(*names: str, limit: int = 3) -> RequestQueue:
    queue = RequestQueue(limit)
    for name in names:
        queue.put(name, 0.0)
    return queue


def test_first_in_first_out() -> None:
    queue = filled("a", "b", "c")
    queue.remove("b", 0.0)
    queue.remove("nobody", 0.0)
    assert list(queue) == ["a", "c"]


def test_past_the_limit_both_numbers_are_named() -> None:
    queue = filled("a", "b", limit=2)
    with pytest.raises(Overloaded, match=r"2 requests are waiting; the queue's limit is 2; try again in 1 s") as caught:
        queue.put("c", 0.0)
    assert caught.value.retry_after_s == 1.0
    assert list(queue) == ["a", "b"]


def test_a_request_that_is_being_read_has_its_place() -> None:
    queue = filled("a", limit=2)
    queue.hold_place(0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        queue.hold_place(0.0)
    queue.give_place_back()
    queue.put("b", 0.0)
    assert list(queue) == ["a", "b"]


def test_recovered_requests_go_first_by_arrival_and_past_the_limit() -> None:
    queue = RequestQueue(limit=1)
    queue.put("new", 0.0, priority=10)
    queue.put_back("second", order=7, now_s=1.0)
    queue.put_back("first", order=3, now_s=2.0)
    assert list(queue) == ["first", "second", "new"]
    assert len(queue) == 3
    queue.remove("first", 2.0)
    assert list(queue) == ["second", "new"]


def test_a_higher_priority_goes_first_and_passes_nobody_for_ever() -> None:
    queue = RequestQueue(limit=9)
    queue.put("low", 0.0, priority=-1)
    queue.put("usual", 0.0)
    queue.put("high", 1.0, priority=1)
    queue.put("high too", 2.0, priority=1)
    assert list(queue) == ["high", "high too", "usual", "low"]
    queue.put("late", 2 * HEAD_START_S - 1.0, priority=1)
    queue.put("too late", 2 * HEAD_START_S + 1.0, priority=1)
    assert list(queue) == ["high", "high too", "usual", "late", "low", "too late"]


def test_it_may_be_changed_while_it_is_walked() -> None:
    queue = filled("a", "b", "c")
    for name in queue:
        queue.remove(name, 0.0)
    assert len(queue) == 0


def test_who_is_refused_is_told_when_a_place_will_be_free() -> None:
    outflow = Outflow()
    outflow.begin(0.0)
    assert outflow.next_retry_s(0.0, 4) == 1.0  # nothing is known yet
    for number in range(1, 11):
        outflow.leave(number / 2, is_empty=False)  # two a second
    told = [outflow.next_retry_s(5.0, 4) for _ in range(6)]
    assert told == pytest.approx([0.5, 1.0, 1.5, 2.0, 0.5, 1.0])  # a place each, and no later than those that wait
    assert outflow.next_retry_s(10.0, 4) == pytest.approx(1.0)  # it stands still since: fewer a second


def test_the_rate_is_that_of_a_queue_that_is_not_empty() -> None:
    outflow = Outflow()
    outflow.begin(0.0)
    outflow.leave(3600.0, is_empty=True)
    outflow.begin(7200.0)
    for _ in range(20):
        outflow.leave(7200.0, is_empty=False)
    outflow.undo()
    outflow.undo()
    assert outflow.next_retry_s(7200.0, 100) == pytest.approx(1 / 18)
