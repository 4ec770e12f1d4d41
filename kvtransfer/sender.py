"""The sending half of the transfer thread: posts pushes, watches their handles and tells how handoffs ended. What may
be posted is decided in `SendTable`, when in `PushBudget`; which blocks to push, in the worker that has
them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.agent import Handle, HandleState, HandleStatus, TransferAgent
from kvtransfer.budget import BudgetLimits, PushBudget, WaitingPush
from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    ConnectPeer,
    CrowdChanged,
    Event,
    HandoffDrained,
    HandoffRefused,
    OpenHandoff,
    PeerRemoved,
    Push,
    PushFailed,
    TransferCost,
)
from kvtransfer.handoff import Closed, Drained, Refused, SendEffect
from kvtransfer.links import Link, Links
from kvtransfer.manifest import coalesce, paired_descriptors
from kvtransfer.push_counts import PushCounts
from kvtransfer.send_table import SendTable
from kvtransfer.verify import ReadBlocks, digest_of
from loopline.clock import Clock
from loopline.errors import TransferError
from loopline.identity import Cause, HandoffKey, RegionManifest, WorkerId
from loopline.messages import PushNotice, PushRange
from loopline.settings import TransferSettings

MAX_WAITERS = 8
"""Of one handoff's close. Waiters give up after a while and ask again, so the oldest ones may be dropped."""


@dataclass(slots=True)
class _Outgoing:
    """A handoff that is written: where to, and what it has cost so far. `is_whole`: its last push waits or was posted,
    and the table hears of the commit once none waits."""

    link: Link
    first_block: int
    target_blocks: tuple[int, ...]
    pushes: int = 0
    descriptors: int = 0
    num_bytes: int = 0
    is_whole: bool = False

    def targets_of(self, part: PushRange) -> tuple[int, ...]:
        start = part.first_block - self.first_block
        if start < 0 or part.num_blocks < 1 or start + part.num_blocks > len(self.target_blocks):
            raise TransferError(f"push {part} is outside of the {len(self.target_blocks)} granted blocks")
        return self.target_blocks[start : start + part.num_blocks]


@dataclass(slots=True, eq=False)
class _Flight:
    """A posted push whose handle is not terminal. `is_late`: past its deadline, reported and out of the budget."""

    key: HandoffKey
    part: PushRange
    handle: Handle
    link: Link
    num_bytes: int
    posted_at_s: float
    deadline_s: float
    is_late: bool = False


