"""What both halves of the handoff protocol share: states, moves, effects and tombstones. No I/O, no clock, no threads.

The receiving half is `receive_table` (the engine thread of the worker whose blocks are written owns it), the sending
half `send_table` (the transfer thread of the one that writes owns it); each draws its automaton. In a fetch a decode
worker writes into a prefill worker's blocks, with the same tables. A table answers every call with *effects*: frozen
records that say what its owner has to do now. A message of another process that comes late, twice or wrong never
raises: it is answered with `Ignored` or `Refused` and counted by cause. A move that only our own code could have got
wrong raises `IllegalTransition` and changes nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar

from loopline.errors import IllegalTransition
from loopline.fetch_messages import PrefixSent
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import CloseState, Commit

MAX_TOMBSTONES = 65_536


class ReceiveState(StrEnum):
    """Where a handoff stands on the side that reserved the blocks."""

    RESERVED = "reserved"  # blocks are promised, nobody may write them yet
    BOUND = "bound"  # one writer may write them
    COMMITTED = "committed"  # the commit is here, some of its pushes are not
    QUARANTINED = "quarantined"  # given up; the writer may still write what has not arrived
    ACTIVE = "active"  # left the table: the scheduler has the request
    LOCAL = "local"  # left the table: this worker prefills the request itself
    CLOSED = "closed"  # left the table: no block is held for it any more


class ReceiveMove(StrEnum):
    """What can happen to a handoff on the receiving side."""

    BIND = "bind"
    COMMIT = "commit"
    ACTIVATE = "activate"
    START_LOCAL = "start_local"
    QUARANTINE = "quarantine"
    FREE = "free"


class SendState(StrEnum):
    """Where a handoff stands on the side that writes."""

    OPEN = "open"  # pushes may be posted
    COMMITTED = "committed"  # no more will be posted; some handles are in flight
    CLOSING = "closing"  # nothing more may be posted; some handles are in flight
    DRAINED = "drained"  # left the table: committed, every handle DONE
    CLOSED = "closed"  # left the table: closed early, every handle DONE
    FAILED = "failed"  # left the table: closed early, a handle ended in an error


class SendMove(StrEnum):
    """What can happen to a handoff on the sending side."""

    COMMIT = "commit"
    DRAIN = "drain"
    CLOSE = "close"
    END_CLEAN = "end_clean"
    END_FAILED = "end_failed"


RECEIVE_MOVES: Mapping[ReceiveState, Mapping[ReceiveMove, ReceiveState]] = {
    ReceiveState.RESERVED: {
        ReceiveMove.BIND: ReceiveState.BOUND,
        ReceiveMove.START_LOCAL: ReceiveState.LOCAL,
        ReceiveMove.FREE: ReceiveState.CLOSED,
    },
    ReceiveState.BOUND: {
        ReceiveMove.COMMIT: ReceiveState.COMMITTED,
        ReceiveMove.ACTIVATE: ReceiveState.ACTIVE,
        ReceiveMove.QUARANTINE: ReceiveState.QUARANTINED,
        ReceiveMove.FREE: ReceiveState.CLOSED,
    },
    ReceiveState.COMMITTED: {
        ReceiveMove.ACTIVATE: ReceiveState.ACTIVE,
        ReceiveMove.QUARANTINE: ReceiveState.QUARANTINED,
    },
    ReceiveState.QUARANTINED: {ReceiveMove.FREE: ReceiveState.CLOSED},
    ReceiveState.ACTIVE: {},
    ReceiveState.LOCAL: {},
    ReceiveState.CLOSED: {},
}

SEND_MOVES: Mapping[SendState, Mapping[SendMove, SendState]] = {
    SendState.OPEN: {SendMove.COMMIT: SendState.COMMITTED, SendMove.CLOSE: SendState.CLOSING},
    SendState.COMMITTED: {SendMove.DRAIN: SendState.DRAINED, SendMove.CLOSE: SendState.CLOSING},
    SendState.CLOSING: {SendMove.END_CLEAN: SendState.CLOSED, SendMove.END_FAILED: SendState.FAILED},
    SendState.DRAINED: {},
    SendState.CLOSED: {},
    SendState.FAILED: {},
}

StateT = TypeVar("StateT", bound=StrEnum)
MoveT = TypeVar("MoveT", bound=StrEnum)


def advance(moves: Mapping[StateT, Mapping[MoveT, StateT]], state: StateT, move: MoveT) -> StateT:
    """The state that `move` leads to. Raises IllegalTransition when the automaton has no such move."""
    after = moves[state].get(move)
    if after is None:
        raise IllegalTransition(f"no move {move.value} from {state.value}")
    return after


# ---- effects: what the owner of a table has to do ------------------------------------------------------------------


@dataclass(frozen=True)
class Ignored:
    """A message was not acted on; it has been counted."""

    cause: Cause


@dataclass(frozen=True)
class Refused:
    """A request of another process was turned down; it has been counted, and the asker is to be told."""

    key: HandoffKey
    cause: Cause


@dataclass(frozen=True)
class Granted:
    """`writer` and nobody else may write these blocks: tell the coordinator."""

    key: HandoffKey
    writer: Peer
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StartLocal:
    """The blocks are this worker's own to write now; the table has let go of them."""

    key: HandoffKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class CommitTaken:
    """The commit is kept; pushes are still missing."""

    key: HandoffKey


