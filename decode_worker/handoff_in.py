"""The decode worker's logic on its engine thread: reservations, what the receive table says of them, running requests.

    Reserve --> reserved --Bind--> bound --commit + all pushes--> running --finish--> gone
                   | |                |                            ^   |
                   | '----------------|----- StartLocalPrefill ----'   '-- cancelled --> gone
                   '-- given up ------'--> blocks that a writer may
                                           still write: quarantined

Which blocks another worker may write is `ReceiveTable`'s alone; this module carries out its effects on scheduler and
ledger. What of its cache it lends to the worker that computes a prompt is in `fetch_out`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decode_worker.emitter import Emitter
from decode_worker.fetch_out import FetchEvent, FetchOut
from kvtransfer.commands import Command, PushArrived, Quiesce, Quiesced, TransferThreadFailed
from kvtransfer.handoff import (
    Activate,
    AskClose,
    CommitTaken,
    FreeBlocks,
    FreeQuarantined,
    GaveUp,
    Ignored,
    PollToQuiescence,
    Quarantine,
    ReceiveEffect,
    ReceiveState,
    Refused,
)
from kvtransfer.handoff import Granted as GrantEffect
from kvtransfer.receive_table import ReceiveTable
from kvtransfer.verify import digest_of
from loopline.clock import Clock
from loopline.engine.engine import Engine
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.kv.block_pool import runs_of
from loopline.kv.ledger import Allocation
from loopline.messages import (
    Bind,
    Cancel,
    Commit,
    CommitAnswer,
    Granted,
    LocalPrefillStarted,
    PeerGone,
    PushNotice,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    TokenRow,
    WorkerMessage,
)
from loopline.request import Request
from loopline.sched.plan import StepOutcome
from loopline.telemetry.logs import about
from loopline.worker.deadlines import ASK_AGAIN_S, Deadlines
from loopline.worker.events import BeginDrain, CommitReceived, CoordinatorLost, FetchAsked, WriterClosed
from loopline.worker.faults import no_fault

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodePorts:
    """How the core reaches the world; every call returns at once."""

    to_coordinator: Callable[[WorkerMessage], None]
    to_transfer: Callable[[Command], None]
    ask_close: Callable[[HandoffKey, Peer], None]
    identity: Callable[[], WorkerId]
    entered: Callable[[str], None] = no_fault  # hears of every state that a handoff enters


@dataclass(frozen=True)
class _Reservation:
    """Blocks that are held for a request whose prompt's KV is on its way."""

    allocation: Allocation
    request: Request


