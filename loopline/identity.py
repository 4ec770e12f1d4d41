"""Who and what messages speak of: workers, handoffs, blocks, causes. `loopline.messages` has the messages themselves.

Frozen records, standard library only; every part of a cluster uses them.
"""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"  # takes whole requests: computes the prompt and decodes; has no links

    @property
    def generates(self) -> bool:
        """Whether requests are given to such a worker until they end."""
        return self is not Role.PREFILL


class WorkerState(StrEnum):
    """A worker as the coordinator sees it."""

    STARTING = "starting"  # joined, no ready pair yet (a unified worker needs none)
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class Cause(StrEnum):
    """Why something was refused or failed; each is one metric label."""

    NO_ROOM = "no_room"  # blocks or running slots; try again when state changes
    TOO_LARGE = "too_large"  # can never fit here
    DRAINING = "draining"
    TOMBSTONED = "tombstoned"  # this generation or a newer one was cancelled here
    STALE = "stale"  # an older generation, attempt or epoch than the one known
    DUPLICATE = "duplicate"  # said before; nothing done
    UNKNOWN = "unknown"  # no such request here
    WRONG_WRITER = "wrong_writer"  # not the writer that the blocks are bound to
    INCOMPLETE = "incomplete"  # the commit's set of pushes does not cover what was lacked
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    NO_REPLY = "no_reply"  # a worker that has handled all that came does not know of it
    CORRUPTED = "corrupted"  # a push's bytes are not those that were sent
    PEER_LOST = "peer_lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    INVALID = "invalid"  # this worker finds the request itself wrong
    INTERNAL = "internal"


@dataclass(frozen=True, order=True)
class WorkerId:
    """One life of one worker process: a fresh uuid at every start, an epoch that counts its joins."""

    uuid: str
    epoch: int

    @property
    def agent_name(self) -> str:
        """The NIXL agent's name: never used twice."""
        return f"loopline-{self.uuid}"


LAST_EPOCH = 2**63 - 1
"""Later than any life of a process: what is said of it is said of all its lives."""


@dataclass(frozen=True)
class Peer:
    """How to reach a worker: its identity, its name for people, HOST:PORT of its peer service."""

    worker: WorkerId
    name: str
    address: str


@dataclass(frozen=True, order=True)
class HandoffKey:
    """Identity of a handoff. A retry is a new generation with new blocks."""

    request_id: str
    generation: int


@dataclass(frozen=True, order=True)
class BlockRun:
    """`count` consecutive blocks of an arena from block `start`."""

    start: int
    count: int


@dataclass(frozen=True)
class Fingerprint:
    """What must be equal in two workers that share KV: (name, value) pairs in a fixed order."""

    fields: tuple[tuple[str, str], ...]

    def first_difference(self, other: "Fingerprint") -> str | None:
        """Name the first field that differs, with both values; None if all are equal."""
        mine, theirs = dict(self.fields), dict(other.fields)
        for name in list(mine) + [name for name in theirs if name not in mine]:
            if mine.get(name) != theirs.get(name):
                return f"{name}: {mine.get(name)} here, {theirs.get(name)} there"
        return None


@dataclass(frozen=True)
class RegionManifest:
    """A registered arena as its owner describes it to writers. A block is `block_bytes` at base + id x block_bytes."""

    base_address: int
    num_blocks: int
    block_bytes: int
    memory_kind: str  # "DRAM" | "VRAM"
    device_id: int
    null_block: int  # takes warm-up pushes; outside the total


@dataclass(frozen=True)
class BlockCounts:
    """Blocks by state. free + held + cached + quarantined = total (reserved ones are part of held)."""

    free: int
    held: int
    cached: int
    quarantined: int
    total: int

    @property
    def adds_up(self) -> bool:
        return self.free + self.held + self.cached + self.quarantined == self.total


@dataclass(frozen=True)
class Capacity:
    """What a worker can ever take."""

    block_size: int
    total_blocks: int
    max_running: int
    token_bytes: int  # KV bytes a token
    growth_share: float = 1.0  # part of a request's possible growth that it promises when it takes one


@dataclass(frozen=True)
class BudgetCounts:
    """A prefill worker's budget of bytes in flight. `waited_s`: for how long pushes have waited, summed over all that
    wait no more."""

    in_flight_bytes: int
    limit_bytes: int
    num_waiting: int
    waited_s: float


@dataclass(frozen=True)
class WorkerLoad:
    """A worker's state in a heartbeat. Room is this, less what the coordinator has given to the worker since."""

    step: int  # the engine's step counter: a hung engine is seen by it
    busy: bool  # the engine has work, so `step` should move
    running: int
    waiting: int
    token_loops: int  # queued and running work
    promised_blocks: int  # of the free ones, those that running requests may still grow into
    blocks: BlockCounts
    handoffs: tuple[tuple[str, int], ...]  # (state, count)
    ignored: tuple[tuple[str, int], ...]  # (cause, count) of messages that were ignored
    budget: BudgetCounts | None = None  # a prefill worker's
    known: tuple[HandoffKey, ...] = ()  # requests that it has and works on, or holds blocks for
    prompt_token_loops_per_s: float = 0.0  # how fast it computes prompts beside all else; 0: not known
