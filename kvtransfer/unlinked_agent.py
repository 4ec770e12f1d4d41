"""The agent of a worker that has no links: nobody writes to it, and it writes to nobody. Whatever memory its arena is
in stays its own, registered with nothing. Used by the transfer thread of a unified worker."""

from kvtransfer.agent import Handle, HandleStatus
from kvtransfer.manifest import Descriptors
from loopline.errors import InvariantBroken, TransferError


class UnlinkedAgent:
    """A `TransferAgent` without peers."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        return b""

    def register(self, address: int, num_bytes: int, memory_kind: str, device_id: int) -> None:
        """Nothing needs to reach it."""

    def add_peer(self, metadata: bytes) -> str:
        raise TransferError(f"agent {self._name} has no links")

    def remove_peer(self, name: str) -> None:
        """There are none."""

    def post_write(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        raise TransferError(f"agent {self._name} has no links, so none to {peer}")

    def poll(self, handle: Handle) -> HandleStatus:
        raise InvariantBroken(f"handle {handle} was never posted")

    def release(self, handle: Handle) -> None:
        raise InvariantBroken(f"handle {handle} was never posted")

    def take_notices(self) -> list[tuple[str, bytes]]:
        return []

    def transport_name(self, peer: str) -> str:
        return "none"

    def close(self) -> None:
        """Nothing was opened."""