@dataclass(frozen=True)
class Activate:
    """Every block is here: hand the request to the scheduler. The table has let go of the blocks."""

    key: HandoffKey
    commit: Commit | PrefixSent
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class GaveUp:
    """The handoff will never be activated."""

    key: HandoffKey
    cause: Cause


@dataclass(frozen=True)
class FreeBlocks:
    """Held blocks that nobody writes any more: return them to the pool."""

    key: HandoffKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Quarantine:
    """Held blocks that `writer` may still write: nobody may have them until `FreeQuarantined`."""

    key: HandoffKey
    block_ids: tuple[int, ...]
    writer: Peer


@dataclass(frozen=True)
class FreeQuarantined:
    """Quarantined blocks that nobody writes any more: return them to the pool."""

    key: HandoffKey
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class AskClose:
    """Send CloseHandoff to `writer` and give its answer to `writer_closed`; ask again until it is CLOSED or FAILED."""

    key: HandoffKey
    writer: Peer


@dataclass(frozen=True)
class PollToQuiescence:
    """The worker's process is gone: remove the connection, poll until nothing comes any more, then call `quiesced`."""

    worker: WorkerId


ReceiveEffect = (
    Ignored
    | Refused
    | Granted
    | StartLocal
    | CommitTaken
    | Activate
    | GaveUp
    | FreeBlocks
    | Quarantine
    | FreeQuarantined
    | AskClose
    | PollToQuiescence
)


@dataclass(frozen=True)
class Opened:
    """The handoff may be pushed."""

    key: HandoffKey


@dataclass(frozen=True)
class Drained:
    """Committed and every handle DONE: the source blocks are free to become prefix cache."""

    key: HandoffKey


@dataclass(frozen=True)
class Closed:
    """Nothing more will be posted and every handle is terminal: the source blocks are free."""

    key: HandoffKey
    state: Literal[CloseState.CLOSED, CloseState.FAILED]


SendEffect = Ignored | Refused | Opened | Drained | Closed


class Tombstones:
    """The highest generation of each request that has ended here, and how.

    Invariant: a request's generation never goes down. Past `limit` requests the oldest one is forgotten.
    """

    def __init__(self, limit: int = MAX_TOMBSTONES) -> None:
        self._limit = limit
        self._ended: OrderedDict[str, tuple[int, Cause]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def bury(self, key: HandoffKey, cause: Cause) -> None:
        """Note that this and every older generation has ended. `cause` answers later messages about this one."""
        known = self._ended.get(key.request_id)
        if known is not None and known[0] > key.generation:
            return
        self._ended[key.request_id] = (key.generation, cause)
        self._ended.move_to_end(key.request_id)
        if len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def cause_for(self, key: HandoffKey) -> Cause | None:
        """Why a message about `key` comes too late; None if this generation has not ended."""
        generation, cause = self._ended.get(key.request_id, (-1, Cause.UNKNOWN))
        if key.generation > generation:
            return None
        return cause if key.generation == generation else Cause.STALE


class IgnoredCounts:
    """How many messages were ignored or refused, by cause."""

    def __init__(self) -> None:
        self._counts: Counter[Cause] = Counter()

    def ignore(self, cause: Cause) -> Ignored:
        """Count and answer `Ignored`."""
        self._counts[cause] += 1
        return Ignored(cause)

    def refuse(self, key: HandoffKey, cause: Cause) -> Refused:
        """Count and answer `Refused`."""
        self._counts[cause] += 1
        return Refused(key, cause)

    def as_pairs(self) -> tuple[tuple[str, int], ...]:
        """(cause, count), in the order of the causes' names. Any thread: the copy of a dict is one step."""
        return tuple(sorted((cause.value, count) for cause, count in dict(self._counts).items()))
