"""The workers of a cluster: who joined, who is paired with whom, who is gone. Pure: moments come in, commands go out.

A pairing group is the set of workers with equal fingerprints; pairs exist inside a group only. A worker is lost once
and for all: when its process (or another) comes back, it is a new WorkerId.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.effects import Assigned, Send
from coordinator.life import Books
from coordinator.prefix_source import SourceRule
from coordinator.snapshot import ClusterSnapshot, Link, WorkerView, is_loopback
from loopline.errors import OperatorError
from loopline.identity import LAST_EPOCH, Capacity, Role, WorkerId, WorkerLoad, WorkerState
from loopline.messages import Drain, Heartbeat, Pair, PairFailed, PairReady, PeerGone, Register

_LOG = logging.getLogger(__name__)
_PROOFS_KEPT = 256
_LOST_KEPT = 64  # lost workers that a proof of their end may still come for


class LossReason(StrEnum):
    """How the coordinator came to count a worker as lost."""

    REAPED = "reaped"  # its launcher saw its process end
    LEASE = "lease"  # it was silent for a whole lease
    STREAM = "stream"  # its stream ended, and it was not draining
    REPLACED = "replaced"  # another took its name


@dataclass(frozen=True)
class Joined:
    """The worker is in. `superseded`: who had its name and must be declared lost first: an earlier life of the same
    process, or one whose lease has run out."""

    superseded: WorkerId | None
    commands: tuple[Send, ...]


@dataclass(frozen=True)
class Refused:
    """The worker must not join; the reason is for its log. `retry`: not yet."""

    reason: str
    retry: bool


@dataclass
class _Member:
    """A living worker, or a lost one that is remembered for a while."""

    register: Register
    heard_at_s: float
    load: WorkerLoad | None = None
    books: Books | None = None
    draining: bool = False
    drain_order: Drain | None = None  # that it has not confirmed
    refused: bool = False
    lost: bool = False
    left: bool = False  # it was draining when its stream ended: gone in order
    proven: bool = False  # its process is known to be gone
    links: dict[WorkerId, Link] = field(default_factory=dict)  # a prefill worker's
    failed_pairs: dict[WorkerId, str] = field(default_factory=dict)

    @property
    def worker(self) -> WorkerId:
        return self.register.peer.worker


class Registry:
    """Workers by WorkerId, in order of joining."""

    def __init__(
        self,
        lease_s: float,
        rate_floor_bytes_per_s: float | None = None,
        peer_share: float = 1.0,
        sources: SourceRule | None = None,
    ) -> None:
        """A link that is slower than the floor is used, with a warning. `peer_share`: part of a prefill worker's slots
        that one of its several decode workers may have. `sources`: where decode workers compute all prompts they are
        ready without a link."""
        self._sources = sources or SourceRule()
        self._lease_s = lease_s
        self._rate_floor = rate_floor_bytes_per_s
        self._peer_share = peer_share
        self._alive: dict[WorkerId, _Member] = {}
        self._lost: dict[WorkerId, _Member] = {}
        self._pairs: dict[WorkerId, tuple[WorkerId, ...]] | None = None  # None: links have changed
        self._proofs: dict[str, None] = {}  # uuids of processes that are known to have ended, whoever they had joined

    def __contains__(self, worker: WorkerId) -> bool:
        """Whether it is alive, as far as is known."""
        return worker in self._alive

    def is_missed(self, worker: WorkerId) -> bool:
        """Whether its loss would be news, and not the end of a drain."""
        return worker in self._alive and not self._alive[worker].draining

    def name(self, worker: WorkerId) -> str:
        member = self._alive.get(worker) or self._lost.get(worker)
        return member.register.peer.name if member else f"{worker.uuid}/{worker.epoch}"

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def join(self, register: Register, now_s: float) -> Joined | Refused:
        """Take a worker in, and pair a prefill worker with every decode worker of its group, and the other way round.

        It hears which of those that it may have known are proven gone: a worker that was away may still hold blocks in
        quarantine for one of them.
        """
        peer = register.peer
        wrong = _capacity_fault(register.capacity)
        if wrong is not None:
            return Refused(f"worker {peer.name}: {wrong}", retry=False)
        if peer.worker in self._alive or peer.worker in self._lost:
            reason = f"worker {peer.name}: epoch {peer.worker.epoch} of {peer.worker.uuid} has joined before"
            return Refused(reason, retry=False)
        namesake = next((m for m in self._alive.values() if m.register.peer.name == peer.name), None)
        superseded = None
        if namesake is not None:
            is_later_life = namesake.worker.uuid == peer.worker.uuid and namesake.worker.epoch < peer.worker.epoch
            if not is_later_life and not self._is_expired(namesake, now_s):
                reason = f"a worker named {peer.name} is alive at {namesake.register.peer.address}"
                return Refused(f"{reason}, by its lease", retry=True)
            superseded = namesake.worker
        member = _Member(register, now_s)
        others = [other for other in self._alive.values() if other.worker != superseded]
        unreachable = _address_fault(member, others)
        if unreachable is not None:
            return Refused(f"worker {peer.name}: {unreachable}", retry=False)
        self._report_group(member, superseded)
        self._alive[peer.worker], self._pairs = member, None
        gone = [other for other in self._lost.values() if other.proven and _may_pair(member, other)]
        commands = [Send(member.worker, PeerGone(other.worker, proven=True)) for other in gone]
        known = {other.worker.uuid for other in gone}
        commands += [Send(member.worker, _end_of(uuid)) for uuid in self._proofs if uuid not in known]
        commands += [send for other in others for send in _pair(member, other)]
        return Joined(superseded, tuple(commands))

    def _report_group(self, member: _Member, superseded: WorkerId | None) -> None:
        others = [other.register for other in self._alive.values() if other.worker != superseded]
        if any(other.fingerprint == member.register.fingerprint for other in others):
            return
        for other in others[:1]:
            difference = member.register.fingerprint.first_difference(other.fingerprint)
            _LOG.warning(
                "%s starts a pairing group of its own; against %s: %s",
                member.register.peer.name,
                other.peer.name,
                difference,
            )

    def lose(self, worker: WorkerId, *, proven: bool, lapsed: bool = False) -> list[Send]:
        """It left, or its lease `lapsed`. Tells every worker that may know it; a second call only adds the proof."""
        member = self._alive.pop(worker, None)
        if member is None:
            member = self._lost.get(worker)
            if member is None or member.proven or not proven:
                return []
        if not member.lost:
            member.lost, member.left = True, member.draining and not lapsed
        member.proven = member.proven or proven
        self._lost[worker], self._pairs = member, None
        self._forget_some()
        for other in self._alive.values():
            other.links.pop(worker, None)
            other.failed_pairs.pop(worker, None)
        return [
            Send(other.worker, PeerGone(worker, proven)) for other in self._alive.values() if _may_pair(member, other)
        ]

    def drain(self, name: str, limit_s: float) -> Send:
        """Have the living worker of that name leave; it gets no new work from now on. Raises OperatorError that names
        those that exist."""
        member = next((m for m in self._alive.values() if m.register.peer.name == name), None)
        if member is None:
            names = ", ".join(m.register.peer.name for m in self._alive.values()) or "none"
            raise OperatorError(f"no worker is named {name!r}; there are: {names}")
        member.draining, member.drain_order = True, Drain(limit_s)
        return Send(member.worker, member.drain_order)

    def has_left(self, worker: WorkerId) -> bool:
        """Whether it is gone in order: it was draining when its stream ended."""
        return worker in self._lost and self._lost[worker].left

    def _forget_some(self) -> None:
        """Drop the oldest of too many lost ones, first those of which nothing more can be learned."""
        while len(self._lost) > _LOST_KEPT:
            proven = (worker for worker, member in self._lost.items() if member.proven)
            del self._lost[next(proven, None) or next(iter(self._lost))]

    def prove(self, uuid: str) -> list[Send]:
        """This process has ended, perhaps as a worker of an earlier coordinator: every worker may hold something for
        it, and so may those that join later."""
        if uuid in self._proofs:
            return []
        self._proofs[uuid] = None
        if len(self._proofs) > _PROOFS_KEPT:
            del self._proofs[next(iter(self._proofs))]
        if any(worker.uuid == uuid and member.proven for worker, member in self._lost.items()):
            return []  # told when it was lost
        return [Send(worker, _end_of(uuid)) for worker in self._alive if worker.uuid != uuid]

    def lives_with(self, uuid: str) -> list[WorkerId]:
        """Lives of this process that are not yet known to be over."""
        members = [*self._alive.values(), *self._lost.values()]
        return [member.worker for member in members if member.worker.uuid == uuid and not member.proven]

    def expired(self, now_s: float) -> list[WorkerId]:
        """Living workers whose lease ran out."""
        return [member.worker for member in self._alive.values() if self._is_expired(member, now_s)]

    def _is_expired(self, member: _Member, now_s: float) -> bool:
        return now_s >= member.heard_at_s + self._lease_s

    def next_expiry_s(self) -> float | None:
        """When the first lease runs out unless its worker speaks; None without workers."""
        return min((member.heard_at_s + self._lease_s for member in self._alive.values()), default=None)

    # ---- what workers say (the caller has checked that they are alive) ---------------------------------------------

    def heartbeat(self, worker: WorkerId, message: Heartbeat, now_s: float) -> list[Send]:
        """Keep the lease; a prefill worker's failed pairs are tried once more."""
        member = self._alive[worker]
        member.heard_at_s = now_s
        member.load = message.load
        member.books = Books(now_s - message.lag_s, frozenset(message.load.known))
        member.draining = member.draining or message.draining  # for good; this one may be older than the order
        member.refused = False
        again = [self._alive[decode] for decode in member.failed_pairs if decode in self._alive]
        member.failed_pairs.clear()
        sends = [send for other in again for send in _pair(member, other)]
        if message.draining:
            member.drain_order = None
        elif member.drain_order is not None:  # it may have been lost; a worker takes the first one only
            sends.append(Send(worker, member.drain_order))
        return sends

    def pair_ready(self, worker: WorkerId, message: PairReady) -> bool:
        """Whether the pair is usable: its decode worker is alive and in the group."""
        member, decode = self._alive[worker], self._alive.get(message.decode)
        if decode is None or not _is_pair(member, decode):
            return False
        name, rate = decode.register.peer.name, message.bytes_per_s
        is_slow = self._rate_floor is not None and rate < self._rate_floor
        if is_slow:
            _LOG.warning(
                "pair %s -> %s is slow: %.4g bytes/s over %s, the floor is %d",
                member.register.peer.name,
                name,
                rate,
                message.transport,
                self._rate_floor,
            )
        member.links[message.decode] = Link(message.decode, name, message.transport, rate, is_slow)
        member.failed_pairs.pop(message.decode, None)
        self._pairs = None
        return True

    def pair_failed(self, worker: WorkerId, message: PairFailed) -> None:
        member = self._alive[worker]
        self._pairs = None
        member.links.pop(message.decode, None)
        member.failed_pairs[message.decode] = message.reason
        _LOG.warning("pair %s -> %s failed: %s", member.register.peer.name, self.name(message.decode), message.reason)

    def refused(self, worker: WorkerId) -> None:
        """It said that it has no room: skip it until its next heartbeat."""
        if worker in self._alive:
            self._alive[worker].refused = True

    def books(self) -> dict[WorkerId, Books]:
        """What each living worker that has spoken has of requests."""
        return {worker: member.books for worker, member in self._alive.items() if member.books is not None}

    # ---- the picture -----------------------------------------------------------------------------------------------

    def snapshot(self, now_s: float, assigned: Mapping[WorkerId, tuple[Assigned, ...]]) -> ClusterSnapshot:
        """Everything at `now_s`; `assigned` is the tracker's table."""
        names = {member.register.peer.name for member in self._alive.values()}
        gone = {m.register.peer.name: m for m in self._lost.values() if m.register.peer.name not in names}
        members = [*self._alive.values(), *(member for member in gone.values() if not member.left)]
        views = (self._view(member, now_s, assigned.get(member.worker, ())) for member in members)
        return ClusterSnapshot(tuple(views), self._peer_share, sources=self._sources)

    def _view(self, member: _Member, now_s: float, assigned: tuple[Assigned, ...]) -> WorkerView:
        register = member.register
        pairs = () if member.lost else self._ready_pairs(member)
        return WorkerView(
            peer=register.peer,
            role=register.role,
            state=_state(member, bool(pairs) or self._is_able_alone(register.role)),
            pid=register.pid,
            metrics_address=register.metrics_address,
            group=register.fingerprint,
            capacity=register.capacity,
            load=member.load,
            assigned=assigned,
            ready_pairs=pairs,
            links=tuple(member.links.values()),
            refused=member.refused,
            heartbeat_age_s=now_s - member.heard_at_s,
            link_failure=next(reversed(member.failed_pairs.values()), ""),
        )

    @property
    def can_serve(self) -> bool:
        """Whether a decode worker with a link, or one that needs none, is ready."""
        generating = (member for member in self._alive.values() if member.register.role.generates)
        return any(
            not member.draining and (self._is_able_alone(member.register.role) or self._ready_pairs(member))
            for member in generating
        )

    def _is_able_alone(self, role: Role) -> bool:
        return role is Role.UNIFIED or (role is Role.DECODE and self._sources.is_local_only)

    def _ready_pairs(self, member: _Member) -> tuple[WorkerId, ...]:
        """Found for all workers at once, when links have changed. Workers with equal links have one tuple."""
        if self._pairs is None:
            links: dict[WorkerId, list[WorkerId]] = {}
            for other in self._alive.values():
                for decode in other.links:
                    links.setdefault(decode, []).append(other.worker)
                    links.setdefault(other.worker, []).append(decode)
            shared: dict[tuple[WorkerId, ...], tuple[WorkerId, ...]] = {}
            found = ((worker, tuple(others)) for worker, others in links.items())
            self._pairs = {worker: shared.setdefault(others, others) for worker, others in found}
        return self._pairs.get(member.worker, ())


