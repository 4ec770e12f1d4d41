"""Fetches, from the side that has the KV: a prefill worker that is to compute a prompt asks for the blocks of it that
are cached here, and they are pushed into its arena by the machinery of handoffs, with the roles exchanged.

    FetchPrefix --> lending (pinned; linking, then pushing) --HandoffDrained--> answered: gone
                        |
                        '-- given up (the handoff ended, Close, peer lost, failure) --> answered
                              '--> closing: pinned until the last handle has ended; in quarantine where one failed

Only cached blocks that a bound reservation shares are lent, and only to its writer: they are pinned once more, so that
they stay however the reservation ends. Nobody writes them, so others may read them meanwhile. Links back to prefill
workers are made with the first fetch over each. Engine thread only; `HandoffIn` owns it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.commands import (
    Close,
    CloseReport,
    Command,
    CommitHandoff,
    ConnectPeer,
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
)
from kvtransfer.handoff import SendState
from kvtransfer.manifest import most_push_blocks, push_ranges
from loopline.engine.engine import Engine
from loopline.fetch_messages import FetchPrefix, FetchState, PrefixSent
from loopline.identity import Cause, HandoffKey, WorkerId
from loopline.kv.block_pool import ids_of
from loopline.kv.ledger import Allocation
from loopline.messages import HandoffClosed, PushRange
from loopline.telemetry.logs import about
from loopline.worker.closings import Closings
from loopline.worker.events import CloseAsked, FetchAsked

logger = logging.getLogger(__name__)
FetchEvent = (
    PeerConnected
    | PeerConnectFailed
    | PeerRemoved
    | HandoffDrained
    | HandoffRefused
    | PushFailed
    | CloseReport
    | CloseAsked
    | CrowdChanged
)
"""What of the transfer thread and of peers is about fetches."""


@dataclass(slots=True)
class _Loan:
    """One fetch that is under way. `is_open`: pushes may have been posted."""

    asked: FetchAsked
    pinned: Allocation
    pushes: tuple[PushRange, ...]
    is_open: bool = False

    @property
    def fetch(self) -> FetchPrefix:
        return self.asked.fetch


class FetchOut:
    """Invariants: a request has one loan at most; every question is answered once; pinned blocks are held until the
    last handle of their fetch is terminal."""

    def __init__(
        self,
        engine: Engine,
        to_transfer: Callable[[Command], None],
        identity: Callable[[], WorkerId],
        entered: Callable[[str], None],
        max_push_bytes: int | None = None,
    ) -> None:
        """`max_push_bytes`: of one push, if a block is not larger; None: no bound."""
        self._engine = engine
        self._to_transfer = to_transfer
        self._identity = identity
        self._entered = entered
        self._most_push_blocks = most_push_blocks(max_push_bytes, engine.layout.block_bytes)
        self._loans: dict[str, _Loan] = {}  # by request id
        self._closings = Closings(engine.ledger)
        self._linked: dict[str, WorkerId] = {}  # by uuid: readers whose link is ready
        self._known: set[str] = set()  # uuids of readers that were ever to be linked

    def counts(self) -> dict[str, int]:
        """Fetches by state, for heartbeats."""
        return {
            FetchState.LENDING.value: len(self._loans),
            SendState.CLOSING.value: len(self._closings.keys),
            SendState.FAILED.value: self._closings.num_failed,
        }

    def begin(self, asked: FetchAsked, reserved: Allocation, num_shared: int) -> None:
        """Lend blocks of a reservation, of which the first `num_shared` are cached ones. A loan of an older generation
        ends."""
        fetch, key = asked.fetch, asked.fetch.key
        self.end(HandoffKey(key.request_id, key.generation - 1), Cause.STALE, "a newer generation asks")
        count = sum(run.count for run in fetch.runs)
        if key.request_id in self._loans or key in self._closings.keys:
            self.refuse(asked, Cause.DUPLICATE, "the prefix is being fetched")
            return
        if count < 1 or fetch.first_block + count > num_shared:
            text = (
                f"blocks {fetch.first_block} to {fetch.first_block + count - 1} are asked for and {num_shared} cached"
            )
            self.refuse(asked, Cause.INVALID, text)
            return
        pinned = self._engine.scheduler.reserved.share(reserved, fetch.first_block + count)
        pushes = push_ranges(fetch.first_block, fetch.first_block + count, self._most_push_blocks)
        loan = _Loan(asked, pinned, pushes)
        self._loans[key.request_id] = loan
        self._entered(FetchState.LENDING)
        if self._linked.get(fetch.reader.worker.uuid) == fetch.reader.worker:
            self._open(loan)
        else:
            self._known.add(fetch.reader.worker.uuid)
            self._to_transfer(ConnectPeer(fetch.reader, fetch.agent_metadata, fetch.region))

    def refuse(self, asked: FetchAsked, cause: Cause, detail: str) -> None:
        """Nothing was or will be posted for this question."""
        asked.answer(PrefixSent(asked.fetch.key, self._identity(), cause=cause, detail=detail))

    def end(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        """Post nothing more for this or an older generation; unknown ones are fine."""
        loan = self._loans.get(key.request_id)
        if loan is None or loan.fetch.key.generation > key.generation:
            return
        del self._loans[key.request_id]
        own = loan.fetch.key
        if loan.is_open:
            self._closings.begin(own, loan.fetch.reader.worker, loan.pinned)
            self._to_transfer(Close(own))
        else:
            self._engine.ledger.release(loan.pinned)
        text = "the prefill worker %s gets none of the prefix: %s: %s"
        logger.info(text, loan.fetch.reader.name, cause, detail, extra=about(key.request_id))
        self.refuse(loan.asked, cause, detail)

    def reader_gone(self, worker: WorkerId, proven: bool) -> None:
        """A prefill worker left."""
        for loan in [loan for loan in self._loans.values() if loan.fetch.reader.worker.uuid == worker.uuid]:
            self.end(loan.fetch.key, Cause.PEER_LOST, f"{loan.fetch.reader.name} is gone")
        self._linked.pop(worker.uuid, None)
        if proven and worker.uuid in self._known:
            self._known.discard(worker.uuid)
            self._to_transfer(RemovePeer(worker))

    def handle(self, event: FetchEvent) -> None:
        match event:
            case PeerConnected(peer):
                self._linked[peer.worker.uuid] = peer.worker
                for loan in self._waiting_for(peer.worker):
                    self._open(loan)
            case PeerConnectFailed(peer, reason):
                self._linked.pop(peer.worker.uuid, None)
                for loan in self._waiting_for(peer.worker):
                    self.end(loan.fetch.key, Cause.PEER_LOST, reason)
            case PeerRemoved(worker):
                self._closings.target_removed(worker)
            case HandoffDrained(key):
                self._drained(key)
            case HandoffRefused(key, cause, detail):
                self._end_exact(key, cause, detail or "the transfer thread refused it")
            case PushFailed(key, _, cause, detail):
                self._end_exact(key, cause, detail)
            case CloseReport():
                self._closed(event)
            case CloseAsked():
                key = event.close.key
                self.end(key, Cause.CANCELLED, "the prefill worker closed it")
                self._to_transfer(Close(key, waiter=event.answer))
            case CrowdChanged():
                pass  # pushes wait for their turn below

    def _open(self, loan: _Loan) -> None:
        """Have all of it pushed. A push's blocks stay pinned until the fetch has drained or closed."""
        fetch, key = loan.fetch, loan.fetch.key
        loan.is_open = True
        block_ids = self._engine.ledger.block_ids(loan.pinned)
        self._to_transfer(OpenHandoff(key, fetch.reader.worker, fetch.first_block, tuple(ids_of(fetch.runs))))
        for part in loan.pushes:
            source = tuple(block_ids[part.first_block : part.first_block + part.num_blocks])
            self._to_transfer(Push(key, part, source))
        self._to_transfer(CommitHandoff(key))

    def _waiting_for(self, reader: WorkerId) -> list[_Loan]:
        return [loan for loan in self._loans.values() if not loan.is_open and loan.fetch.reader.worker == reader]

    def _drained(self, key: HandoffKey) -> None:
        loan = self._loans.get(key.request_id)
        if loan is None or loan.fetch.key != key:
            return  # given up meanwhile: its CloseReport follows
        del self._loans[key.request_id]
        self._engine.ledger.release(loan.pinned)
        loan.asked.answer(PrefixSent(key, self._identity(), loan.pushes))

    def _end_exact(self, key: HandoffKey, cause: Cause, detail: str) -> None:
        loan = self._loans.get(key.request_id)
        if loan is not None and loan.fetch.key == key:
            self.end(key, cause, detail)

    def _closed(self, report: CloseReport) -> None:
        for answer in report.waiters:
            if callable(answer):
                answer(HandoffClosed(report.key, report.state))
        self._end_exact(report.key, Cause.TRANSFER_FAILED, "it was closed below")
        self._closings.ended(report.key, report.state)
