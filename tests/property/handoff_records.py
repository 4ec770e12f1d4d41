"""What `handoff_cluster` is made of: messages on the way, writers, and what they have posted."""

from dataclasses import dataclass, field

from kvtransfer.handoff import AskClose, Granted
from kvtransfer.send_table import SendTable
from loopline.identity import HandoffKey, Peer, WorkerId
from loopline.messages import CloseState, Commit, PushNotice, PushRange


@dataclass(eq=False)
class Write:
    """A posted push: the blocks that may still land, whoever has forgotten about it."""

    writer: "Writer"
    key: HandoffKey
    part: PushRange
    left: list[tuple[int, int]]  # (arena block, block of the request)
    terminal: bool = False


@dataclass
class Task:
    """What a writer was told to push."""

    first_block: int
    block_ids: tuple[int, ...]
    posted: list[PushRange] = field(default_factory=list)


@dataclass(eq=False)
class Writer:
    """A prefill worker's process: its table, its handles, what it works on."""

    peer: Peer
    table: SendTable = field(default_factory=SendTable)
    tasks: dict[HandoffKey, Task] = field(default_factory=dict)
    failed: set[HandoffKey] = field(default_factory=set)
    alive: bool = True


@dataclass(frozen=True)
class Bind:
    key: HandoffKey
    writer: Peer


@dataclass(frozen=True)
class Start:
    granted: Granted


@dataclass(frozen=True)
class Cancel:
    key: HandoffKey


@dataclass(frozen=True)
class Notice:
    agent_name: str
    notice: PushNotice


@dataclass(frozen=True)
class Ask:
    ask: AskClose


@dataclass(frozen=True)
class Answer:
    key: HandoffKey
    writer: WorkerId
    state: CloseState


Message = Bind | Start | Cancel | Notice | Ask | Answer | Commit