class Sender:
    """Writes this worker's blocks into other workers' arenas.

    Invariants: every handoff that was opened ends in exactly one HandoffDrained or first CloseReport, and by then no
    handle of it is in flight; a push is reported at most once as failed; what goes wrong with one handoff stays in it.
    Between two looks at the handles at most one push is posted, because a post may copy all its bytes.
    """

    def __init__(
        self,
        agent: TransferAgent,
        region: RegionManifest,
        encode_notice: Callable[[PushNotice], bytes],
        push_timeout_s: float,
        clock: Clock,
        emit: Callable[[Event], None],
        limits: BudgetLimits | None = None,
        read_blocks: ReadBlocks | None = None,
    ) -> None:
        """`limits`: of the bytes in flight; by default those of the default settings. `read_blocks`: of this arena,
        for digests in notices; None: no digests."""
        self._agent = agent
        self._region = region
        self._encode_notice = encode_notice
        self._push_timeout_s = push_timeout_s
        self._clock = clock
        self._emit = emit
        self._read_blocks = read_blocks
        self._links = Links(agent, region, push_timeout_s, clock, emit, self._is_writing, self._has_flights)
        self._table = SendTable()
        self._outgoing: dict[HandoffKey, _Outgoing] = {}
        self._flights: list[_Flight] = []
        self._waiters: dict[HandoffKey, list[object]] = {}
        self._crowd = CrowdChanged(frozenset(), False)  # as last told
        self.push_counts = PushCounts()
        self.budget = PushBudget(limits or BudgetLimits.of(TransferSettings()))

    @property
    def is_busy(self) -> bool:
        """Is anything in flight, or waiting to be, that should end soon?"""
        is_sending = any(not flight.is_late for flight in self._flights) or self.budget.counts().num_waiting > 0
        return self._links.is_busy or is_sending

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(state, number of handoffs)."""
        return self._table.counts()

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """(cause, number of commands ignored or refused)."""
        return self._table.ignored()

    # ---- commands --------------------------------------------------------------------------------------------------

    def connect(self, command: ConnectPeer) -> None:
        """Make the link; its event comes now or from `poll`."""
        self._links.connect(command)

    def open(self, command: OpenHandoff) -> None:
        """Start a handoff, or say why not."""
        link = self._links.ready_link(command.target)
        if link is None:
            self._emit(HandoffRefused(command.key, Cause.PEER_LOST, f"no link to {command.target.agent_name}"))
            return
        self._drop_waiting(HandoffKey(command.key.request_id, command.key.generation - 1))
        effects = self._table.open(command.key, command.target)
        if not any(isinstance(effect, Refused) for effect in effects):
            self._outgoing[command.key] = _Outgoing(link, command.first_block, command.target_blocks)
        self._carry_out(effects)

    def push(self, command: Push) -> None:
        """Let a push wait for its turn, and post the one whose turn it is."""
        key, part = command.key, command.range
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.is_whole or not self._table.may_post(key, part.seq):
            self._emit(PushFailed(key, part, Cause.TOMBSTONED, "the handoff is not open, or this push was posted"))
            return
        num_bytes = max(0, part.num_blocks) * self._region.block_bytes
        self.budget.add(WaitingPush(command, outgoing.link.agent_name, num_bytes, self._clock.now_s()))
        self._post_next()

    def commit(self, command: CommitHandoff) -> None:
        """No more pushes follow; those that wait are still posted."""
        if self.budget.waits(command.key):
            self._outgoing[command.key].is_whole = True
        else:
            self._carry_out(self._table.commit(command.key))

    def close(self, command: Close) -> None:
        """Post nothing more; the report comes now or from `poll`."""
        waiters = self._waiters.setdefault(command.key, [])
        if command.waiter is not None and command.waiter not in waiters:
            waiters.append(command.waiter)
            del waiters[:-MAX_WAITERS]
        self._close(command.key)

    def remove_peer(self, worker: WorkerId) -> None:
        """End everything that goes to a worker which is proven gone."""
        for key in self._table.keys_to(worker):
            self._drop_waiting(key)
        self._links.remove(worker)
        self.poll()
        for key in self._table.keys_to(worker):
            self._close(key)
        self._emit(PeerRemoved(worker))

    # ---- progress --------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look at every handle once, then post the push whose turn it is. True when anything of that happened."""
        self._links.poll()
        any_ended = False
        now_s = self._clock.now_s()
        for flight in list(self._flights):
            status = self._agent.poll(flight.handle)
            if status.is_terminal:
                any_ended = True
                self._flights.remove(flight)
                self._flight_ended(flight, status)
            elif not flight.is_late and now_s >= flight.deadline_s:
                self._flight_is_late(flight)
        any_posted = self._post_next()
        self._tell_crowd()
        return any_ended or any_posted

    def _post_next(self) -> bool:
        """Post one push, if one may go now. Any failure to do so closes its handoff."""
        push = self.budget.take(self._clock.now_s())
        if push is None:
            return False
        key, part = push.command.key, push.command.range
        if not self._table.may_post(key, part.seq):
            self.budget.ended(push.peer, push.num_bytes)
            self._emit(PushFailed(key, part, Cause.TOMBSTONED, "this push was posted"))
            return True
        outgoing = self._outgoing[key]
        try:
            flight = self._post(push.command, outgoing)
        except Exception as error:  # nothing was posted; what kind of failure it was does not change what follows
            self.budget.ended(push.peer, push.num_bytes)
            self.push_counts.failed()
            expected = isinstance(error, TransferError | ValueError)
            self._emit(PushFailed(key, part, Cause.TRANSFER_FAILED if expected else Cause.INTERNAL, str(error)))
            self._close(key)
            if not expected:
                raise
            return True
        self._flights.append(flight)
        if outgoing.is_whole and not self.budget.waits(key):
            self._carry_out(self._table.commit(key))
        return True

    def _tell_crowd(self) -> None:
        crowd = CrowdChanged(self.budget.crowded(), self.budget.is_full)
        if crowd != self._crowd:
            self._crowd = crowd
            self._emit(crowd)

    def _close(self, key: HandoffKey) -> None:
        """Post nothing more for this or an older generation."""
        self._drop_waiting(key)
        self._carry_out(self._table.close(key))

    def _drop_waiting(self, key: HandoffKey) -> None:
        for push in self.budget.drop(key, self._clock.now_s()):
            detail = "the handoff was closed while this push waited"
            self._emit(PushFailed(push.command.key, push.command.range, Cause.TOMBSTONED, detail))

    def _post(self, command: Push, outgoing: _Outgoing) -> _Flight:
        """Raises before anything was posted, or not at all."""
        key, part = command.key, command.range
        runs = coalesce(command.source_blocks, outgoing.targets_of(part))
        local, remote = paired_descriptors(self._region, outgoing.link.region, runs)
        digest = b"" if self._read_blocks is None else digest_of(self._read_blocks(command.source_blocks))
        notice = self._encode_notice(PushNotice(key, part, digest))
        posted_at_s = self._clock.now_s()
        handle = self._agent.post_write(outgoing.link.agent_name, local, remote, notice)
        self._table.posted(key, part)
        outgoing.pushes += 1
        outgoing.descriptors += len(local)
        outgoing.num_bytes += local.num_bytes
        deadline_s = self._clock.now_s() + self._push_timeout_s
        return _Flight(key, part, handle, outgoing.link, local.num_bytes, posted_at_s, deadline_s)

    def _flight_ended(self, flight: _Flight, status: HandleStatus) -> None:
        self._agent.release(flight.handle)
        if not flight.is_late:
            self.budget.ended(flight.link.agent_name, flight.num_bytes)
        if status.state is HandleState.DONE:
            if not flight.is_late:
                self.push_counts.done(flight.num_bytes, self._clock.now_s() - flight.posted_at_s)
            self._carry_out(self._table.push_done(flight.key, flight.part.seq))
            return
        if not flight.is_late:
            self.push_counts.failed()
            self._emit(PushFailed(flight.key, flight.part, Cause.TRANSFER_FAILED, status.reason))
        self._links.broke(flight.link, status.reason)
        self._drop_waiting(flight.key)
        self._carry_out(self._table.push_failed(flight.key, flight.part.seq))

    def _flight_is_late(self, flight: _Flight) -> None:
        flight.is_late = True
        self.push_counts.late()
        self.budget.ended(flight.link.agent_name, flight.num_bytes)
        detail = f"not terminal after {self._push_timeout_s:g} s"
        self._emit(PushFailed(flight.key, flight.part, Cause.TRANSFER_TIMEOUT, detail))
        self._close(flight.key)

    def _carry_out(self, effects: tuple[SendEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Drained(key):
                    outgoing = self._outgoing.pop(key)
                    cost = TransferCost(
                        outgoing.pushes, outgoing.descriptors, outgoing.num_bytes, outgoing.link.transport
                    )
                    self._emit(HandoffDrained(key, cost))
                case Closed(key, state):
                    self._outgoing.pop(key, None)
                    self._emit(CloseReport(key, state, tuple(self._waiters.pop(key, ()))))
                case Refused(key, cause):
                    self._emit(HandoffRefused(key, cause))
                case _:
                    pass

    def _is_writing(self, agent_name: str) -> bool:
        """Is a push to it in flight that may still end well? One past its deadline would hold up the link for ever."""
        return any(flight.link.agent_name == agent_name and not flight.is_late for flight in self._flights)

    def _has_flights(self, agent_name: str) -> bool:
        return any(flight.link.agent_name == agent_name for flight in self._flights)
