"""The one seam to a transport. `nixl_agent` is the network's implementation, `local_agent` the in-process one; one
conformance suite runs against both. `unlinked_agent` is for a worker that has no peers. Called by the transfer thread
and by nothing else.

What every implementation promises
- A write's bytes are complete at the target when its notice is taken there, and a notice is taken at most once.
- Nothing lands and no notice arrives unless *both* sides poll: `take_notices` is the progress engine.
- A posted write cannot be recalled: releasing its handle or removing the peer stops nothing on its own.
- `post_write` raises only when nothing was posted. After that an error is a FAILED handle, never an exception.
- One thread makes, uses and closes an agent.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from kvtransfer.manifest import Descriptors

Handle = NewType("Handle", int)
"""A posted write. Opaque; valid until released."""


class HandleState(StrEnum):
    """Where a posted write stands."""

    PENDING = "pending"
    DONE = "done"  # terminal: the bytes are at the target, the source may be reused
    FAILED = "failed"  # terminal: an unknown part of the bytes may be at the target, now or later


@dataclass(frozen=True)
class HandleStatus:
    """`reason` says why a handle FAILED; empty otherwise."""

    state: HandleState
    reason: str = ""

    @property
    def is_terminal(self) -> bool:
        return self.state is not HandleState.PENDING


PENDING = HandleStatus(HandleState.PENDING)
DONE = HandleStatus(HandleState.DONE)


class TransferAgent(Protocol):
    """One end of a transport. Its name is never used twice."""

    @property
    def name(self) -> str: ...

    def metadata(self) -> bytes:
        """What a peer needs to write here. Taken after `register`, so that it describes the regions."""
        ...

    def register(self, address: int, num_bytes: int, memory_kind: str, device_id: int) -> None:
        """Make memory readable for own writes and writable for peers, until `close`. The memory must outlive that.

        Raises TransferError when the transport cannot register it.
        """
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer known and return its name. Raises TransferError for metadata that is garbage or of a name that
        another agent already has."""
        ...

    def remove_peer(self, name: str) -> None:
        """Drop the connection; an unknown name is fine. Handles to it become FAILED, if they were not terminal."""
        ...

    def post_write(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        """Start to copy row i of `local` to row i of `remote`, then deliver `notice` (not empty).

        Raises TransferError, with nothing posted, for an unknown peer or a row outside of what the side registered.
        """
        ...

    def poll(self, handle: Handle) -> HandleStatus:
        """Where the write stands. Never raises for a handle that was not released."""
        ...

    def release(self, handle: Handle) -> None:
        """Forget a terminal handle. On an unfinished one this is no cancel: both buffers stay in use."""
        ...

    def take_notices(self) -> list[tuple[str, bytes]]:
        """Make progress, and return the (peer's name, notice) pairs that arrived since the last call."""
        ...

    def transport_name(self, peer: str) -> str:
        """For people, best effort: what carries the bytes to this peer."""
        ...

    def close(self) -> None:
        """Give everything back. Nothing may be called after it except `close`."""
        ...
