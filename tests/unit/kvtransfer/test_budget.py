"""The budget of bytes in flight by example."""

import pytest

from kvtransfer.budget import MAX_PASSES, BudgetLimits, PushBudget, WaitingPush
from kvtransfer.commands import Push
from loopline.errors import InvariantBroken
from loopline.identity import HandoffKey
from loopline.messages import PushRange
from loopline.settings import TransferSettings

GIB = 2**30
LIMITS = BudgetLimits(100, 50, 50)


def push(peer: str, num_bytes: int, request: str = "r", since_s: float = 0.0) -> WaitingPush:
    return WaitingPush(Push(HandoffKey(request, 0), PushRange(0, 0, 1), (0,)), peer, num_bytes, since_s)


def taken(budget: PushBudget) -> list[tuple[str, int]]:
    """Everything that may go now."""
    found = []
    while (one := budget.take(0.0)) is not None:
        found.append((one.peer, one.num_bytes))
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (TransferSettings(), BudgetLimits(2 * GIB, GIB, GIB // 4)),
        (TransferSettings(in_flight_limit_bytes=100), BudgetLimits(100, 50, 50)),
        (TransferSettings(in_flight_limit_bytes=100, peer_share=0.8), BudgetLimits(100, 80, 20)),
        (TransferSettings(in_flight_limit_bytes=100, peer_share=1.0), BudgetLimits(100, 100, 100)),
        (TransferSettings(in_flight_limit_bytes=1, peer_share=0.1), BudgetLimits(1, 1, 1)),
    ],
)
def test_a_push_fits_beside_a_peer_that_uses_its_share(settings: TransferSettings, expected: BudgetLimits) -> None:
    assert BudgetLimits.of(settings) == expected


def test_one_push_may_always_go_however_large() -> None:
    budget = PushBudget(LIMITS)
    for num_bytes in (5_700, 1):
        budget.add(push("a", num_bytes))
    assert taken(budget) == [("a", 5_700)]
    assert budget.is_full
    budget.ended("a", 5_700)
    assert taken(budget) == [("a", 1)]


def test_a_peer_has_its_share_and_others_the_rest() -> None:
    budget = PushBudget(LIMITS)
    for peer in ("a", "b", "c"):
        for _ in range(3):
            budget.add(push(peer, 20))
    assert taken(budget) == [("a", 20), ("b", 20), ("c", 20), ("a", 20), ("b", 20)]
    assert budget.crowded() == {"a", "b", "c"}
    assert budget.is_full
    budget.ended("c", 20)
    assert taken(budget) == [("c", 20)]


def test_a_large_push_is_passed_over_so_often_and_no_more() -> None:
    budget = PushBudget(LIMITS)
    for one in (push("s", 50), push("t", 20)):
        budget.add(one)
    assert taken(budget) == [("s", 50), ("t", 20)]
    budget.add(push("big", 50))
    for _ in range(MAX_PASSES):
        budget.add(push("tiny", 1))
        assert taken(budget) == [("tiny", 1)]
        budget.ended("tiny", 1)
    budget.add(push("tiny", 1))
    assert taken(budget) == []
    budget.ended("t", 20)
    assert taken(budget) == [("big", 50)]
    budget.ended("s", 50)
    assert taken(budget) == [("tiny", 1)]


def test_time_waited_is_summed() -> None:
    budget = PushBudget(LIMITS)
    budget.add(push("a", 40, since_s=1.0))
    budget.add(push("a", 40, "dropped", since_s=1.0))
    assert budget.take(1.0) is not None
    assert budget.take(4.0) is None
    assert [one.command.key.request_id for one in budget.drop(HandoffKey("dropped", 0), 6.0)] == ["dropped"]
    counts = budget.counts()
    assert (counts.in_flight_bytes, counts.limit_bytes, counts.num_waiting, counts.waited_s) == (40, 100, 0, 5.0)


def test_more_than_is_in_flight_cannot_end() -> None:
    budget = PushBudget(LIMITS)
    budget.add(push("a", 10))
    assert budget.take(0.0) is not None
    with pytest.raises(InvariantBroken, match="11 bytes"):
        budget.ended("a", 11)
    assert budget.total == 10
