"""The cluster at one moment, as frozen records: what the router decides on and what GetStatus shows. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from coordinator.effects import Assigned
from coordinator.prefix_source import SourceRule
from loopline.identity import Capacity, Fingerprint, Peer, Role, WorkerId, WorkerLoad, WorkerState
from loopline.request import Request
from loopline.security import is_loopback_host
from loopline.settings import promised_tokens


@dataclass(frozen=True)
class Link:
    """A warmed pair as its prefill worker reported it."""

    decode: WorkerId
    decode_name: str
    transport: str
    bytes_per_s: float
    is_slow: bool  # under the configured floor


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What a worker was given and has not ended, added up. Blocks are of its own size."""

    num_requests: int
    num_awaiting: int
    num_suspects: int
    token_loops: int
    prompt_token_loops: int  # of these, those of prompts
    known_blocks: int  # for the tokens that are known
    most_blocks: int  # that a worker that generates keeps for them, with the growth that it promised
    by_decode: Mapping[WorkerId, tuple[int, int]]  # on a prefill worker: (requests, known blocks) by whom they are for


@dataclass(frozen=True)
class Avoided:
    """Whom the router goes past while there is another: workers, and links as (prefill, decode)."""

    workers: frozenset[WorkerId] = frozenset()
    links: frozenset[tuple[WorkerId, WorkerId]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """One worker. `ready_pairs` are workers, alive, that it has a warm link with; a unified one has none."""

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
    metrics_address: str = ""  # HOST:PORT of its metrics; "": it serves none
    link_failure: str = ""  # why the last link that failed did; "": none has since it was tried again

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

    @cached_property
    def sums(self) -> Sums:
        """Of `assigned`, added up once."""
        by_decode: dict[WorkerId, tuple[int, int]] = {}
        known_blocks = most_blocks = 0
        for row in self.assigned:
            blocks = self.blocks_for(row.num_known_tokens)
            known_blocks += blocks
            most_blocks += self.blocks_kept_for(row)
            if row.decode is not None:
                requests, held = by_decode.get(row.decode, (0, 0))
                by_decode[row.decode] = (requests + 1, held + blocks)
        return Sums(
            num_requests=len(self.assigned),
            num_awaiting=sum(row.awaits_prefill for row in self.assigned),
            num_suspects=sum(row.is_suspect for row in self.assigned),
            token_loops=sum(row.token_loops for row in self.assigned),
            prompt_token_loops=sum(row.prompt_token_loops for row in self.assigned),
            known_blocks=known_blocks,
            most_blocks=most_blocks,
            by_decode=by_decode,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of this worker that `num_tokens` tokens need."""
        return -(-num_tokens // self.capacity.block_size)

    def blocks_kept_for(self, row: Assigned) -> int:
        """Blocks that a worker which generates keeps for a request that it has: what it has written, or what was
        promised when it was taken, whichever is more."""
        share, most = self.capacity.growth_share, row.max_kv_tokens
        if share == 1:
            return self.blocks_for(most)
        return self.blocks_for(
            max(min(row.num_known_tokens, most), promised_tokens(row.num_started_tokens, most, share))
        )

    def blocks_to_take(self, request: Request) -> int:
        """Blocks that a worker which generates must be able to keep, to take this request."""
        known, most = request.num_known_tokens, request.max_kv_tokens
        return self.blocks_for(promised_tokens(known, most, self.capacity.growth_share))

    def fits_alone(self, request: Request) -> bool:
        """Whether a worker which generates could finish this request with nothing else to do."""
        return self.blocks_for(request.max_kv_tokens) <= self.usable_blocks


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
    avoided: Avoided = field(default_factory=Avoided)
    sources: SourceRule = field(default_factory=SourceRule)  # who may compute prompts

    def with_role(self, role: Role) -> list[WorkerView]:
        return [view for view in self.workers if view.role is role and view.state is not WorkerState.LOST]

    def find(self, worker: WorkerId) -> WorkerView | None:
        return next((view for view in self.workers if view.worker == worker), None)

    def arena_tokens(self) -> int | None:
        """Tokens of the largest request that some pairing group can run; None while no group can run any."""
        most: dict[Fingerprint, dict[Role, int]] = {}
        for role in Role:
            for view in self.with_role(role):
                sizes = most.setdefault(view.group, {})
                sizes[role] = max(sizes.get(role, 0), view.capacity.total_blocks * view.capacity.block_size)
        whole = []
        for sizes in most.values():
            decode, unified = sizes.get(Role.DECODE, 0), sizes.get(Role.UNIFIED, 0)
            pair = decode if self.sources.is_local_only else min(sizes.get(Role.PREFILL, 0), decode)
            whole.append(max(pair, unified))
        return max(whole, default=0) or None


def host_of(address: str) -> str:
    """The host in HOST:PORT, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is reached from its own machine only. A name other than localhost is taken for another's."""
    return is_loopback_host(host_of(address))