class HandoffIn:
    """Invariant: a reserved handoff's allocation is in `_reserved`, a running one's generation in `_running`."""

    def __init__(
        self,
        engine: Engine,
        ports: DecodePorts,
        clock: Clock,
        push_timeout_s: float = 30.0,
        max_push_bytes: int | None = None,
    ) -> None:
        """`push_timeout_s`: how long after its commit a handoff may lack pushes. `max_push_bytes`: of one push of a
        fetch, if a block is not larger; None: no bound."""
        self._engine = engine
        self._ports = ports
        self._emitter = Emitter(ports.to_coordinator)
        self._clock = clock
        self._deadlines = Deadlines(clock, self._is_live)
        self._push_timeout_s = push_timeout_s
        self._landing = Deadlines(clock, lambda key: self._table.state(key) is ReceiveState.COMMITTED)
        self._ask_again_at_s = clock.now_s()
        self._table = ReceiveTable()
        self._fetches = FetchOut(engine, ports.to_transfer, ports.identity, ports.entered, max_push_bytes)
        self._reserved: dict[HandoffKey, _Reservation] = {}
        self._running: dict[str, HandoffKey] = {}
        self._wrong_commits = 0
        self._is_draining = False

    # ---- WorkerCore

    def handle(self, event: object) -> None:
        match event:
            case Reserve():
                self._reserve(event)
            case Bind(key, writer):
                self._bind(key, writer)
            case StartLocalPrefill(key):
                self._start_local(key)
            case Cancel(key, cause):
                self._cancel(key, cause)
            case PushArrived(agent_name, notice):
                self._push_arrived(agent_name, notice)
            case CommitReceived():
                self._committed(event)
            case WriterClosed(key, writer, state):
                self._carry_out(self._table.writer_closed(key, writer, state))
            case PeerGone(worker, proven):
                self._fetches.reader_gone(worker, proven)
                self._writer_gone(self._table.worker_gone(worker, proven))
            case FetchAsked():
                self._fetch_asked(event)
            case Quiesced(worker):
                self._carry_out(self._table.quiesced(worker))
            case CoordinatorLost():
                for key in [*self._reserved, *self._running.values()]:
                    self._cancel(key, Cause.PEER_LOST)
            case BeginDrain():
                self._is_draining = True
            case TransferThreadFailed(error):
                logger.error("transfer thread: %s", error)
            case _ if isinstance(event, FetchEvent):
                self._fetches.handle(event)
            case _:
                logger.error("decode worker: no handling for %r", event)

    def stepped(self, outcome: StepOutcome) -> None:
        for row in outcome.rows:
            if row.finish is not None:
                self._running.pop(row.request_id, None)
        for lost in outcome.lost:
            self._engine.ledger.release(lost.allocation)
            key = self._running.pop(lost.request_id)
            self._ports.to_coordinator(RequestFailed(key, lost.cause, lost.detail))
        self._emitter.emit(outcome.step, outcome.rows)

    def tick(self) -> None:
        for key in self._deadlines.take_expired():
            self._cancel(key, Cause.DEADLINE)
            self._ports.to_coordinator(RequestFailed(key, Cause.DEADLINE, "the request's deadline passed"))
        for key in self._landing.take_expired():
            detail = f"its pushes have not all arrived within {self._push_timeout_s:g} s after the commit"
            self._cancel(key, Cause.TRANSFER_TIMEOUT)
            self._ports.to_coordinator(RequestFailed(key, Cause.TRANSFER_TIMEOUT, detail))
        if self._clock.now_s() >= self._ask_again_at_s:
            self._ask_again_at_s = self._clock.now_s() + ASK_AGAIN_S
            self._carry_out(self._table.asks())

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        counts = {**dict(self._table.counts()), **self._fetches.counts()}
        return tuple(sorted((state, count) for state, count in counts.items() if count))

    def ignored(self) -> tuple[tuple[str, int], ...]:
        counts = Counter(dict(self._table.ignored()))
        counts[Cause.INVALID.value] += self._wrong_commits
        return tuple(sorted((+counts).items()))

    def known(self) -> tuple[HandoffKey, ...]:
        return (*self._reserved, *self._running.values())

    # ---- a request's way

    def _reserve(self, reserve: Reserve) -> None:
        key = reserve.key
        running = self._running.get(key.request_id)
        if running is not None and running.generation < key.generation:
            self._end_running(running)
        cause = self._table.refusal(key) or (Cause.DRAINING if self._is_draining else None)
        allocation = self._engine.scheduler.reserve(reserve.request) if cause is None else cause
        if isinstance(allocation, Cause):
            free, total = self._engine.ledger.num_free_blocks, self._engine.ledger.total_blocks
            detail = f"{reserve.request.max_kv_tokens} tokens at most; {free} of {total} blocks are free"
            self._ports.to_coordinator(Reserved(key, cause=allocation, detail=detail))
            return
        self._reserved[key] = _Reservation(allocation, reserve.request)
        self._deadlines.add(key, reserve.deadline_s)
        ledger = self._engine.ledger
        cached_tokens = ledger.written_tokens(allocation, reserve.request.params.loops)
        first_block = ledger.blocks_for(cached_tokens)  # those before it are shared: nobody writes them
        block_ids = tuple(ledger.block_ids(allocation)[first_block:])
        self._carry_out(self._table.reserve(key, first_block, block_ids))
        self._ports.entered(ReceiveState.RESERVED)
        self._ports.to_coordinator(Reserved(key, cached_tokens=cached_tokens))

    def _bind(self, key: HandoffKey, writer: Peer) -> None:
        was = self._table.state(key)
        effect = self._table.bind(key, writer)
        if isinstance(effect, GrantEffect):
            if was is ReceiveState.RESERVED:
                self._ports.entered(ReceiveState.BOUND)
            answer = Granted(key, effect.writer.worker, effect.first_block, runs_of(effect.block_ids))
        else:
            answer = Granted(key, writer.worker, cause=effect.cause, detail=f"bind to {writer.name} refused")
        self._ports.to_coordinator(answer)

    def _start_local(self, key: HandoffKey) -> None:
        effect = self._table.start_local(key)
        if isinstance(effect, Refused):
            detail = "the reservation cannot be prefilled here"
            self._ports.to_coordinator(LocalPrefillStarted(key, effect.cause, detail))
            return
        reservation = self._reserved.pop(key)
        self._running[key.request_id] = key
        num_cached = self._engine.ledger.written_tokens(reservation.allocation, reservation.request.params.loops)
        self._engine.scheduler.start_reserved(reservation.allocation)
        self._ports.entered(ReceiveState.LOCAL)
        text = "prefilling here: %d tokens, of which %d are cached"
        logger.info(text, reservation.request.num_known_tokens, num_cached, extra=about(key.request_id))
        self._ports.to_coordinator(LocalPrefillStarted(key))

    def _push_arrived(self, agent_name: str, notice: PushNotice) -> None:
        """Of a push that carries a digest the bytes are checked before it counts."""
        block_ids = self._table.landing_blocks(agent_name, notice) if notice.digest else ()
        if not block_ids or digest_of(self._engine.arena.read_blocks(block_ids)) == notice.digest:
            self._carry_out(self._table.push_arrived(agent_name, notice))
            return
        key, part = notice.key, notice.range
        blocks = f"blocks {part.first_block} to {part.first_block + part.num_blocks - 1}"
        detail = f"push {part.seq} ({blocks} of the request) arrived with other bytes than were sent"
        logger.error("generation %d: %s", key.generation, detail, extra=about(key.request_id))
        self._carry_out(self._table.push_corrupted(notice))
        self._ports.to_coordinator(RequestFailed(key, Cause.CORRUPTED, detail))

    def _fetch_asked(self, asked: FetchAsked) -> None:
        """Lend to the bound writer what its request shares of the cache."""
        key, reservation = asked.fetch.key, self._reserved.get(asked.fetch.key)
        if reservation is None or self._table.state(key) is not ReceiveState.BOUND:
            self._fetches.refuse(asked, Cause.UNKNOWN, "no reservation of this request is bound")
        elif self._table.writer(key) != asked.fetch.reader.worker:
            self._fetches.refuse(asked, Cause.WRONG_WRITER, "the reservation is bound to another worker")
        else:
            loops, ledger = reservation.request.params.loops, self._engine.ledger
            num_cached = ledger.written_tokens(reservation.allocation, loops)
            self._fetches.begin(asked, reservation.allocation, num_cached // ledger.block_size)

    def _committed(self, received: CommitReceived) -> None:
        reservation = self._reserved.get(received.commit.key)
        if reservation is not None and not _fits(received.commit, reservation.request):
            self._wrong_commits += 1
            received.answer(CommitAnswer(Cause.INVALID))
            return
        effect = self._table.committed(received.commit)
        received.answer(CommitAnswer(effect.cause if isinstance(effect, Ignored) else None))
        self._carry_out((effect,))

    def _cancel(self, key: HandoffKey, cause: Cause) -> None:
        self._carry_out(self._table.cancel(key, cause))
        running = self._running.get(key.request_id)
        if running is not None and running.generation <= key.generation:
            self._end_running(running)

    def _writer_gone(self, effects: Iterable[ReceiveEffect]) -> None:
        """The coordinator leaves it to this worker which handoffs of a writer that left in order are whole."""
        effects = tuple(effects)
        self._carry_out(effects)
        for effect in effects:
            if isinstance(effect, GaveUp):
                detail = "the prefill worker has gone before all of it was here"
                self._ports.to_coordinator(RequestFailed(effect.key, Cause.PEER_LOST, detail))

    def _is_live(self, key: HandoffKey) -> bool:
        return key in self._reserved or self._running.get(key.request_id) == key

    def _end_running(self, key: HandoffKey) -> None:
        del self._running[key.request_id]
        allocation = self._engine.scheduler.remove(key.request_id)
        if allocation is not None:
            self._engine.ledger.release(allocation)

    # ---- what the table says

    def _carry_out(self, effects: Iterable[ReceiveEffect]) -> None:
        effects = tuple(effects)
        quarantines = {effect.key: effect for effect in effects if isinstance(effect, Quarantine)}
        for effect in effects:
            match effect:
                case CommitTaken(key):
                    self._landing.add(key, self._push_timeout_s)
                    self._ports.entered(ReceiveState.COMMITTED)
                case Activate(key, Commit() as commit, _):
                    self._ports.entered(ReceiveState.ACTIVE)
                    self._activate(key, commit.token)
                case GaveUp(key):
                    self._give_up(key, quarantines.get(key))
                case FreeQuarantined(key, block_ids):
                    self._engine.ledger.free_quarantined(block_ids)
                    if self._table.state(key) is None:
                        self._ports.entered(ReceiveState.CLOSED)
                case AskClose(key, writer):
                    self._ports.ask_close(key, writer)
                case PollToQuiescence(worker):
                    self._ports.to_transfer(Quiesce(worker))
                case FreeBlocks() | Quarantine() | Ignored() | Refused():
                    pass  # blocks went with GaveUp; what was ignored is counted by the table
                case _:
                    logger.debug("nothing to do for %r", effect)

    def _activate(self, key: HandoffKey, first: TokenRow) -> None:
        row = self._engine.scheduler.activate(self._reserved[key].allocation, first)
        del self._reserved[key]
        self._running[key.request_id] = key
        logger.info("the handoff is whole: decoding from position %d", first.position, extra=about(key.request_id))
        self._emitter.emit(self._engine.scheduler.step, (row,))

    def _give_up(self, key: HandoffKey, quarantine: Quarantine | None) -> None:
        allocation = self._reserved.pop(key).allocation
        quarantined = 0 if quarantine is None else len(quarantine.block_ids)
        text = "generation %d is given up before it was whole; %d blocks go into quarantine"
        logger.info(text, key.generation, quarantined, extra=about(key.request_id))
        self._engine.scheduler.unreserve(allocation)
        self._fetches.end(key, Cause.CANCELLED, "its handoff was given up")
        self._ports.entered(ReceiveState.CLOSED if quarantine is None else ReceiveState.QUARANTINED)
        if quarantine is None:
            self._engine.ledger.release(allocation)
        else:
            self._engine.ledger.quarantine(allocation, quarantine.block_ids)


def _fits(commit: Commit, request: Request) -> bool:
    """Is this the first token of that request's attempt, and one that decoding goes on from?"""
    token = commit.token
    return (
        token.token_id is not None
        and token.finish is None
        and token.request_id == request.request_id
        and token.attempt == commit.attempt == request.attempt
        and token.position == request.num_known_tokens
        and token.depth == request.params.loops
    )
