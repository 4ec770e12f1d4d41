"""The engine thread: events in order, a bug in one event costs that event, a bug of the engine ends the thread and is
told."""

import threading
from collections.abc import Callable
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loopline.engine.engine import Engine
from loopline.engine.step_counts import PromptRate
from loopline.errors import InvariantBroken
from loopline.identity import BlockCounts, BudgetCounts, HandoffKey
from loopline.kv.prefix_index import PrefixIndex
from loopline.sched.plan import StepOutcome
from loopline.worker.engine_thread import EngineListener, EngineThread, LoadBoard
from tests.unit.worker.clocks import OwnClock

WAIT_S = 20.0


class ScriptedEngine:
    """An engine whose steps are functions that the test queues; without one there is nothing to compute."""

    def __init__(self) -> None:
        self.steps: Queue[Callable[[], StepOutcome | None]] = Queue()
        self.counts = SimpleNamespace(prompt_rate=PromptRate())
        self.scheduler = SimpleNamespace(step=0, num_running=0, num_waiting=0, token_loops=lambda: 0)
        self.ledger = SimpleNamespace(
            num_promised_blocks=0, counts=lambda: BlockCounts(4, 0, 0, 0, 4), prefix=PrefixIndex()
        )

    def step(self) -> StepOutcome | None:
        return None if self.steps.empty() else self.steps.get()()


class Core:
    """Keeps what it is given; an event that can be called is called."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.is_draining = False
        self.keys: tuple[HandoffKey, ...] = ()

    def handle(self, event: object) -> None:
        if callable(event):
            event()
        self.taken.append(event)

    def stepped(self, outcome: StepOutcome) -> None:
        self.taken.append(outcome)

    def tick(self) -> None:
        pass

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        return ()

    def known(self) -> tuple[HandoffKey, ...]:
        return self.keys

    def ignored(self) -> tuple[tuple[str, int], ...]:
        return (("stale", 1),)


BUDGET = BudgetCounts(1, 2, 3, 0.5)


class Bench:
    def __init__(self) -> None:
        self.engine, self.core, self.inbox, self.board = ScriptedEngine(), Core(), Queue[object](), LoadBoard()
        self.settled, self.failed = threading.Event(), threading.Event()
        self.errors: list[Exception] = []
        listener = EngineListener(self.settled.set, self._fail, lambda: (("stale", 2), ("unknown", 1)), lambda: BUDGET)
        self.clock = OwnClock()
        self.thread = EngineThread(cast(Engine, self.engine), self.core, self.inbox, self.board, listener, self.clock)

    def _fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()

    def fence(self) -> None:
        """Wait until everything that was queued has been handled."""
        reached = threading.Event()
        self.inbox.put(reached.set)
        assert reached.wait(WAIT_S)


def fail(*_: Any) -> Any:
    raise InvariantBroken("broken by the test")


def test_events_in_order_and_a_bad_one_costs_itself(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.thread.start()
    for event in ("one", fail, "two"):
        bench.inbox.put(event)
    bench.fence()
    assert bench.core.taken[:2] == ["one", "two"]
    assert "broken by the test" in caplog.text
    assert bench.thread.stop(WAIT_S) and not bench.errors


@pytest.mark.parametrize("where", ["step", "publish"])
def test_a_failure_of_the_engine_ends_the_thread_and_is_told(where: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.thread.start()
    if where == "step":
        bench.engine.steps.put(fail)
    else:
        bench.engine.ledger.counts = fail
    assert bench.failed.wait(WAIT_S)
    assert [str(error) for error in bench.errors] == ["broken by the test"]
    assert bench.thread.stop(WAIT_S)
    assert "the engine thread failed" in caplog.text


def test_a_hung_step_does_not_hang_the_stop() -> None:
    bench, over = Bench(), threading.Event()
    hung = threading.Event()

    def hang() -> None:
        hung.set()
        over.wait(WAIT_S)

    bench.engine.steps.put(hang)
    bench.thread.start()
    assert hung.wait(WAIT_S)
    assert not bench.thread.stop(0.05)
    over.set()
    assert bench.thread.stop(WAIT_S)


def test_a_change_of_waiting_requests_is_told() -> None:
    bench = Bench()
    bench.thread.start()
    bench.fence()
    bench.settled.clear()
    bench.inbox.put(lambda: setattr(bench.engine.scheduler, "num_waiting", 1))
    assert bench.settled.wait(WAIT_S)
    assert bench.board.read().waiting == 1
    assert bench.thread.stop(WAIT_S)


def test_the_load_carries_the_budget_of_bytes_in_flight() -> None:
    assert Bench().board.read().budget == BUDGET


def test_ignored_messages_of_both_threads_are_added_up() -> None:
    bench = Bench()
    assert bench.board.read().ignored == (("stale", 3), ("unknown", 1))


def test_drained_needs_the_core_to_take_nothing_new() -> None:
    """A board that shows no work says nothing as long as a start may still be in the queue."""
    bench = Bench()
    bench.thread.start()
    bench.fence()
    assert not bench.board.is_drained
    bench.settled.clear()
    bench.inbox.put(lambda: setattr(bench.core, "is_draining", True))
    assert bench.settled.wait(WAIT_S)
    assert bench.board.is_drained
    bench.core.handoffs = lambda: (("committed", 1),)
    bench.settled.clear()
    bench.inbox.put("look")
    assert bench.settled.wait(WAIT_S)
    assert not bench.board.is_drained
    bench.core.handoffs = lambda: (("quarantined", 1),)
    bench.settled.clear()
    bench.inbox.put("look")
    assert bench.settled.wait(WAIT_S)
    assert bench.board.is_drained  # only the end of another worker would end that
    assert bench.thread.stop(WAIT_S)


def test_a_heartbeat_says_how_long_ago_what_came_was_handled() -> None:
    """While a step computes, what comes waits: the coordinator must not take that for an answer that was lost."""
    bench, over, hung = Bench(), threading.Event(), threading.Event()

    def compute() -> None:
        bench.clock.time_s += 60.0
        hung.set()
        over.wait(WAIT_S)

    bench.thread.start()
    bench.fence()
    assert bench.board.beat(False, bench.clock.time_s).lag_s == 0.0
    bench.engine.steps.put(compute)
    assert hung.wait(WAIT_S)
    bench.core.keys = (HandoffKey("r", 1),)
    during = bench.board.beat(True, bench.clock.time_s)
    assert (during.lag_s, during.draining, during.load.known) == (60.0, True, ())
    over.set()
    bench.fence()
    bench.fence()  # a whole round has ended
    after = bench.board.beat(False, bench.clock.time_s)
    assert (after.lag_s, after.load.known) == (0.0, (HandoffKey("r", 1),))
    assert bench.thread.stop(WAIT_S)
