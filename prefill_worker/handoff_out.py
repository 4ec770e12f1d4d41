"""The prefill worker's logic on its engine thread: requests in, chunks pushed, the first token committed.

    StartPrefill --> waiting for blocks --> computing, pushing chunk by chunk --> committed --HandoffDrained--> gone
                          |                      |                                   |
                          '------- given up (Cancel, CloseHandoff, deadline, failure) '--> closing --CloseReport--> gone

Where the request says so, what its decode worker has of the prompt is fetched first (`fetch_in`).

Source blocks are released when every push is DONE, and not before: a posted write reads them whatever was cancelled.
Where a push ended in an error they are quarantined until the target is proven gone.
"""

import logging
from collections import Counter

from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    CrowdChanged,
    HandoffDrained,
    HandoffRefused,
    OpenHandoff,
    PeerConnected,
    PeerConnectFailed,
    PeerRemoved,
    Push,
    PushFailed,
    RemovePeer,
    TransferThreadFailed,
)
from kvtransfer.handoff import SendState
from kvtransfer.manifest import coalesce, most_push_blocks, push_ranges
from loopline.clock import Clock
from loopline.engine.engine import Engine
from loopline.identity import Cause, HandoffKey
from loopline.kv.block_pool import ids_of
from loopline.kv.ledger import Allocation
from loopline.messages import (
    Cancel,
    Commit,
    HandoffClosed,
    HandoffStats,
    PairFailed,
    PairReady,
    PeerGone,
    Prefilled,
    RequestFailed,
    StartPrefill,
    TokenRow,
)
from loopline.sched.plan import ChunkDone, StepOutcome
from loopline.telemetry.logs import about
from loopline.worker.closings import Closings
from loopline.worker.deadlines import Deadlines
from loopline.worker.events import BeginDrain, CloseAsked, CommitAnswered, CommitUndelivered, CoordinatorLost
from prefill_worker.fetch_in import FetchEvent, FetchIn, FetchPorts
from prefill_worker.gate import PushGate
from prefill_worker.outgoing import Outgoing, PrefillPorts

logger = logging.getLogger(__name__)
_SETTLING = (None, Cause.DUPLICATE, Cause.TOMBSTONED, Cause.STALE)
"""Answers to a commit after which nothing is left to do: the decode worker has it, or was told to give it up."""


