import pytest

from coordinator.queue import RequestQueue
from loopline.errors import Overloaded


def test_first_in_first_out() -> None:
    queue = RequestQueue(limit=3)
    for name in ("a", "b", "c"):
        queue.put(name)
    queue.remove("b")
    queue.remove("nobody")
    assert list(queue) == ["a", "c"]


def test_past_the_limit_both_numbers_are_named() -> None:
    queue = RequestQueue(limit=2)
    queue.put("a")
    queue.put("b")
    with pytest.raises(Overloaded, match=r"2 requests are waiting; the queue's limit is 2"):
        queue.put("c")
    assert list(queue) == ["a", "b"]


def test_recovered_requests_go_first_by_arrival_and_past_the_limit() -> None:
    queue = RequestQueue(limit=1)
    queue.put("new")
    queue.put_back("second", order=7)
    queue.put_back("first", order=3)
    assert list(queue) == ["first", "second", "new"]
    assert len(queue) == 3
    queue.remove("first")
    assert list(queue) == ["second", "new"]


def test_it_may_be_changed_while_it_is_walked() -> None:
    queue = RequestQueue(limit=3)
    for name in ("a", "b", "c"):
        queue.put(name)
    for name in queue:
        queue.remove(name)
    assert len(queue) == 0
