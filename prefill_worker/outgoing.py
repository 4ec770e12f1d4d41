"""What the prefill worker's core keeps of a handoff, and how it reaches the world. Engine thread only; `handoff_out`
uses both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.commands import Command
from loopline.identity import HandoffKey, Peer, WorkerId
from loopline.messages import Commit, PushRange, WorkerMessage
from loopline.request import Request
from loopline.worker.faults import no_fault
from prefill_worker.fetch_in import Wanted


@dataclass(frozen=True)
class PrefillPorts:
    """How the core reaches the world; every call returns at once."""

    to_coordinator: Callable[[WorkerMessage], None]
    to_transfer: Callable[[Command], None]
    deliver_commit: Callable[[Peer, Commit], None]
    ask_prefix: Callable[[Peer, Wanted], None]
    ask_close: Callable[[HandoffKey, Peer], None]
    identity: Callable[[], WorkerId]
    entered: Callable[[str], None] = no_fault  # hears of every state that a handoff enters


@dataclass(slots=True)
class Outgoing:
    """One handoff that is being computed or drained. Block indices are the request's own."""

    key: HandoffKey
    request: Request
    target: Peer
    first_block: int
    target_blocks: tuple[int, ...]
    began_s: float
    next_block: int  # first block that no push carries yet
    pushes: list[PushRange] = field(default_factory=list)
    descriptors: int = 0
    cached_tokens: int = 0
    fetched_blocks: int = 0  # of these, what the decode worker has pushed here
    transport: str = ""
    is_committed: bool = False
