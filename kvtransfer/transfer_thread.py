"""A worker's one transfer thread: it makes, uses and closes the agent, and polls it whatever the engine does. Commands
come in by queue from any thread; events go out through the callback, called *in the transfer thread*, which must only
hand them on. Made by `prefill_worker` and `decode_worker`."""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.agent import TransferAgent
from kvtransfer.budget import BudgetLimits
from kvtransfer.commands import (
    Close,
    Command,
    CommitHandoff,
    ConnectPeer,
    Event,
    OpenHandoff,
    Push,
    Quiesce,
    RemovePeer,
    Stop,
    TransferThreadFailed,
)
from kvtransfer.push_counts import PushCounts
from kvtransfer.receiver import Receiver
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.sender import Sender
from kvtransfer.verify import ReadBlocks
from loopline.clock import Clock
from loopline.errors import InvariantBroken, TransferError
from loopline.identity import BudgetCounts, RegionManifest, WorkerId
from loopline.messages import PushNotice
from loopline.settings import TransferSettings

logger = logging.getLogger(__name__)

HOT_S = 0.01
"""How long after the last command, end of a push or notice the agent is polled hard."""
HOT_WAIT_S = 20e-6
COLD_AFTER_S = 10.0
"""How long after that an agent is polled at the configured interval, and then less often. Over tcp it is polls that
land bytes; a push of bounded size that takes longer than this is slower than rare polls are.
"""
COLD_FACTOR = 8
STOP_DRAIN_S = 1.0
STOP_ROUNDS = 16
REPEAT_REPORT_S = 1.0


@dataclass(frozen=True)
class NoticeCodec:
    """How notices travel. `decode` raises ValueError on anything that is not a whole notice."""

    encode: Callable[[PushNotice], bytes]
    decode: Callable[[bytes], PushNotice]


@dataclass(frozen=True)
class TransferEndpoint:
    """What other workers need to write here, once the thread runs, and how many bytes a push from here should carry at
    most."""

    agent_name: str
    metadata: bytes
    region: RegionManifest
    max_push_bytes: int


