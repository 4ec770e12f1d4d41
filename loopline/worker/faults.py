"""What a worker process does wrong on purpose, put between its parts. Made by the runtime where the worker's settings
name faults, and not at all where they do not; `loopline.faults` says what there is.

Each method gives back a part with its faults around it, or the part itself where none meets it.
"""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtransfer.agent import TransferAgent
from kvtransfer.faulty_agent import FaultyAgent
from loopline.clock import Clock
from loopline.faults import MESSAGE_KINDS, PROCESS_KINDS, PUSHING, TRANSPORT_KINDS
from loopline.messages import CoordinatorMessage, Reserve, StartPrefill, WorkerMessage
from loopline.request import Request
from loopline.sched.plan import StepOutcome
from loopline.settings import FaultSettings
from loopline.worker.engine_thread import CoreAround, WorkerCore

logger = logging.getLogger(__name__)
M = TypeVar("M", WorkerMessage, CoordinatorMessage)
_SIGNALS = {"freeze": signal.SIGSTOP, "kill": signal.SIGKILL}


def no_fault(state: str) -> None:
    """What happens when a handoff enters a state in a worker without faults."""


def signal_self(number: signal.Signals) -> None:
    """Stop or end this process, all its threads at once."""
    os.kill(os.getpid(), number)


class WorkerFaults:
    """All faults of one worker process. Invariant: each is committed at the events that it names, and counted from the
    start of the process."""

    def __init__(
        self,
        worker: str,
        faults: Sequence[FaultSettings],
        clock: Clock,
        signal_process: Callable[[signal.Signals], None] = signal_self,
    ) -> None:
        """Says in the log what will go wrong. `signal_process`: how the process gets a signal."""
        logger.warning("%s commits faults on purpose: %s", worker, "; ".join(_words(fault) for fault in faults))
        self._transport = tuple(fault for fault in faults if fault.do in TRANSPORT_KINDS)
        self._messages = tuple(fault for fault in faults if fault.do in MESSAGE_KINDS)
        of_process = [fault for fault in faults if fault.do in PROCESS_KINDS]
        self._process = tuple(fault for fault in of_process if fault.prompt_token is None)
        self._prompts = tuple(fault for fault in of_process if fault.prompt_token is not None)
        self._met: dict[str, list[FaultSettings]] = {}  # by request id, of those whose prompt has such a token
        self._clock = clock
        self._signal_process = signal_process
        self._entries: Counter[str] = Counter()  # of each state; a state is entered in one thread only

    def agent(self, agent: TransferAgent) -> TransferAgent:
        """The transport as the transfer thread gets it."""
        if not self._transport and not any(fault.state == PUSHING for fault in self._process):
            return agent
        return FaultyAgent(agent, self._transport, self._clock, lambda: self.entered(PUSHING))

    def messages(self, deliver: Callable[[M], None]) -> Callable[[M], None]:
        """One direction of the stream to the coordinator; `deliver` is called in the caller's thread."""
        return FaultyMessages(deliver, self._messages) if self._messages else deliver

    def core(self, core: WorkerCore) -> WorkerCore:
        """The role's logic as the engine thread gets it."""
        is_met = bool(self._prompts) or any(not fault.state for fault in self._process)
        return _FaultyCore(core, self._given, self._stepped) if is_met else core

    def entered(self, state: str) -> None:
        """A handoff has entered `state` at this moment."""
        self._entries[state] += 1
        self._commit([fault for fault in self._process if fault.state == state], self._entries[state])

    def _given(self, request: Request) -> None:
        met = [fault for fault in self._prompts if fault.prompt_token in request.prompt_ids]
        if met:
            self._met[request.request_id] = met

    def _stepped(self, outcome: StepOutcome) -> None:
        self._commit([fault for fault in self._process if not fault.state], outcome.step)
        if self._met:
            computed = [chunk.request_id for chunk in outcome.chunks] + [row.request_id for row in outcome.rows]
            for request_id in sorted(self._met.keys() & computed):
                for fault in self._met.pop(request_id):
                    self._do(fault)

    def _commit(self, faults: Sequence[FaultSettings], number: int) -> None:
        for fault in faults:
            if fault.is_due(number):
                self._do(fault)

    def _do(self, fault: FaultSettings) -> None:
        logger.warning("fault: %s", _words(fault))
        self._signal_process(_SIGNALS[fault.do])


class FaultyMessages(Generic[M]):
    """Hands messages on, except for those that a fault meets. May be called from any thread."""

    def __init__(self, deliver: Callable[[M], None], faults: Sequence[FaultSettings]) -> None:
        self._deliver: Callable[[M], None] = deliver
        self._faults = tuple(faults)
        self._counts: Counter[str] = Counter()
        self._held: list[M] = []  # waits for the next message of any type
        self._lock = threading.Lock()

    def __call__(self, message: M) -> None:
        kind = type(message).__name__
        with self._lock:
            self._counts[kind] += 1
            due = {fault.do for fault in self._faults if fault.message == kind and fault.is_due(self._counts[kind])}
            if due:
                logger.warning("fault: %s of %s %d", ", ".join(sorted(due)), kind, self._counts[kind])
            if "reorder_messages" in due:
                self._held.append(message)
                return
            out = [] if "drop_message" in due else [message]
            if "repeat_message" in due:
                out *= 2
            out += self._held
            self._held = []
            for each in out:
                self._deliver(each)


class _FaultyCore(CoreAround):
    """A `WorkerCore` that hears of a step only after its faults were committed."""

    def __init__(
        self, core: WorkerCore, given: Callable[[Request], None], stepped: Callable[[StepOutcome], None]
    ) -> None:
        """`given` hears of each request that the worker is given, `stepped` of each step, before the core does."""
        super().__init__(core)
        self._given = given
        self._stepped = stepped

    def handle(self, event: object) -> None:
        if isinstance(event, Reserve | StartPrefill):
            self._given(event.request)
        self._core.handle(event)

    def stepped(self, outcome: StepOutcome) -> None:
        self._stepped(outcome)
        self._core.stepped(outcome)


def _words(fault: FaultSettings) -> str:
    """One fault as a person reads it."""
    what = f"{fault.do} {fault.message}" if fault.message else fault.do
    lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
    if fault.rate:
        return f"{what} at a rate of {fault.rate:g}{lasts}"
    if fault.prompt_token is not None:
        return f"{what} with prompt token {fault.prompt_token}"
    last = f" to {fault.at + fault.times - 1}" if fault.times > 1 else ""
    where = f"{fault.state} {fault.at}" if fault.state else str(fault.at)
    return f"{what} at {where}{last}{lasts}"
