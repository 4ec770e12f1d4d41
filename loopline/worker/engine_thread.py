"""The thread that owns an engine: takes events from a queue, steps, hands outcomes to the role's core.

The core (prefill's or decode's) is called from this thread only, so it needs no locks. Others post events and read the
last published load.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from loopline.engine.engine import Engine
from loopline.identity import BlockCounts, WorkerLoad
from loopline.sched.plan import StepOutcome

logger = logging.getLogger(__name__)
_IDLE_TICK_S = 0.1


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

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        """Handoffs by state, for heartbeats."""
        ...

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """Messages ignored so far, by cause, for heartbeats."""
        ...


@dataclass(frozen=True)
class _Stop:
    """Ends the thread."""


class LoadBoard:
    """The last published load: written by the engine thread, read by any."""

    def __init__(self) -> None:
        self._load = WorkerLoad(0, False, 0, 0, 0, 0, BlockCounts(0, 0, 0, 0, 0), (), ())

    def publish(self, load: WorkerLoad) -> None:
        self._load = load

    def read(self) -> WorkerLoad:
        return self._load


Inbox = queue.SimpleQueue[object]
"""Events for the engine thread: put by any thread, taken by this one."""


class EngineThread:
    """Invariant: engine and core are touched by this thread alone once it has started."""

    def __init__(
        self, engine: Engine, core: WorkerCore, inbox: Inbox, board: LoadBoard, on_settled: Callable[[], None]
    ) -> None:
        """`on_settled` is called from this thread when blocks, requests or business changed and the engine is idle."""
        self._engine = engine
        self._core = core
        self._inbox = inbox
        self._board = board
        self._on_settled = on_settled
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        board.publish(self._measure(busy=False))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what is queued, and wait for it."""
        self._inbox.put(_Stop())
        self._thread.join()

    def _run(self) -> None:
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
                return True
            if isinstance(event, _Stop):
                return False
            timeout = None
            self._guard(partial(self._core.handle, event))

    def _guard(self, call: Callable[[], None]) -> None:
        """A bug in handling one event must not end every other request."""
        try:
            call()
        except Exception:
            logger.exception("an event could not be handled")

    def _publish(self, busy: bool) -> None:
        before, after = self._board.read(), self._measure(busy)
        self._board.publish(after)
        changed = (before.busy, before.running, before.blocks, before.handoffs) != (
            after.busy,
            after.running,
            after.blocks,
            after.handoffs,
        )
        if changed and not busy:
            self._on_settled()

    def _measure(self, busy: bool) -> WorkerLoad:
        scheduler, ledger = self._engine.scheduler, self._engine.ledger
        return WorkerLoad(
            step=scheduler.step,
            busy=busy,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            token_loops=scheduler.token_loops(),
            promised_blocks=ledger.num_promised_blocks,
            blocks=ledger.counts(),
            handoffs=self._core.handoffs(),
            ignored=self._core.ignored(),
        )
