"""The coordinator's queue against a plain list that is sorted anew at every look."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.queue import HEAD_START_S, RequestQueue
from loopline.errors import Overloaded

LIMIT = 12
PRIORITIES = st.integers(-2, 2)


@dataclass
class Waiting:
    name: str
    order: int
    came_s: float
    priority: int
    is_recovered: bool


class QueueMachine(RuleBasedStateMachine):
    """`oracle` has what waits, in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(LIMIT)
        self.oracle: list[Waiting] = []
        self.left: list[Waiting] = []  # to a worker; may come back
        self.now_s = 0.0
        self.arrivals = 0

    def in_order(self) -> list[str]:
        recovered = sorted((one for one in self.oracle if one.is_recovered), key=lambda one: one.order)
        new = [one for one in self.oracle if not one.is_recovered]
        new.sort(key=lambda one: (one.came_s - HEAD_START_S * one.priority, one.order))
        return [one.name for one in (*recovered, *new)]

    def take(self, name: str) -> Waiting:
        found = next(one for one in self.oracle if one.name == name)
        self.oracle.remove(found)
        return found

    @rule(seconds=st.sampled_from([0.0, 0.5, 20.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(priority=PRIORITIES)
    def put(self, priority: int) -> None:
        name = f"r{self.arrivals}"
        try:
            self.queue.put(name, self.now_s, priority)
        except Overloaded as error:
            assert len(self.oracle) >= LIMIT
            assert error.retry_after_s is not None and 0 < error.retry_after_s <= 60
        else:
            assert len(self.oracle) < LIMIT
            self.oracle.append(Waiting(name, self.arrivals, self.now_s, priority, is_recovered=False))
            self.arrivals += 1

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        one = self.left.pop(data.draw(st.integers(0, len(self.left) - 1)))
        one.is_recovered = True
        self.queue.put_back(one.name, one.order, self.now_s)
        self.oracle.append(one)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def remove_any(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.in_order()))
        self.queue.remove(name, self.now_s)
        self.left.append(self.take(name))

    @rule(data=st.data(), most=st.integers(0, 20))
    def walk_and_remove_some(self, data: st.DataObject, most: int) -> None:
        expected = self.in_order()[:most]
        walked = []
        for name in self.queue:
            if len(walked) == most:
                break
            walked.append(name)
            if data.draw(st.booleans()):
                self.queue.remove(name, self.now_s)
                self.left.append(self.take(name))
        assert walked == expected

    @rule()
    def remove_what_is_not_there(self) -> None:
        self.queue.remove("nobody", self.now_s)

    @invariant()
    def is_the_oracle(self) -> None:
        assert list(self.queue) == self.in_order()
        assert len(self.queue) == len(self.oracle)


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestRequestQueue = QueueMachine.TestCase
