"""What a prefill and a decode worker say to each other about a fetch, the handoff in reverse: the decode worker writes
cached blocks of a prompt into the prefill worker's arena; and the words for where one stands. Frozen records, no I/O;
`loopline.messages` has all others.
"""

from dataclasses import dataclass
from enum import StrEnum

from loopline.identity import BlockRun, Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import PushRange


class FetchState(StrEnum):
    """What heartbeats and metrics say of a fetch, so that it is not taken for a handoff."""

    FETCHING = "fetching"  # the prefill worker holds blocks for it and has asked
    FETCHED = "fetched"  # all of it is there, and the request is computed
    LENDING = "lending"  # the decode worker has pinned cached blocks, and pushes them


@dataclass(frozen=True)
class FetchPrefix:
    """Prefill -> decode, unary: push blocks `first_block`, ... of the request's prompt, which the decode worker has
    cached and holds for the handoff of this key, into `runs` of the reader's arena. Answered when all of them have
    been pushed, or will not be; `limit_s`: how long the reader waits for that."""

    key: HandoffKey
    reader: Peer
    agent_metadata: bytes
    region: RegionManifest
    first_block: int
    runs: tuple[BlockRun, ...]
    limit_s: float


@dataclass(frozen=True)
class PrefixSent:
    """Answer to FetchPrefix. `cause` None: these pushes carry all that was asked for, and every handle is DONE."""

    key: HandoffKey
    writer: WorkerId
    pushes: tuple[PushRange, ...] = ()
    cause: Cause | None = None
    detail: str = ""
