"""Every message between coordinator and workers, and between workers, as frozen records. No I/O, no protobuf here.

`docs/protocol.md` has the table of who sends what to whom, and why repeating each is safe; `loopline.wire.convert`
turns them into protobuf and back.

Directions: coordinator -> worker (`CoordinatorMessage`) and worker -> coordinator (`WorkerMessage`) travel in order on
the one stream that the worker opened (its life connection); prefill <-> decode are unary calls; a `PushNotice` rides on
its push.
"""

from dataclasses import dataclass
from enum import StrEnum

from loopline.identity import (
    BlockRun,
    Capacity,
    Cause,
    Fingerprint,
    HandoffKey,
    Peer,
    RegionManifest,
    Role,
    WorkerId,
    WorkerLoad,
)
from loopline.request import FinishReason, Request, TokenLogprobs

# ---- worker -> coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """First message of a worker's stream."""

    peer: Peer
    role: Role
    pid: int
    fingerprint: Fingerprint
    capacity: Capacity
    metrics_address: str = ""  # HOST:PORT at which it answers scrapes; "": it does not


@dataclass(frozen=True)
class Heartbeat:
    """Keeps the lease; sent every third of it, and when an idle engine's blocks, requests or handoffs have changed.

    `lag_s`: how long ago the engine thread had handled everything that had come to it. `load` is not older than that,
    and the answers to what had come by then are on their way, if not here."""

    load: WorkerLoad
    draining: bool
    lag_s: float = 0.0


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
class LocalPrefillStarted:
    """Answer to StartLocalPrefill. `cause` None: the worker computes the prompt itself; set: refused."""

    key: HandoffKey
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
    cached_tokens: int = 0  # prompt tokens that the prefill worker found or fetched, and did not compute
    fetched_bytes: int = 0  # that the decode worker pushed to it for that; not among `num_bytes`


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
    exit_probabilities: tuple[float, ...] = ()  # one a loop; empty: not asked for


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


@dataclass(frozen=True)
class PrefixReport:
    """What changed in a worker's prefix cache between states `number - 1` and `number`; where `is_whole`, all that is
    in state `number`. Sent only once the coordinator has asked. Digests are cut to CUT_DIGEST_BYTES and stand one
    behind the other; a state that needs more than one message comes in `num_parts`, counted from 0."""

    number: int
    is_whole: bool
    part: int
    num_parts: int
    published: bytes
    evicted: bytes


CUT_DIGEST_BYTES = 8
"""Of a digest in a PrefixReport: a hint needs no more."""

WorkerMessage = (
    Register
    | Heartbeat
    | PairReady
    | PairFailed
    | Reserved
    | Granted
    | LocalPrefillStarted
    | Prefilled
    | StepTokens
    | RequestFailed
    | PrefixReport
)


# ---- coordinator -> worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """Answer to Register. `epoch` is this coordinator's life: messages of another are ignored."""

    epoch: int
    lease_s: float


@dataclass(frozen=True)
class Rejected:
    """Answer to Register when the worker cannot join. `retry`: what hinders it passes by itself (its name is still held
    by a worker whose lease has not run out); else the worker exits with the reason."""

    reason: str
    retry: bool = False


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
    trace: str = ""  # W3C traceparent of the attempt; "": nobody traces it


@dataclass(frozen=True)
class Bind:
    """To a decode worker: this prefill worker is the one writer of the handoff."""

    key: HandoffKey
    writer: Peer


@dataclass(frozen=True)
class StartLocalPrefill:
    """To a decode worker: compute what it lacks of the reserved prompt itself; nobody else may write the blocks."""

    key: HandoffKey


@dataclass(frozen=True)
class StartPrefill:
    """To a prefill worker: compute the request's prompt and push it into the granted blocks of `target`."""

    key: HandoffKey
    request: Request
    target: Peer
    first_block: int
    runs: tuple[BlockRun, ...]
    deadline_s: float  # remaining
    trace: str = ""  # as in Reserve
    fetch_from_tokens: int = 0  # fetch what `target` has and this worker lacks, if it is so many; 0: nothing


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


@dataclass(frozen=True)
class ReportPrefixes:
    """To any worker: say all that your prefix cache holds, and from then on what changes."""


CoordinatorMessage = (
    Welcome
    | Rejected
    | Pair
    | Reserve
    | Bind
    | StartLocalPrefill
    | StartPrefill
    | Cancel
    | PeerGone
    | Drain
    | ReportPrefixes
)


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
    """Prefill -> decode, unary: the first token, and every push that was posted or waits for its turn."""

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
    """Rides on a push as its NIXL notification; valid only from the agent of the bound writer. `digest`: of the pushed
    blocks' bytes, where pushes are verified; else empty."""

    key: HandoffKey
    range: PushRange
    digest: bytes = b""