class TransferThread:
    """Owns one agent.

    Invariants: only its thread touches the agent; an exception ends at most the handoff that it belongs to, never the
    thread; every command is carried out in the order of its `submit`; the agent is polled between two posts, because a
    post may copy all its bytes.
    """

    def __init__(
        self,
        make_agent: Callable[[], TransferAgent],
        span: ArenaSpan,
        *,
        settings: TransferSettings,
        codec: NoticeCodec,
        clock: Clock,
        on_event: Callable[[Event], None],
        read_blocks: ReadBlocks | None = None,
    ) -> None:
        """`make_agent` is called in the thread. The arena's memory must live until `stop` has returned. `read_blocks`:
        of this arena, called in the thread for every push so that its notice carries a digest; None: it carries none.
        """
        self._make_agent = make_agent
        self._span = span
        self._settings = settings
        self._limits = BudgetLimits.of(settings)
        self._codec = codec
        self._clock = clock
        self._on_event = on_event
        self._read_blocks = read_blocks
        self._commands: queue.Queue[Command] = queue.Queue()
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._endpoint: TransferEndpoint | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._last_report: tuple[str, float] = ("", 0.0)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    # ---- any thread ------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 60.0) -> TransferEndpoint:
        """Start the thread and wait until its agent has registered the arena. Raises TransferError if it cannot."""
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise TransferError(f"the transport did not start within {timeout_s:g} s")
        if self._endpoint is None:
            raise TransferError(f"the transport cannot start: {self._start_error}") from self._start_error
        return self._endpoint

    def submit(self, command: Command) -> None:
        """Queue a command and wake the thread. Never blocks; after Stop nothing happens."""
        self._commands.put(command)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop and wait. False when the thread has not ended by then: the arena must not be freed."""
        self.submit(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def in_flight_bytes(self, worker: WorkerId | None = None) -> int:
        """Bytes posted and not terminal, to one worker or to all; pushes past their deadline are left out."""
        if self._sender is None:
            return 0
        budget = self._sender.budget
        return budget.total if worker is None else budget.by_peer.get(worker.agent_name, 0)

    def budget_counts(self) -> BudgetCounts:
        """The budget of bytes in flight, for metrics; any thread."""
        if self._sender is None:
            return BudgetCounts(0, self._limits.total_bytes, 0, 0.0)
        return self._sender.budget.counts()

    def push_counts(self) -> PushCounts:
        """What pushes have cost so far, for metrics: to be read only; any thread."""
        return PushCounts() if self._sender is None else self._sender.push_counts

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """(cause, number of commands and notices ignored or refused): a snapshot, for any thread."""
        if self._sender is None or self._receiver is None:
            return ()
        counts: Counter[str] = Counter()
        for cause, count in (*self._sender.ignored(), *self._receiver.ignored()):
            counts[cause] += count
        return tuple(sorted(counts.items()))

    # ---- the transfer thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            agent = self._make_agent()
            region = RegisteredRegion(agent, self._span).manifest
            sender = Sender(
                agent,
                region,
                self._codec.encode,
                self._settings.push_timeout_s,
                self._clock,
                self._emit,
                self._limits,
                self._read_blocks,
            )
            receiver = Receiver(agent, self._codec.decode, self._clock, self._emit)
            self._sender, self._receiver = sender, receiver
            self._endpoint = TransferEndpoint(agent.name, agent.metadata(), region, self._limits.push_bytes)
        except Exception as error:
            self._start_error = error
            self._started.set()
            return
        self._started.set()
        self._loop(sender, receiver)
        self._drain(sender, receiver)
        self._guarded(agent.close)

    def _loop(self, sender: Sender, receiver: Receiver) -> None:
        """Until Stop: sleep until the interval is over or a command comes, take commands up to a push, poll once."""
        hot_until_s = self._clock.now_s()
        while True:
            try:
                command = self._commands.get(timeout=self._wait_s(self._clock.now_s() - hot_until_s))
                while True:
                    if isinstance(command, Stop):
                        return
                    self._guarded(self._carry_out, sender, receiver, command)
                    hot_until_s = self._clock.now_s() + HOT_S
                    if isinstance(command, Push):
                        break
                    command = self._commands.get_nowait()
            except queue.Empty:
                pass
            heard = self._guarded(receiver.poll)
            ended = self._guarded(sender.poll)
            if heard or ended:
                hot_until_s = self._clock.now_s() + HOT_S

    def _wait_s(self, quiet_s: float) -> float:
        """How long to sleep before the next poll, that many seconds after the agent stopped to be polled hard."""
        if quiet_s < 0:
            return HOT_WAIT_S
        interval_s = self._settings.poll_interval_s
        return interval_s if quiet_s < COLD_AFTER_S else COLD_FACTOR * interval_s

    def _drain(self, sender: Sender, receiver: Receiver) -> None:
        """Let what is in flight end, within a limit, and the last notices leave."""
        deadline_s = self._clock.now_s() + STOP_DRAIN_S
        rounds = 0
        while rounds < STOP_ROUNDS and self._clock.now_s() < deadline_s:
            self._guarded(receiver.poll)
            self._guarded(sender.poll)
            rounds = 0 if sender.is_busy else rounds + 1

    def _carry_out(self, sender: Sender, receiver: Receiver, command: Command) -> None:
        match command:
            case Push():
                sender.push(command)
            case OpenHandoff():
                sender.open(command)
            case CommitHandoff():
                sender.commit(command)
            case Close():
                sender.close(command)
            case ConnectPeer():
                sender.connect(command)
            case RemovePeer(worker):
                sender.remove_peer(worker)
            case Quiesce(worker):
                receiver.quiesce(worker)
            case Stop():
                raise InvariantBroken("Stop ends the loop and is not carried out")

    def _guarded(self, call: Callable[..., object], *arguments: object) -> object:
        """Call; an exception becomes an event, at most once a second for the same text."""
        try:
            return call(*arguments)
        except Exception as error:
            text, now_s = f"{type(error).__name__}: {error}", self._clock.now_s()
            last_text, last_s = self._last_report
            if text != last_text or now_s - last_s >= REPEAT_REPORT_S:
                self._last_report = (text, now_s)
                self._emit(TransferThreadFailed(text))
            return None

    def _emit(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("the receiver of transfer events failed on %s", type(event).__name__)
