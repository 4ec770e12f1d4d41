"""Fetches, from the side that lacks the KV: before a prompt is computed here, the blocks of it that its decode worker
has cached and this worker has not are pushed into this arena, by the machinery of handoffs with the roles exchanged.

    begin --> blocks for the whole prompt are held, FetchPrefix --answered, all pushes here--> the rest is computed
                          |
                          '-- no answer, another cause, too late --> computed from what is cached here
                                 blocks that the decode worker may still write: quarantined until it has closed

A fetch that comes to nothing costs its request only time, and bounded by what it should have taken: the request holds
a running slot meanwhile. Which blocks the decode worker may write is `ReceiveTable`'s alone; this module carries out
its effects. Engine thread only; `HandoffOut` owns it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.commands import Command, PushArrived, Quiesce, Quiesced
from kvtransfer.handoff import (
    Activate,
    AskClose,
    FreeQuarantined,
    GaveUp,
    Ignored,
    PollToQuiescence,
    Quarantine,
    ReceiveEffect,
    ReceiveState,
    Refused,
)
from kvtransfer.receive_table import ReceiveTable
from kvtransfer.verify import digest_of
from loopline.clock import Clock
from loopline.engine.engine import Engine
from loopline.fetch_messages import FetchState, PrefixSent
from loopline.holds import Holds
from loopline.identity import BlockRun, Cause, HandoffKey, Peer, WorkerId
from loopline.kv.block_pool import runs_of
from loopline.kv.ledger import Allocation
from loopline.messages import StartPrefill
from loopline.telemetry.logs import about
from loopline.worker.deadlines import ASK_AGAIN_S, Deadlines
from loopline.worker.events import PrefixAnswered, WriterClosed

logger = logging.getLogger(__name__)
_FAULTS = frozenset((Cause.TRANSFER_FAILED, Cause.TRANSFER_TIMEOUT, Cause.CORRUPTED, Cause.INCOMPLETE, Cause.PEER_LOST))
"""Why a fetch came to nothing that will happen again; a cancel or an eviction says nothing of the decode worker."""
LEAST_LIMIT_S = 5.0
"""How long any fetch may take: both engines may be in a step, and the first one makes the link."""
SLOWER = 10
"""How many times slower than it was measured a link may be, with others on it."""
FetchEvent = PushArrived | PrefixAnswered | WriterClosed | Quiesced
"""What of the transfer thread and of peers is about fetches."""


@dataclass(frozen=True)
class Wanted:
    """What to ask a decode worker for: its blocks `first_block`, ... of the request, into `runs` of this arena."""

    key: HandoffKey
    first_block: int
    runs: tuple[BlockRun, ...]
    limit_s: float


@dataclass(frozen=True)
class FetchPorts:
    """How fetches reach the world; every call returns at once. `landed` hears of each one that is whole, and of the
    number of its blocks."""

    to_transfer: Callable[[Command], None]
    ask_prefix: Callable[[Peer, Wanted], None]
    ask_close: Callable[[HandoffKey, Peer], None]
    entered: Callable[[str], None]
    landed: Callable[[HandoffKey, int], None]


@dataclass(slots=True)
class _Fetch:
    """One that is under way. `is_wanted`: its request is to be computed, whatever comes of it."""

    source: WorkerId
    allocation: Allocation
    first_block: int
    end_block: int
    began_s: float
    limit_s: float
    is_wanted: bool = True

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block


class FetchIn:
    """Invariant: a request that is being fetched for holds blocks and is not in the scheduler's hands; when its fetch
    ends it is, or its blocks are released or in quarantine."""

    def __init__(self, engine: Engine, ports: FetchPorts, clock: Clock, limit_s: float) -> None:
        """`limit_s`: how long a fetch may take at most, however many bytes it has."""
        self._engine = engine
        self._ports = ports
        self._clock = clock
        self._most_limit_s = limit_s
        self._late = Deadlines(clock, lambda key: key in self._fetches)
        self._ask_again_at_s = clock.now_s()
        self._table = ReceiveTable()
        self._fetches: dict[HandoffKey, _Fetch] = {}
        self._pauses: Holds[str] = Holds()  # uuids of decode workers from which nothing is fetched

    def counts(self) -> dict[str, int]:
        """Fetches by state, for heartbeats."""
        quarantined = dict(self._table.counts()).get(ReceiveState.QUARANTINED.value, 0)
        return {FetchState.FETCHING.value: len(self._fetches), ReceiveState.QUARANTINED.value: quarantined}

    def ignored(self) -> tuple[tuple[str, int], ...]:
        return self._table.ignored()

    def begin(self, start: StartPrefill, bytes_per_s: float) -> bool:
        """Take a request whose blocks before `start.first_block` are cached at `start.target`, and fetch those that are
        not cached here. False: they are too few, or there is no room now or others wait for it, whom it would pass;
        nothing is held, and to have it computed is the caller's. `bytes_per_s`: of the link; 0: not known."""
        key, request, source, end_block = start.key, start.request, start.target, start.first_block
        scheduler, ledger = self._engine.scheduler, self._engine.ledger
        is_paused = self._pauses.has(source.worker.uuid, self._clock.now_s())
        if is_paused or scheduler.num_waiting or self._table.refusal(key) is not None:
            return False
        num_lacking = end_block - len(scheduler.find_cached(request))
        if num_lacking <= 0 or num_lacking * ledger.block_size < start.fetch_from_tokens:
            return False
        allocation = scheduler.reserve(request)
        if isinstance(allocation, Cause):
            return False
        first_block = ledger.written_tokens(allocation, request.params.loops) // ledger.block_size
        block_ids = tuple(ledger.block_ids(allocation)[first_block:end_block])
        limit_s = self._limit_s(source.worker, end_block - first_block, bytes_per_s)
        self._fetches[key] = _Fetch(source.worker, allocation, first_block, end_block, self._clock.now_s(), limit_s)
        self._carry_out(self._table.reserve(key, first_block, block_ids))
        if isinstance(self._table.bind(key, source), Refused):  # it is known to be gone
            self._give_up(key, Cause.PEER_LOST, f"{source.name} is gone")
            return True
        self._ports.entered(FetchState.FETCHING)
        self._late.add(key, limit_s)
        self._ports.ask_prefix(source, Wanted(key, first_block, runs_of(block_ids), limit_s))
        return True

    def end(self, key: HandoffKey) -> None:
        """The request is not to be computed any more; unknown ones are fine."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.is_wanted = False
            self._carry_out(self._table.cancel(key, Cause.CANCELLED))

    def source_gone(self, worker: WorkerId, proven: bool) -> None:
        """A decode worker left."""
        self._carry_out(self._table.worker_gone(worker, proven))
        self._forgive(worker)

    def handle(self, event: FetchEvent) -> None:
        match event:
            case PushArrived():
                self._push_arrived(event)
            case PrefixAnswered(sent):
                self._answered(sent)
            case WriterClosed(key, writer, state):
                self._carry_out(self._table.writer_closed(key, writer, state))
            case Quiesced(worker):
                self._carry_out(self._table.quiesced(worker))

    def tick(self) -> None:
        for key in self._late.take_expired():
            limit_s = self._fetches[key].limit_s
            self._give_up(key, Cause.TRANSFER_TIMEOUT, f"it is not here within {limit_s:.1f} s")
        if self._clock.now_s() >= self._ask_again_at_s:
            self._ask_again_at_s = self._clock.now_s() + ASK_AGAIN_S
            self._carry_out(self._table.asks())

    # ---- inside

    def _limit_s(self, source: WorkerId, num_blocks: int, bytes_per_s: float) -> float:
        """How long a fetch of so many blocks may take behind those that are on their way from the same worker."""
        if not bytes_per_s:
            return self._most_limit_s
        ahead = sum(fetch.num_blocks for fetch in self._fetches.values() if fetch.source == source)
        should_s = (ahead + num_blocks) * self._engine.layout.block_bytes / bytes_per_s
        return min(self._most_limit_s, max(LEAST_LIMIT_S, SLOWER * should_s))

    def _push_arrived(self, arrived: PushArrived) -> None:
        """Of a push that carries a digest the bytes are checked before it counts."""
        agent_name, notice = arrived.agent_name, arrived.notice
        block_ids = self._table.landing_blocks(agent_name, notice) if notice.digest else ()
        if not block_ids or digest_of(self._engine.arena.read_blocks(block_ids)) == notice.digest:
            self._carry_out(self._table.push_arrived(agent_name, notice))
        else:
            self._log_failure(notice.key, Cause.CORRUPTED, f"push {notice.range.seq} came with other bytes than sent")
            self._carry_out(self._table.push_corrupted(notice))

    def _answered(self, sent: PrefixSent) -> None:
        if sent.key not in self._fetches:
            return  # given up meanwhile
        if sent.cause is not None:
            self._give_up(sent.key, sent.cause, sent.detail)
            return
        effect = self._table.committed(sent)
        if isinstance(effect, Ignored):
            self._give_up(sent.key, effect.cause, "its answer does not fit what was asked for")
        self._carry_out((effect,))

    def _give_up(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        self._log_failure(key, cause, detail)
        self._carry_out(self._table.cancel(key, cause))

    def _log_failure(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        logger.warning("a prefix is computed, not fetched: %s: %s", cause, detail, extra=about(key.request_id))

    def _carry_out(self, effects: Iterable[ReceiveEffect]) -> None:
        effects = tuple(effects)
        quarantines = {effect.key: effect for effect in effects if isinstance(effect, Quarantine)}
        for effect in effects:
            match effect:
                case Activate(key, _, _):
                    self._whole(key)
                case GaveUp(key, cause):
                    self._gave_up(key, cause, quarantines.get(key))
                case FreeQuarantined(key, block_ids):
                    self._engine.ledger.free_quarantined(block_ids)
                case AskClose(key, writer):
                    self._ports.ask_close(key, writer)
                case PollToQuiescence(worker):
                    self._ports.to_transfer(Quiesce(worker))
                case _:
                    pass  # blocks went with GaveUp; what was ignored is counted by the table

    def _forgive(self, source: WorkerId) -> None:
        """It has brought something, or is gone."""
        self._pauses.forget(lambda uuid: uuid == source.uuid)

    def _whole(self, key: HandoffKey) -> None:
        fetch = self._fetches.pop(key)
        self._forgive(fetch.source)
        self._engine.scheduler.start_reserved(fetch.allocation, fetch.end_block * self._engine.ledger.block_size)
        self._ports.entered(FetchState.FETCHED)
        self._ports.landed(key, fetch.num_blocks)

    def _gave_up(self, key: HandoffKey, cause: Cause, quarantine: Quarantine | None) -> None:
        """The request is computed all the same, in other blocks where some of these are in quarantine."""
        fetch = self._fetches.pop(key)
        if cause in _FAULTS:
            self._pauses.failed(fetch.source.uuid, self._clock.now_s(), fetch.began_s)
        if fetch.is_wanted:
            self._engine.scheduler.reserved.requeue(fetch.allocation)
        else:
            self._engine.scheduler.unreserve(fetch.allocation)
        if quarantine is None:
            self._engine.ledger.release(fetch.allocation)
        else:
            self._engine.ledger.quarantine(fetch.allocation, quarantine.block_ids)
