"""The thread that owns an engine: takes events from a queue, steps, hands outcomes to the role's core.

The core (prefill's or decode's) is called from this thread only, so it needs no locks. Others post events and read the
last published load. A failure of the engine's own books ends the thread, and with it the process: nothing that it would
say afterwards could be trusted.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loopline.clock import Clock, MonotonicClock
from loopline.engine.engine import Engine
from loopline.identity import BlockCounts, BudgetCounts, HandoffKey, WorkerLoad
from loopline.messages import Heartbeat, PrefixReport, ReportPrefixes
from loopline.sched.plan import StepOutcome
from loopline.worker.events import CoordinatorLost
from loopline.worker.prefix_reporter import PrefixReporter

logger = logging.getLogger(__name__)
_IDLE_TICK_S = 0.1
_STOP_LIMIT_S = 10.0
_LASTING = ("failed", "quarantined")
"""States of handoffs that only the end of another worker ends: a drain does not wait for them."""
Pairs = tuple[tuple[str, int], ...]
"""(word, count)."""


class WorkerCore(Protocol):
    """A role's logic on the engine thread."""

    def handle(self, event: object) -> None:
        """Take one event: a message of the coordinator or a peer, or a report of the transfer thread."""
        ...

    def stepped(self, outcome: StepOutcome) -> None:
        """Take what a step gave."""
        ...

    def tick(self) -> None:
        """Do what time asks for: deadlines."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken any more."""
        ...

    def handoffs(self) -> Pairs:
        """Handoffs by state, for heartbeats."""
        ...

    def ignored(self) -> Pairs:
        """Messages ignored so far, by cause, for heartbeats."""
        ...

    def known(self) -> tuple[HandoffKey, ...]:
        """Requests that it computes, or holds blocks for, for heartbeats. What was given up is not among them."""
        ...


class CoreAround:
    """A `WorkerCore` around another one, which it asks everything; what looks at events or steps says so in a method of
    its own."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self.tick = core.tick

    def handle(self, event: object) -> None:
        self._core.handle(event)

    def stepped(self, outcome: StepOutcome) -> None:
        self._core.stepped(outcome)

    @property
    def is_draining(self) -> bool:
        return self._core.is_draining

    def handoffs(self) -> Pairs:
        return self._core.handoffs()

    def ignored(self) -> Pairs:
        return self._core.ignored()

    def known(self) -> tuple[HandoffKey, ...]:
        return self._core.known()


@dataclass(frozen=True)
class _Stop:
    """Ends the thread."""


class LoadBoard:
    """The last published load: written by the engine thread, read by any."""

    def __init__(self) -> None:
        self._published = (WorkerLoad(0, False, 0, 0, 0, 0, BlockCounts(0, 0, 0, 0, 0), (), ()), False, 0.0)

    def publish(self, load: WorkerLoad, is_draining: bool, handled_at_s: float = 0.0) -> None:
        """`handled_at_s`: when everything that had come had been handled, by the engine thread's clock."""
        self._published = (load, is_draining, handled_at_s)

    def read(self) -> WorkerLoad:
        return self._published[0]

    def beat(self, is_draining: bool, now_s: float) -> Heartbeat:
        """The load as a heartbeat, at `now_s` of the engine thread's clock."""
        load, _, handled_at_s = self._published
        return Heartbeat(load, is_draining, max(0.0, now_s - handled_at_s))

    @property
    def published_at_s(self) -> float:
        """When the engine thread last got around, by its clock: a step, or a wait for something to do."""
        return self._published[2]

    @property
    def is_drained(self) -> bool:
        """The engine thread takes nothing new, and nothing runs, waits, is held or is being handed off."""
        load, is_draining, _ = self._published
        handoffs = any(state not in _LASTING for state, _ in load.handoffs)
        return is_draining and not (load.running or load.waiting or load.blocks.held or handoffs)


Inbox = queue.Queue[object]
"""Events for the engine thread: put by any thread, taken by this one."""


