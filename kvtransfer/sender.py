"""The sending half of the transfer thread: posts pushes, watches their handles and tells how handoffs ended. What may
be posted is decided in `SendTable`; which blocks to push and when, in the prefill worker."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.agent import Handle, HandleState, HandleStatus, TransferAgent
from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    ConnectPeer,
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
from kvtransfer.send_table import SendTable
from loopline.clock import Clock
from loopline.errors import TransferError
from loopline.identity import Cause, HandoffKey, RegionManifest, WorkerId
from loopline.messages import PushNotice, PushRange

MAX_WAITERS = 8
"""Of one handoff's close. Waiters give up after a while and ask again, so the oldest ones may be dropped."""


@dataclass(slots=True)
class _Outgoing:
    """A handoff that is written: where to, and what it has cost so far."""

    link: Link
    first_block: int
    target_blocks: tuple[int, ...]
    pushes: int = 0
    descriptors: int = 0
    num_bytes: int = 0

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
    deadline_s: float
    is_late: bool = False


@dataclass(slots=True)
class InFlight:
    """Bytes posted and not terminal, late pushes left out. Written by the transfer thread, read by any."""

    total: int = 0
    by_agent: dict[str, int] = field(default_factory=dict)

    def add(self, agent_name: str, num_bytes: int) -> None:
        """Add bytes, or take them off when negative."""
        self.total += num_bytes
        left = self.by_agent.get(agent_name, 0) + num_bytes
        if left:
            self.by_agent[agent_name] = left
        else:
            self.by_agent.pop(agent_name, None)


class Sender:
    """Writes this worker's blocks into other workers' arenas.

    Invariants: every handoff that was opened ends in exactly one HandoffDrained or first CloseReport, and by then no
    handle of it is in flight; a push is reported at most once as failed; what goes wrong with one handoff stays in it.
    """

    def __init__(
        self,
        agent: TransferAgent,
        region: RegionManifest,
        encode_notice: Callable[[PushNotice], bytes],
        push_timeout_s: float,
        clock: Clock,
        emit: Callable[[Event], None],
    ) -> None:
        self._agent = agent
        self._region = region
        self._encode_notice = encode_notice
        self._push_timeout_s = push_timeout_s
        self._clock = clock
        self._emit = emit
        self._links = Links(agent, region, push_timeout_s, clock, emit, self._is_writing)
        self._table = SendTable()
        self._outgoing: dict[HandoffKey, _Outgoing] = {}
        self._flights: list[_Flight] = []
        self._waiters: dict[HandoffKey, list[object]] = {}
        self.in_flight = InFlight()

    @property
    def is_busy(self) -> bool:
        """Is anything in flight that should end soon?"""
        return self._links.is_busy or any(not flight.is_late for flight in self._flights)

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
        effects = self._table.open(command.key, command.target)
        if not any(isinstance(effect, Refused) for effect in effects):
            self._outgoing[command.key] = _Outgoing(link, command.first_block, command.target_blocks)
        self._carry_out(effects)

    def push(self, command: Push) -> None:
        """Post one push. Any failure to do so closes the handoff."""
        key, part = command.key, command.range
        if not self._table.may_post(key, part.seq):
            self._emit(PushFailed(key, part, Cause.TOMBSTONED, "the handoff is not open, or this push was posted"))
            return
        try:
            flight = self._post(command, self._outgoing[key])
        except Exception as error:  # nothing was posted; what kind of failure it was does not change what follows
            expected = isinstance(error, TransferError | ValueError)
            self._emit(PushFailed(key, part, Cause.TRANSFER_FAILED if expected else Cause.INTERNAL, str(error)))
            self._carry_out(self._table.close(key))
            if not expected:
                raise
            return
        self._flights.append(flight)
        self.in_flight.add(flight.link.agent_name, flight.num_bytes)

    def commit(self, command: CommitHandoff) -> None:
        """No more pushes follow."""
        self._carry_out(self._table.commit(command.key))

    def close(self, command: Close) -> None:
        """Post nothing more; the report comes now or from `poll`."""
        waiters = self._waiters.setdefault(command.key, [])
        if command.waiter is not None and command.waiter not in waiters:
            waiters.append(command.waiter)
            del waiters[:-MAX_WAITERS]
        self._carry_out(self._table.close(command.key))

    def remove_peer(self, worker: WorkerId) -> None:
        """End everything that goes to a worker which is proven gone."""
        self._links.remove(worker)
        self.poll()
        for key in self._table.keys_to(worker):
            self._carry_out(self._table.close(key))
        self._emit(PeerRemoved(worker))

    # ---- progress --------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look at every handle once. True when one became terminal."""
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
        return any_ended

    def _post(self, command: Push, outgoing: _Outgoing) -> _Flight:
        """Raises before anything was posted, or not at all."""
        key, part = command.key, command.range
        runs = coalesce(command.source_blocks, outgoing.targets_of(part))
        local, remote = paired_descriptors(self._region, outgoing.link.region, runs)
        notice = self._encode_notice(PushNotice(key, part))
        handle = self._agent.post_write(outgoing.link.agent_name, local, remote, notice)
        self._table.posted(key, part)
        outgoing.pushes += 1
        outgoing.descriptors += len(local)
        outgoing.num_bytes += local.num_bytes
        deadline_s = self._clock.now_s() + self._push_timeout_s
        return _Flight(key, part, handle, outgoing.link, local.num_bytes, deadline_s)

    def _flight_ended(self, flight: _Flight, status: HandleStatus) -> None:
        self._agent.release(flight.handle)
        if not flight.is_late:
            self.in_flight.add(flight.link.agent_name, -flight.num_bytes)
        if status.state is HandleState.DONE:
            self._carry_out(self._table.push_done(flight.key, flight.part.seq))
            return
        if not flight.is_late:
            self._emit(PushFailed(flight.key, flight.part, Cause.TRANSFER_FAILED, status.reason))
        self._links.broke(flight.link, status.reason)
        self._carry_out(self._table.push_failed(flight.key, flight.part.seq))

    def _flight_is_late(self, flight: _Flight) -> None:
        flight.is_late = True
        self.in_flight.add(flight.link.agent_name, -flight.num_bytes)
        detail = f"not terminal after {self._push_timeout_s:g} s"
        self._emit(PushFailed(flight.key, flight.part, Cause.TRANSFER_TIMEOUT, detail))
        self._carry_out(self._table.close(flight.key))

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
        return any(flight.link.agent_name == agent_name for flight in self._flights)
