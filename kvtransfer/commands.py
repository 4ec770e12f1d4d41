"""What crosses the border of the transfer thread: commands go in, events come out. All frozen, no behaviour. The engine
and gRPC sides of a worker build commands and take events; `transfer_thread` says from which thread.
"""

from dataclasses import dataclass

from loopline.identity import Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import CloseState, PushNotice, PushRange

# ---- commands: prefill side ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConnectPeer:
    """Add a decode worker and warm the link up. Answer: PeerConnected or PeerConnectFailed. Again is fine, and checks
    that the link still leads there; after a failure it connects anew."""

    peer: Peer
    metadata: bytes
    region: RegionManifest


@dataclass(frozen=True)
class OpenHandoff:
    """Start a handoff to a connected worker. `target_blocks[i]` takes block `first_block + i` of the request. Answer:
    none, or HandoffRefused."""

    key: HandoffKey
    target: WorkerId
    first_block: int
    target_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Push:
    """Post one push of an open handoff, as soon as the budget of bytes in flight has room for it. `source_blocks[i]`
    holds block `range.first_block + i` of the request, written and visible to the transport before this command.
    Answer: none, or PushFailed."""

    key: HandoffKey
    range: PushRange
    source_blocks: tuple[int, ...]


@dataclass(frozen=True)
class CommitHandoff:
    """No more pushes follow. Answer: HandoffDrained, or CloseReport if the handoff was closed or failed first."""

    key: HandoffKey


@dataclass(frozen=True)
class Close:
    """Post nothing more for this or an older generation. Answer: a CloseReport with `waiter` among its waiters once
    every handle is terminal; of many waiters only the last few. Again is fine; an unknown handoff is CLOSED and can
    never be opened later."""

    key: HandoffKey
    waiter: object = None


@dataclass(frozen=True)
class RemovePeer:
    """The worker is *proven* gone: drop its connection; what is in flight to it fails. Answer: PeerRemoved, after the
    CloseReport of every handoff to it."""

    worker: WorkerId


# ---- commands: decode side and both --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quiesce:
    """The worker is *proven* gone: poll until its last bytes have landed. Answer: Quiesced."""

    worker: WorkerId


@dataclass(frozen=True)
class Stop:
    """Let the last notices leave, close the agent and end the thread."""


Command = ConnectPeer | OpenHandoff | Push | CommitHandoff | Close | RemovePeer | Quiesce | Stop


# ---- events: prefill side ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerConnected:
    """The link works; `bytes_per_s` was measured by the warm-up and includes the target's polling."""

    peer: Peer
    transport: str
    bytes_per_s: float


@dataclass(frozen=True)
class PeerConnectFailed:
    """The link could not be made, or broke later. Nothing can be opened over it before the next ConnectPeer."""

    peer: Peer
    reason: str


@dataclass(frozen=True)
class HandoffRefused:
    """OpenHandoff was not acted on; nothing will be posted and no other event follows."""

    key: HandoffKey
    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class PushFailed:
    """This push will not be counted on any more, and no later one is posted. TRANSFER_FAILED: its handle ended in an
    error or nothing was posted. TRANSFER_TIMEOUT: its handle is still in flight past the deadline. TOMBSTONED: the
    handoff was closed first, or while the push waited for the budget. INTERNAL: a bug. The source blocks are off limits
    until the CloseReport."""

    key: HandoffKey
    range: PushRange
    cause: Cause
    detail: str


@dataclass(frozen=True)
class CrowdChanged:
    """To whom a further push would have to wait now: to each agent in `crowded`, or to everybody if `is_full`. Comes
    with every change; before the first one nothing would wait."""

    crowded: frozenset[str]
    is_full: bool


@dataclass(frozen=True)
class TransferCost:
    """What a handoff's pushes cost. A push has one descriptor per run of blocks contiguous on both sides."""

    pushes: int
    descriptors: int
    num_bytes: int
    transport: str


@dataclass(frozen=True)
class HandoffDrained:
    """Committed and every handle DONE: the source blocks are free."""

    key: HandoffKey
    cost: TransferCost


@dataclass(frozen=True)
class CloseReport:
    """Closed, nothing in flight: the source blocks are free. Comes for every handoff that ends without HandoffDrained,
    asked for or not, and again for each later Close. `waiters` are those of the Close commands that this answers."""

    key: HandoffKey
    state: CloseState  # CLOSED or FAILED
    waiters: tuple[object, ...] = ()


@dataclass(frozen=True)
class PeerRemoved:
    """Nothing is in flight to that worker any more."""

    worker: WorkerId


# ---- events: decode side and both ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PushArrived:
    """A push has landed. The sender's name is the transport's word; the rest is the sender's."""

    agent_name: str
    notice: PushNotice


@dataclass(frozen=True)
class Quiesced:
    """Nothing of that worker has come in for a while, and its connection is gone."""

    worker: WorkerId


@dataclass(frozen=True)
class TransferThreadFailed:
    """A bug or a broken transport: what was being done is given up, the thread goes on."""

    error: str


Event = (
    PeerConnected
    | PeerConnectFailed
    | HandoffRefused
    | PushFailed
    | CrowdChanged
    | HandoffDrained
    | CloseReport
    | PeerRemoved
    | PushArrived
    | Quiesced
    | TransferThreadFailed
)
