"""The cluster at one moment, as frozen records: what the router decides on and what GetStatus shows. No I/O."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.effects import Assigned
from loopline.identity import Capacity, Fingerprint, Peer, Role, WorkerId, WorkerLoad, WorkerState
from loopline.request import Request


@dataclass(frozen=True)
class Link:
    """A warmed pair as its prefill worker reported it."""

    decode: WorkerId
    decode_name: str
    transport: str
    bytes_per_s: float
    is_slow: bool  # under the configured floor


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker. `ready_pairs` are workers of the other role, alive, that it has a warm link with."""

    peer: Peer
    role: Role
    state: WorkerState
    pid: int
    group: Fingerprint
    capacity: Capacity
    load: WorkerLoad | None
    assigned: tuple[Assigned, ...]
    ready_pairs: tuple[WorkerId, ...]
    links: tuple[Link, ...]
    refused: bool  # it said "no room" since its last heartbeat
    heartbeat_age_s: float

    @property
    def worker(self) -> WorkerId:
        return self.peer.worker

    @property
    def takes_work(self) -> bool:
        return self.state is WorkerState.READY and not self.refused

    @property
    def usable_blocks(self) -> int:
        """Blocks of its arena that are not in quarantine."""
        return self.capacity.total_blocks - (self.load.blocks.quarantined if self.load is not None else 0)

    @property
    def has_suspect(self) -> bool:
        """Whether one of the requests that were given to it may be what ends workers."""
        return any(row.is_suspect for row in self.assigned)

    @property
    def token_loops(self) -> int:
        """Work that was given to it and is left."""
        return sum(row.token_loops for row in self.assigned)


@dataclass(frozen=True)
class Backlog:
    """What waits for room at one moment."""

    first: Request | None  # in the queue
    num_queued: int
    num_reserved: int  # with blocks on a decode worker, and no prefill worker yet


@dataclass(frozen=True)
class ClusterSnapshot:
    """All workers: living ones in order of joining, then those lost (not: drained) whose name nobody took over."""

    workers: tuple[WorkerView, ...]
    peer_share: float = 1.0  # part of a prefill worker's slots that one of its several decode workers may have

    def with_role(self, role: Role) -> list[WorkerView]:
        return [view for view in self.workers if view.role is role and view.state is not WorkerState.LOST]

    def find(self, worker: WorkerId) -> WorkerView | None:
        return next((view for view in self.workers if view.worker == worker), None)

    def with_request(self, rows: Mapping[WorkerId, Assigned]) -> "ClusterSnapshot":
        """The same moment after a request was given to workers: these are its rows now."""
        return replace(self, workers=tuple(_with_row(view, rows.get(view.worker)) for view in self.workers))

    @property
    def has_suspects(self) -> bool:
        """Whether a worker has been given a suspect."""
        return any(view.has_suspect for view in self.workers)

    @property
    def has_ready_pair(self) -> bool:
        return any(view.state is WorkerState.READY for view in self.with_role(Role.DECODE))

    def arena_tokens(self) -> int | None:
        """Tokens of the largest request that some pairing group can run; None while no group has both roles."""
        most: dict[Fingerprint, dict[Role, int]] = {}
        for role in Role:
            for view in self.with_role(role):
                sizes = most.setdefault(view.group, {})
                sizes[role] = max(sizes.get(role, 0), view.capacity.total_blocks * view.capacity.block_size)
        whole = [min(sizes.values()) for sizes in most.values() if len(sizes) == len(Role)]
        return max(whole) if whole else None


def host_of(address: str) -> str:
    """The host in HOST:PORT, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is reached from its own machine only. A name other than localhost is taken for another's."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_row(view: WorkerView, row: Assigned | None) -> WorkerView:
    if row is None:
        return view
    others = (other for other in view.assigned if other.request_id != row.request_id)
    return replace(view, assigned=(*others, row))
