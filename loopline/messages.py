"""Every message between the processes of a cluster, as frozen records. No I/O, no protobuf here.

`docs/protocol.md` has the table of who sends what to whom, and why repeating each is safe; `loopline.wire.convert`
turns them into protobuf and back.

Directions: coordinator -> worker (`CoordinatorMessage`) and worker -> coordinator (`WorkerMessage`) travel in order on
the one stream that the worker opened (its life connection); prefill <-> decode are unary calls; a `PushNotice` rides on
its push.
"""

from dataclasses import dataclass
from enum import StrEnum

from loopline.request import FinishReason, Request, TokenLogprobs


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """A worker as the coordinator sees it."""

    STARTING = "starting"  # joined, no ready pair yet
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


@dataclass(frozen=True)
class WorkerLoad:
    """A worker's state in a heartbeat; room is derived from this and from nothing else."""

    step: int  # the engine's step counter: a hung engine is seen by it
    busy: bool  # the engine has work, so `step` should move
    running: int
    waiting: int
    token_loops: int  # queued and running work
    promised_blocks: int  # of the free ones, those that running requests may still grow into
    blocks: BlockCounts
    handoffs: tuple[tuple[str, int], ...]  # (state, count)
    ignored: tuple[tuple[str, int], ...]  # (cause, count) of messages that were ignored


# ---- worker -> coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """First message of a worker's stream."""

    peer: Peer
    role: Role
    pid: int
    fingerprint: Fingerprint
    capacity: Capacity


@dataclass(frozen=True)
class Heartbeat:
    """Keeps the lease; sent every third of it, and when the load changes to or from nothing."""

    load: WorkerLoad
    draining: bool


@dataclass(frozen=True)
class PairReady:
    """A prefill worker warmed its link to a decode worker."""

    decode: WorkerId
    transport: str
    bytes_per_s: float


@dataclass(frozen=True)
class PairFailed:
    """A prefill worker could not pair with a decode worker."""

    decode: WorkerId
    reason: str


@dataclass(frozen=True)
class Reserved:
    """Answer to Reserve. `cause` None: blocks are held and `cached_tokens` of the prompt are already there."""

    key: HandoffKey
    cached_tokens: int = 0
    cause: Cause | None = None
    detail: str = ""


@dataclass(frozen=True)
class Granted:
    """Answer to Bind: the blocks that `writer` and nobody else may write, in the prompt's order from block
    `first_block` of the request on. `cause` set: refused."""

    key: HandoffKey
    writer: WorkerId
    first_block: int = 0
    runs: tuple[BlockRun, ...] = ()
    cause: Cause | None = None
    detail: str = ""


@dataclass(frozen=True)
class HandoffStats:
    """What a handoff cost: for tables and metrics."""

    pushes: int
    descriptors: int
    num_bytes: int
    transport: str
    prefill_s: float


@dataclass(frozen=True)
class Prefilled:
    """The prefill worker's commit to the coordinator: the first token (position = tokens known before it)."""

    key: HandoffKey
    attempt: int
    token: "TokenRow"
    stats: HandoffStats


@dataclass(frozen=True)
class TokenRow:
    """One generated token. The coordinator takes only the current attempt and the next position.

    A row that ends the request by a stop id has `token_id` None: the stop id is not part of the answer.
    """

    request_id: str
    attempt: int
    position: int
    token_id: int | None
    depth: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepTokens:
    """All rows of one engine step, in one message."""

    step: int
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True)
class RequestFailed:
    """A worker gave up one request (any state); nothing of it is held there, quarantined blocks aside."""

    key: HandoffKey
    cause: Cause
    detail: str


WorkerMessage = (
    Register | Heartbeat | PairReady | PairFailed | Reserved | Granted | Prefilled | StepTokens | RequestFailed
)


# ---- coordinator -> worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """Answer to Register. `epoch` is this coordinator's life: messages of another are ignored."""

    epoch: int
    lease_s: float


@dataclass(frozen=True)
class Rejected:
    """Answer to Register when the worker cannot join; the worker exits with the reason."""

    reason: str


@dataclass(frozen=True)
class Pair:
    """To a prefill worker: connect to this decode worker and warm the link up."""

    decode: Peer


@dataclass(frozen=True)
class Reserve:
    """To a decode worker: hold blocks for this request and say what of its prefix is there."""

    key: HandoffKey
    request: Request
    deadline_s: float  # remaining


@dataclass(frozen=True)
class Bind:
    """To a decode worker: this prefill worker is the one writer of the handoff."""

    key: HandoffKey
    writer: Peer


@dataclass(frozen=True)
class StartPrefill:
    """To a prefill worker: compute the request's prompt and push it into the granted blocks of `target`."""

    key: HandoffKey
    request: Request
    target: Peer
    first_block: int
    runs: tuple[BlockRun, ...]
    deadline_s: float  # remaining


@dataclass(frozen=True)
class Cancel:
    """To any worker: give up this request up to and including this generation; unknown ones leave a tombstone."""

    key: HandoffKey
    cause: Cause


@dataclass(frozen=True)
class PeerGone:
    """To any worker: another worker left. `proven`: its process is known to be gone; else only suspected."""

    worker: WorkerId
    proven: bool


@dataclass(frozen=True)
class Drain:
    """To any worker: take nothing new, finish what runs within the limit, then leave."""

    limit_s: float


CoordinatorMessage = Welcome | Rejected | Pair | Reserve | Bind | StartPrefill | Cancel | PeerGone | Drain


# ---- prefill <-> decode ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Prefill -> decode, unary: who I am, what I compute, how to reach my agent."""

    peer: Peer
    fingerprint: Fingerprint
    agent_metadata: bytes


@dataclass(frozen=True)
class Connected:
    """Answer to Connect: the same of the decode worker, and its arena."""

    peer: Peer
    fingerprint: Fingerprint
    agent_metadata: bytes
    region: RegionManifest


@dataclass(frozen=True, order=True)
class PushRange:
    """Push `seq` carries blocks [first_block, first_block + num_blocks) of the request."""

    seq: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class Commit:
    """Prefill -> decode, unary: the first token, and every push that was posted."""

    key: HandoffKey
    writer: WorkerId
    attempt: int
    token: TokenRow
    pushes: tuple[PushRange, ...]


@dataclass(frozen=True)
class CommitAnswer:
    """`cause` None: taken. A cause means it was ignored, and why."""

    cause: Cause | None = None


@dataclass(frozen=True)
class CloseHandoff:
    """Decode -> prefill, unary long poll: post nothing more for this or an older generation; answer when all handles
    are terminal, or PENDING after a while."""

    key: HandoffKey
    writer: WorkerId


class CloseState(StrEnum):
    """How a writer answers CloseHandoff."""

    PENDING = "pending"  # handles are still in flight: ask again
    CLOSED = "closed"  # nothing more will be posted and every handle is DONE: blocks may be reused
    FAILED = "failed"  # a handle ended in an error: only the writer's proven end frees the blocks


@dataclass(frozen=True)
class HandoffClosed:
    """Answer to CloseHandoff."""

    key: HandoffKey
    state: CloseState


@dataclass(frozen=True)
class PushNotice:
    """Rides on a push as its NIXL notification; valid only from the agent of the bound writer."""

    key: HandoffKey
    range: PushRange