class HandoffOut:
    """Invariant: a request id is in `_outgoing` at most once; blocks of a handoff are held until its last event."""

    def __init__(
        self,
        engine: Engine,
        ports: PrefillPorts,
        clock: Clock,
        gate: PushGate | None = None,
        max_push_bytes: int | None = None,
        push_timeout_s: float = 30.0,
    ) -> None:
        """`gate`: the engine's policy asks it; None: nothing is held back. `max_push_bytes`: of one push, if a block is
        not larger; None: no bound. `push_timeout_s`: how long a fetch may take at most."""
        self._engine = engine
        self._ports = ports
        self._clock = clock
        self._gate = gate or PushGate()
        self._most_push_blocks = most_push_blocks(max_push_bytes, engine.layout.block_bytes)
        self._deadlines = Deadlines(clock, self._is_outgoing)
        self._outgoing: dict[str, Outgoing] = {}
        self._closings = Closings(engine.ledger, self._gate.linger)
        fetching = FetchPorts(ports.to_transfer, ports.ask_prefix, ports.ask_close, ports.entered, self._fetched)
        self._fetches = FetchIn(engine, fetching, clock, push_timeout_s)
        self._unanswered: set[HandoffKey] = set()  # commits that are on their way to decode workers
        self._links: dict[str, PeerConnected] = {}  # target uuid -> its ready link
        self._ignored: Counter[str] = Counter()
        self._is_draining = False

    # ---- WorkerCore

    def handle(self, event: object) -> None:
        match event:
            case StartPrefill():
                self._start(event)
            case Cancel(key, cause):
                self._cancel(key, cause)
            case CloseAsked():
                self._close_asked(event)
            case PeerConnected() | PeerConnectFailed() | PeerGone() | PeerRemoved():
                self._peer_event(event)
            case CrowdChanged():
                self._gate.changed(event)
            case HandoffDrained(key):
                self._drained(key)
            case CloseReport():
                self._closed(event)
            case HandoffRefused(key, cause, detail):
                self._refused(key, cause, detail)
            case PushFailed(key, _, cause, detail):
                self._give_up_key(key, cause, detail)
            case CommitAnswered() | CommitUndelivered():
                self._commit_ended(event)
            case CoordinatorLost():
                for out in list(self._outgoing.values()):
                    self._give_up(out)
            case BeginDrain():
                self._is_draining = True
            case TransferThreadFailed(error):
                logger.error("transfer thread: %s", error)
            case _ if isinstance(event, FetchEvent):
                self._fetches.handle(event)
            case _:
                logger.error("prefill worker: no handling for %r", event)

    def stepped(self, outcome: StepOutcome) -> None:
        for chunk in outcome.chunks:
            out = self._outgoing.get(chunk.request_id)
            if out is not None:
                self._push(out, chunk)
        for row in outcome.rows:
            out = self._outgoing.get(row.request_id)
            if out is not None:
                self._first_token(out, row)
        for lost in outcome.lost:
            out = self._outgoing.pop(lost.request_id)
            self._gate.leave(lost.request_id)
            self._close(out, lost.allocation)
            self._ports.to_coordinator(RequestFailed(out.key, lost.cause, lost.detail))

    def tick(self) -> None:
        for key in self._deadlines.take_expired():
            self._give_up_key(key, Cause.DEADLINE, "the request's deadline passed")
        self._fetches.tick()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        """In the words of the send table. A commit without an answer counts, whatever has drained."""
        committed = {out.key for out in self._outgoing.values() if out.is_committed}
        counts = {
            SendState.OPEN: len(self._outgoing) - len(committed),
            SendState.COMMITTED: len((committed | self._unanswered) - self._closings.keys),
            SendState.CLOSING: len(self._closings.keys),
            SendState.FAILED: self._closings.num_failed,
        }
        words = {**{state.value: count for state, count in counts.items()}, **self._fetches.counts()}
        return tuple(sorted((word, count) for word, count in words.items() if count))

    def ignored(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((self._ignored + Counter(dict(self._fetches.ignored()))).items()))

    def known(self) -> tuple[HandoffKey, ...]:
        """Those without a commit: afterwards it is the decode worker that must know the request."""
        return tuple(out.key for out in self._outgoing.values() if not out.is_committed)

    # ---- a request's way

    def _start(self, start: StartPrefill) -> None:
        key, request_id = start.key, start.key.request_id
        known = self._outgoing.get(request_id)
        if known is not None and known.key.generation >= key.generation:
            self._ignored[Cause.DUPLICATE if known.key == key else Cause.STALE] += 1
            return
        if known is not None:
            self._give_up(known)
        cause = self._start_refusal(start)
        if cause is not None:
            self._ports.to_coordinator(RequestFailed(key, cause[0], cause[1]))
            return
        blocks = tuple(ids_of(start.runs))
        self._outgoing[request_id] = Outgoing(
            key=key,
            request=start.request,
            target=start.target,
            first_block=start.first_block,
            target_blocks=blocks,
            began_s=self._clock.now_s(),
            next_block=start.first_block,
            transport=self._links[start.target.worker.uuid].transport,
        )
        self._gate.enter(request_id, start.target.worker.agent_name, start.first_block + len(blocks))
        self._deadlines.add(key, start.deadline_s)
        self._ports.entered(SendState.OPEN)
        self._ports.to_transfer(OpenHandoff(key, start.target.worker, start.first_block, blocks))

    def _start_refusal(self, start: StartPrefill) -> tuple[Cause, str] | None:
        """Why this worker does not take the request; None once the scheduler has it, or a prefix is fetched for it."""
        if self._is_draining:
            return Cause.DRAINING, "this worker is draining"
        if start.target.worker.uuid not in self._links:
            return Cause.PEER_LOST, f"no link to {start.target.name}"
        needed = self._engine.ledger.blocks_for(start.request.num_known_tokens)
        granted = start.first_block + sum(run.count for run in start.runs)
        if granted != needed:
            return Cause.INTERNAL, f"{granted} blocks are granted and the prompt has {needed}"
        bytes_per_s = self._links[start.target.worker.uuid].bytes_per_s
        if start.fetch_from_tokens and self._fetches.begin(start, bytes_per_s):
            return None
        cause = self._engine.scheduler.submit(start.request)
        return None if cause is None else (cause, f"{start.request.num_known_tokens} prompt tokens")

    def _fetched(self, key: HandoffKey, num_blocks: int) -> None:
        if self._is_outgoing(key):
            self._outgoing[key.request_id].fetched_blocks = num_blocks

    def _push(self, out: Outgoing, chunk: ChunkDone) -> None:
        """Push the blocks that this chunk completed, in as many pushes as their size asks for; with the last chunk the
        partial last block too."""
        out.cached_tokens = chunk.num_cached
        block_size = self._engine.ledger.block_size
        whole = chunk.num_computed // block_size
        end = self._engine.ledger.blocks_for(chunk.num_computed) if chunk.is_last else whole
        block_ids = self._engine.ledger.block_ids(chunk.allocation) if end > out.next_block else []
        for part in push_ranges(out.next_block, end, self._most_push_blocks, first_seq=len(out.pushes)):
            last = part.first_block + part.num_blocks
            source = tuple(block_ids[part.first_block : last])
            target = out.target_blocks[part.first_block - out.first_block : last - out.first_block]
            out.pushes.append(part)
            out.next_block = last
            out.descriptors += len(coalesce(source, target))
            self._ports.to_transfer(Push(out.key, part, source))

    def _first_token(self, out: Outgoing, row: TokenRow) -> None:
        num_blocks = sum(part.num_blocks for part in out.pushes)
        stats = HandoffStats(
            pushes=len(out.pushes),
            descriptors=out.descriptors,
            num_bytes=num_blocks * self._engine.layout.block_bytes,
            transport=out.transport,
            prefill_s=self._clock.now_s() - out.began_s,
            cached_tokens=out.cached_tokens,
            fetched_bytes=out.fetched_blocks * self._engine.layout.block_bytes,
        )
        self._ports.to_coordinator(Prefilled(out.key, out.request.attempt, row, stats))
        text = "prefilled %d tokens (%d cached, %d blocks of them fetched) in %.3f s, %d pushes to %s"
        found = out.cached_tokens, out.fetched_blocks
        numbers = out.request.num_known_tokens, *found, stats.prefill_s, stats.pushes, out.target.name
        logger.info(text, *numbers, extra=about(out.key.request_id))
        if row.finish is not None:  # the answer is whole: nothing is left to decode, the reservation is not needed
            self._give_up(out)
            return
        out.is_committed = True
        self._unanswered.add(out.key)
        self._ports.entered(SendState.COMMITTED)
        self._ports.to_transfer(CommitHandoff(out.key))
        commit = Commit(out.key, self._ports.identity(), out.request.attempt, row, tuple(out.pushes))
        self._ports.deliver_commit(out.target, commit)

    def _drained(self, key: HandoffKey) -> None:
        if not self._is_outgoing(key):
            return  # given up meanwhile: its CloseReport follows
        del self._outgoing[key.request_id]
        self._gate.leave(key.request_id)
        self._ports.entered(SendState.DRAINED)
        allocation = self._engine.scheduler.remove(key.request_id)
        if allocation is not None:
            self._engine.ledger.release(allocation)

    def _commit_ended(self, event: CommitAnswered | CommitUndelivered) -> None:
        """A request whose commit was not taken goes on nowhere, even if its blocks have all arrived: the coordinator
        must hear of it. Whether it still matters is the coordinator's to know."""
        self._unanswered.discard(event.key)
        if isinstance(event, CommitUndelivered):
            cause, detail = Cause.PEER_LOST, event.detail
        elif event.cause in _SETTLING:
            return
        else:
            cause, detail = Cause.TRANSFER_FAILED, f"{event.target} did not take the commit: {event.cause}"
        if self._is_outgoing(event.key):
            self._give_up(self._outgoing[event.key.request_id])
        self._ports.to_coordinator(RequestFailed(event.key, cause, detail))

    def _is_outgoing(self, key: HandoffKey) -> bool:
        out = self._outgoing.get(key.request_id)
        return out is not None and out.key == key

    # ---- giving up

    def _cancel(self, key: HandoffKey, cause: Cause) -> None:
        out = self._outgoing.get(key.request_id)
        if out is not None and out.key.generation <= key.generation:
            self._give_up(out)
        else:
            self._ignored[Cause.UNKNOWN] += 1
        self._ports.to_transfer(Close(key))  # leaves a tombstone: a start that comes later is refused

    def _close_asked(self, asked: CloseAsked) -> None:
        key = asked.close.key
        out = self._outgoing.get(key.request_id)
        if out is not None and out.key.generation <= key.generation:
            self._give_up(out)
            self._ports.to_coordinator(RequestFailed(out.key, Cause.CANCELLED, f"{out.target.name} closed the handoff"))
        self._ports.to_transfer(Close(key, waiter=asked.answer))

    def _give_up_key(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        if self._is_outgoing(key):
            self._give_up(self._outgoing[key.request_id])
            logger.warning("given up: %s: %s", cause, detail, extra=about(key.request_id))
            self._ports.to_coordinator(RequestFailed(key, cause, detail))

    def _give_up(self, out: Outgoing) -> None:
        del self._outgoing[out.key.request_id]
        self._gate.leave(out.key.request_id)
        self._fetches.end(out.key)
        self._close(out, self._engine.scheduler.remove(out.key.request_id))

    def _close(self, out: Outgoing, allocation: Allocation | None) -> None:
        if allocation is not None:
            self._closings.begin(out.key, out.target.worker, allocation)
        self._ports.entered(SendState.CLOSING)
        self._ports.to_transfer(Close(out.key))

    def _refused(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        """The transfer thread would not open it: nothing was or will be posted."""
        self._give_up_key(key, cause, detail or "the transfer thread refused the handoff")

    def _closed(self, report: CloseReport) -> None:
        for answer in report.waiters:
            if callable(answer):
                answer(HandoffClosed(report.key, report.state))
        self._give_up_key(report.key, Cause.TRANSFER_FAILED, "the handoff was closed below")
        if self._closings.ended(report.key, report.state):
            self._ports.entered(report.state)  # closed or failed, in the words of both

    # ---- peers

    def _peer_event(self, event: PeerConnected | PeerConnectFailed | PeerGone | PeerRemoved) -> None:
        match event:
            case PeerConnected(peer, transport, bytes_per_s):
                self._links[peer.worker.uuid] = event
                self._gate.num_peers = len(self._links)
                self._ports.to_coordinator(PairReady(peer.worker, transport, bytes_per_s))
            case PeerConnectFailed(peer, reason):
                self._links.pop(peer.worker.uuid, None)
                self._gate.num_peers = len(self._links)
                self._ports.to_coordinator(PairFailed(peer.worker, reason))
            case PeerGone(worker, proven):
                for out in [out for out in self._outgoing.values() if out.target.worker.uuid == worker.uuid]:
                    self._give_up_key(out.key, Cause.PEER_LOST, f"{out.target.name} is gone")
                link = self._links.get(worker.uuid)
                if link is not None and link.peer.worker.epoch <= worker.epoch:  # its next life is paired anew
                    del self._links[worker.uuid]
                    self._gate.num_peers = len(self._links)
                if proven:
                    self._ports.to_transfer(RemovePeer(worker))
                self._fetches.source_gone(worker, proven)
            case PeerRemoved(worker):
                self._closings.target_removed(worker)