def _end_of(uuid: str) -> PeerGone:
    return PeerGone(WorkerId(uuid, LAST_EPOCH), proven=True)


def _state(member: _Member, is_able: bool) -> WorkerState:
    """`is_able`: a request can go all its way by this worker, and those that it has links with."""
    if member.lost:
        return WorkerState.LOST
    if member.draining:
        return WorkerState.DRAINING
    return WorkerState.READY if is_able else WorkerState.STARTING


def _may_pair(one: _Member, other: _Member) -> bool:
    """A unified worker is paired with nobody: it needs no other's KV and gives none away."""
    roles = {one.register.role, other.register.role}
    return roles == {Role.PREFILL, Role.DECODE} and one.register.fingerprint == other.register.fingerprint


def _address_fault(member: _Member, others: list[_Member]) -> str | None:
    """Why it could never be paired with one of them: either is reached from its own machine only."""
    mine = member.register.peer.address
    for other in others:
        theirs = other.register.peer.address
        if _pair(member, other) and is_loopback(mine) is not is_loopback(theirs):
            name = other.register.peer.name
            return f"address is {mine} and that of {name} {theirs}; allowed: loopback for all workers, or for none"
    return None


def _is_pair(prefill: _Member, decode: _Member) -> bool:
    return prefill.register.role is Role.PREFILL and _may_pair(prefill, decode)


def _capacity_fault(capacity: Capacity) -> str | None:
    """What makes a capacity impossible; a worker that says such a thing is not one of ours."""
    for name in ("block_size", "total_blocks", "max_running", "token_bytes"):
        if getattr(capacity, name) < 1:
            return f"{name} is {getattr(capacity, name)}; allowed: 1 and above"
    if not 0 <= capacity.growth_share <= 1:
        return f"growth_share is {capacity.growth_share}; allowed: 0 to 1"
    return None


def _pair(one: _Member, other: _Member) -> list[Send]:
    """The command that makes a pair of two workers, where they may be one."""
    prefill, decode = (one, other) if one.register.role is Role.PREFILL else (other, one)
    if not _is_pair(prefill, decode) or decode.draining or prefill.draining:
        return []
    return [Send(prefill.worker, Pair(decode.register.peer))]
