"""The budget of bytes in flight against plain lists, with pushes, ends and closes in any order."""

import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.budget import BudgetLimits, PushBudget, WaitingPush
from kvtransfer.commands import Push
from loopline.identity import HandoffKey
from loopline.messages import PushRange

EXAMPLES = 3000 if os.environ.get("LOOPLINE_SOAK") == "1" else 150
PEERS = ("a", "b", "c", "d")


@dataclass
class Oracle:
    """The same rules over lists that are searched from the front each time."""

    limits: BudgetLimits
    max_passes: int
    waiting: list[WaitingPush] = field(default_factory=list)  # in order of arrival
    in_flight: list[WaitingPush] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # whose turn comes first
    passed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PEERS, 0))
    overtaken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PEERS, 0))
    """Pushes of others since a peer's first push could have gone but for the limit in all: bounds starvation."""

    def head(self, peer: str) -> WaitingPush:
        return next(push for push in self.waiting if push.peer == peer)

    def fits(self, push: WaitingPush, others: list[WaitingPush], limit: int) -> bool:
        return not others or sum(other.num_bytes for other in others) + push.num_bytes <= limit

    def fits_peer(self, peer: str) -> bool:
        return self.fits(self.head(peer), [p for p in self.in_flight if p.peer == peer], self.limits.peer_bytes)

    def add(self, push: WaitingPush) -> None:
        self.waiting.append(push)
        if push.peer not in self.order:
            self.order.append(push.peer)

    def next(self) -> WaitingPush | None:
        passed: list[str] = []
        for peer in self.order:
            push = self.head(peer)
            if not self.fits_peer(peer):
                continue
            if self.fits(push, self.in_flight, self.limits.total_bytes):
                for other in passed:
                    self.passed[other] += 1
                return push
            if self.passed[peer] >= self.max_passes:
                return None
            passed.append(peer)
        return None

    def post(self, push: WaitingPush) -> None:
        for peer in self.order:
            self.overtaken[peer] += peer != push.peer and self.fits_peer(peer)
            assert self.overtaken[peer] <= self.max_passes + len(PEERS), f"{peer} starves"
        self.leave(push)
        self.order = [peer for peer in self.order if peer != push.peer]
        if any(other.peer == push.peer for other in self.waiting):
            self.order.append(push.peer)
        self.in_flight.append(push)

    def leave(self, push: WaitingPush) -> None:
        if push is self.head(push.peer):
            self.passed[push.peer] = self.overtaken[push.peer] = 0
        self.waiting.remove(push)
        self.order = [peer for peer in self.order if any(other.peer == peer for other in self.waiting)]

    def check(self, budget: PushBudget) -> None:
        by_peer = {
            peer: sum(push.num_bytes for push in self.in_flight if push.peer == peer)
            for peer in {push.peer for push in self.in_flight}
        }
        assert budget.by_peer == by_peer
        assert budget.total == sum(by_peer.values())
        assert budget.counts().num_waiting == len(self.waiting)
        assert budget.total <= self.limits.total_bytes or len(self.in_flight) == 1
        for peer, num_bytes in by_peer.items():
            alone = [push for push in self.in_flight if push.peer == peer]
            assert num_bytes <= self.limits.peer_bytes or len(alone) == 1
        full = {peer for peer, num_bytes in by_peer.items() if num_bytes >= self.limits.peer_bytes}
        assert budget.crowded() == full | {push.peer for push in self.waiting}