@dataclass(frozen=True)
class EngineListener:
    """Who is told what, in the engine thread; the calls return at once."""

    on_settled: Callable[[], None]
    """Blocks, requests, business or draining changed, and the engine is idle."""
    on_failed: Callable[[Exception], None]
    """The thread has ended with this error."""
    transfer_ignored: Callable[[], Pairs]
    """Asked for what the transfer thread has ignored."""
    transfer_budget: Callable[[], BudgetCounts | None] = lambda: None
    """Asked for the budget of bytes in flight, of a worker that has one."""
    on_measured: Callable[[WorkerLoad], None] | None = None
    """Every load, several times a second."""
    on_prefixes: Callable[[PrefixReport], None] = lambda report: None
    """What the prefix cache holds, once somebody has asked."""


class EngineThread:
    """Invariant: engine and core are touched by this thread alone once it has started."""

    def __init__(
        self,
        engine: Engine,
        core: WorkerCore,
        inbox: Inbox,
        board: LoadBoard,
        listener: EngineListener,
        clock: Clock | None = None,
    ) -> None:
        """`clock`: for the age of what is published; by default the system's."""
        self._clock = clock or MonotonicClock()
        self._handled_at_s = self._clock.now_s()
        self._engine = engine
        self._core = core
        self._inbox = inbox
        self._board = board
        self._listener = listener
        self._prefixes = PrefixReporter(engine.ledger.prefix, listener.on_prefixes)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        board.publish(self._measure(busy=False), core.is_draining, self._handled_at_s)

    def start(self) -> None:
        self._thread.start()

    def stop(self, limit_s: float = _STOP_LIMIT_S) -> bool:
        """End the thread after what is queued. False if it has not ended by then: its device may still be in use."""
        self._inbox.put(_Stop())
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # whatever it is, the engine cannot be trusted to go on
            logger.exception("the engine thread failed")
            self._listener.on_failed(error)

    def _loop(self) -> None:
        can_step = False
        while self._take_events(block=not can_step):
            self._guard(self._core.tick)
            outcome = self._engine.step()
            if outcome is not None:
                self._guard(partial(self._core.stepped, outcome))
            can_step = outcome is not None
            self._publish(busy=can_step)

    def _take_events(self, block: bool) -> bool:
        """Handle everything that is queued; wait a tick for the first if `block`. False: stop."""
        timeout: float | None = _IDLE_TICK_S if block else None
        while True:
            try:
                event = self._inbox.get(block=timeout is not None, timeout=timeout)
            except queue.Empty:
                self._handled_at_s = self._clock.now_s()
                return True
            if isinstance(event, _Stop):
                return False
            timeout = None
            if isinstance(event, ReportPrefixes):
                self._guard(self._prefixes.ask)
                continue
            if isinstance(event, CoordinatorLost):
                self._prefixes.stop()
            self._guard(partial(self._core.handle, event))

    def _guard(self, call: Callable[[], None]) -> None:
        """A bug in handling one event must not end every other request."""
        try:
            call()
        except Exception:
            logger.exception("an event could not be handled")

    def _publish(self, busy: bool) -> None:
        before, was_drained = self._board.read(), self._board.is_drained
        after = self._measure(busy)
        self._board.publish(after, self._core.is_draining, self._handled_at_s)
        self._guard(lambda: self._prefixes.maybe_report(self._clock.now_s(), busy))
        if self._listener.on_measured is not None:
            self._listener.on_measured(after)
        changed = was_drained != self._board.is_drained or _outline(before) != _outline(after)
        if changed and not busy:
            self._listener.on_settled()

    def _measure(self, busy: bool) -> WorkerLoad:
        scheduler, ledger = self._engine.scheduler, self._engine.ledger
        ignored = Counter(dict(self._core.ignored()))
        ignored.update(dict(self._listener.transfer_ignored()))
        return WorkerLoad(
            step=scheduler.step,
            busy=busy,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            token_loops=scheduler.token_loops(),
            promised_blocks=ledger.num_promised_blocks,
            blocks=ledger.counts(),
            handoffs=self._core.handoffs(),
            ignored=tuple(sorted(ignored.items())),
            budget=self._listener.transfer_budget(),
            known=self._core.known(),
            prompt_token_loops_per_s=self._engine.counts.prompt_rate.token_loops_per_s,
        )


def _outline(load: WorkerLoad) -> tuple[object, ...]:
    """What the coordinator decides by; worth a heartbeat when it changes."""
    return load.busy, load.running, load.waiting, load.blocks, load.handoffs