class Run:
    """Budget and oracle side by side. Request `n` goes to peer `n % 4`; its generations come one after the other."""

    def __init__(self, limits: BudgetLimits, max_passes: int) -> None:
        self.budget, self.oracle = PushBudget(limits, max_passes), Oracle(limits, max_passes)
        self.generation: dict[int, int] = {}
        self.num_added = self.num_dropped = 0
        self.posted: list[WaitingPush] = []
        self.now_s = 0.0

    def add(self, request: int, num_bytes: int) -> None:
        key = HandoffKey(f"r{request}", self.generation.get(request, 0))
        command = Push(key, PushRange(self.num_added, 0, 1), (0,))
        push = WaitingPush(command, PEERS[request % len(PEERS)], num_bytes, self.now_s)
        self.num_added += 1
        self.budget.add(push)
        self.oracle.add(push)

    def take(self) -> bool:
        expected = self.oracle.next()
        got = self.budget.take(self.now_s)
        assert got is expected
        if got is None:
            return False
        earlier = [push for push in self.oracle.waiting if push.peer == got.peer]
        assert earlier[0] is got, "not first in, first out"
        self.oracle.post(got)
        self.posted.append(got)
        return True

    def end(self, index: int) -> bool:
        if not self.oracle.in_flight:
            return False
        push = self.oracle.in_flight.pop(index % len(self.oracle.in_flight))
        self.budget.ended(push.peer, push.num_bytes)
        return True

    def step(self, step: str, first: int, second: int) -> None:
        self.now_s += 1.0
        match step:
            case "add" | "add and take":
                self.add(first, second)
            case "end" | "end and take":
                self.end(first)
            case "close":
                self.close(first, only_older=bool(second))
        if "take" in step:
            self.take()
        self.oracle.check(self.budget)

    def drain(self) -> None:
        """Every push ends, and all that waits is posted."""
        while self.take() or self.end(0):
            self.oracle.check(self.budget)
        assert (self.budget.total, self.budget.by_peer, self.budget.crowded()) == (0, {}, frozenset())
        assert len(self.posted) + self.num_dropped == self.num_added
        assert self.budget.counts().num_waiting == 0
        assert not self.budget.is_full

    def close(self, request: int, only_older: bool) -> None:
        """Of the present generation too, or of older ones alone, as the start of a new one does."""
        generation = self.generation.get(request, 0)
        self.generation[request] = generation + 1
        key = HandoffKey(f"r{request}", generation - only_older)
        gone = [
            push
            for push in self.oracle.waiting
            if push.command.key.request_id == key.request_id and push.command.key.generation <= key.generation
        ]
        assert self.budget.drop(key, self.now_s) == gone
        for push in gone:
            self.oracle.leave(push)
        self.num_dropped += len(gone)
        assert not self.budget.waits(key)


SIZES = st.sampled_from((1, 2, 5, 6, 9, 10, 30))
STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 7), SIZES),
    st.tuples(st.just("add and take"), st.integers(0, 7), SIZES),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("end and take"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("close"), st.integers(0, 7), st.integers(0, 1)),
)
LIMITS = st.sampled_from([(10, 10), (10, 9), (10, 5), (20, 10), (3, 2), (1, 1)]).map(
    lambda pair: BudgetLimits(*pair, 1)
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(LIMITS, st.integers(0, 2), st.lists(STEPS, min_size=20, max_size=120))
def test_any_order_keeps_limits_and_turns_and_drains(
    limits: BudgetLimits, max_passes: int, steps: list[tuple[str, int, int]]
) -> None:
    run = Run(limits, max_passes)
    for step, first, second in steps:
        run.step(step, first, second)
    run.drain()


@pytest.mark.parametrize("seed", range(EXAMPLES // 5))
def test_a_long_run_under_contention(seed: int) -> None:
    chance = random.Random(seed)
    total = chance.randint(8, 20)
    run = Run(BudgetLimits(total, chance.randint(total // 2, total), 1), max_passes=seed % 4)
    for _ in range(400):
        is_crowded = len(run.oracle.waiting) > 10
        step = chance.choice(
            ("end and take", "take", "close") if is_crowded else ("add and take", "add", "take", "end")
        )
        if step == "close" and chance.random() < 0.7:
            step = "end and take"
        size = chance.choice((1, 1, 2, total // 2, total - 1))
        is_add = step.startswith("add")
        run.step(step, chance.randrange(8), size if is_add else chance.randrange(2))
    run.drain()


@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20)), max_size=60), st.integers(40, 80))
def test_a_peer_that_never_ends_anything_does_not_hold_up_others(adds: list[tuple[int, int]], total: int) -> None:
    """Where no push is larger than half the budget, as the cap on a push sees to, and a peer may have half of it."""
    run = Run(BudgetLimits(total, total // 2, total // 2), max_passes=2)
    for request, num_bytes in adds:
        run.add(request, num_bytes)
    moved = True
    while moved:
        moved = run.take()
        ends = [index for index, push in enumerate(run.oracle.in_flight) if push.peer != "a"]
        moved |= bool(ends) and run.end(ends[0])
    assert {push.peer for push in run.oracle.waiting} <= {"a"}
    assert {push.peer for push in run.oracle.in_flight} <= {"a"}
