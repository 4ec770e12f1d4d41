"""The in-process transport: real copies between registered addresses of one process, with the rules of the network's
transport. For runs of a whole cluster in one process, and for tests. DRAM only. Called by the transfer thread.

A write waits in the hub until its *target* polls; that poll copies the bytes and yields the notice. So a target that
does not poll gets nothing, a sender that has closed may still write, and nothing can be recalled, as with a network.
"""

import ctypes
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import DONE, PENDING, Handle, HandleState, HandleStatus
from kvtransfer.manifest import Descriptors
from loopline.errors import TransferError

_METADATA_TAG = b"loopline-local:"


@dataclass(eq=False)
class _Write:
    """A posted write. `status`: what its sender sees. `in_transit`: the bytes, once the sender's memory may be gone."""

    sender: str
    local: NDArray[np.uint64]  # [N, 3]
    remote: NDArray[np.uint64]  # [N, 3]
    notice: bytes
    status: HandleStatus = PENDING
    in_transit: list[bytes] | None = None

    def leave_sender(self) -> None:
        """From now on the bytes come from a copy."""
        if self.in_transit is None:
            self.in_transit = [ctypes.string_at(address, size) for address, size, _ in self.local.tolist()]

    def land(self) -> None:
        sources = self.in_transit or [address for address, _, _ in self.local.tolist()]
        for source, (target, size, _) in zip(sources, self.remote.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        if not self.status.is_terminal:
            self.status = DONE


class _Endpoint:
    """An agent as the hub knows it."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []  # (first address, end address)
        self.inbox: deque[_Write] = deque()
        self.is_open = True

    def holds(self, rows: NDArray[np.uint64]) -> bool:
        return all(
            any(start <= address and address + num_bytes <= end for start, end in self.regions)
            for address, num_bytes in rows[:, :2].tolist()
        )


class LocalHub:
    """The network of one process: hand the same hub to every agent that should reach another.

    Invariants: a name is given to one agent ever; a write is copied at most once; safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[str, _Endpoint] = {}

    def join(self, name: str) -> None:
        """Add an agent. Raises TransferError when the name was ever used here."""
        with self._lock:
            if name in self._endpoints:
                raise TransferError(f"agent name {name} was used before")
            self._endpoints[name] = _Endpoint()

    def leave(self, name: str) -> None:
        """The agent is gone: what it posted may still land, what was posted to it fails."""
        with self._lock:
            endpoint = self._endpoints[name]
            endpoint.is_open = False
            endpoint.regions.clear()
            while endpoint.inbox:
                endpoint.inbox.popleft().status = HandleStatus(HandleState.FAILED, f"peer {name} is gone")
            for other in self._endpoints.values():
                for write in other.inbox:
                    if write.sender == name:
                        write.leave_sender()

    def knows(self, name: str) -> bool:
        """Was there ever an agent of this name?"""
        with self._lock:
            return name in self._endpoints

    def register(self, name: str, address: int, num_bytes: int) -> None:
        """Add [address, address + num_bytes) to what the agent may read and its peers may write."""
        with self._lock:
            self._endpoints[name].regions.append((address, address + num_bytes))

    def post(self, peer: str, write: _Write) -> None:
        """Queue a write. Raises TransferError when a row is outside of what its side registered."""
        with self._lock:
            target = self._endpoints[peer]
            if not target.is_open:
                write.status = HandleStatus(HandleState.FAILED, f"peer {peer} is gone")
                return
            if not self._endpoints[write.sender].holds(write.local) or not target.holds(write.remote):
                raise TransferError("a descriptor is outside of the registered memory")
            target.inbox.append(write)

    def abandon(self, sender: str, peer: str) -> None:
        """The sender dropped its connection: its unfinished handles fail. The bytes still land, without a notice."""
        with self._lock:
            for write in self._endpoints[peer].inbox:
                if write.sender == sender and not write.status.is_terminal:
                    write.status = HandleStatus(HandleState.FAILED, f"peer {peer} was removed")
                    write.notice = b""
                    write.leave_sender()

    def land(self, name: str) -> list[tuple[str, bytes]]:
        """Copy every write that waits for this agent, and return their (sender, notice)."""
        notices: list[tuple[str, bytes]] = []
        with self._lock:
            inbox = self._endpoints[name].inbox
            while inbox:
                write = inbox.popleft()
                write.land()
                if write.notice:
                    notices.append((write.sender, write.notice))
        return notices


class LocalAgent:
    """A `TransferAgent` on a `LocalHub`."""

    def __init__(self, name: str, hub: LocalHub) -> None:
        """Raises TransferError when the name was ever used on this hub."""
        hub.join(name)
        self._name = name
        self._hub = hub
        self._peers: dict[str, None] = {}
        self._writes: dict[Handle, _Write] = {}
        self._num_posted = 0
        self._is_open = True

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        return _METADATA_TAG + self._name.encode()

    def register(self, address: int, num_bytes: int, memory_kind: str, device_id: int) -> None:
        if memory_kind != "DRAM":
            raise TransferError(f"the local transport cannot register {memory_kind} of device {device_id}")
        self._hub.register(self._name, address, num_bytes)

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.removeprefix(_METADATA_TAG).decode(errors="replace")
        if not metadata.startswith(_METADATA_TAG) or not self._hub.knows(name):
            raise TransferError("metadata is not of an agent of this process")
        self._peers[name] = None
        return name

    def remove_peer(self, name: str) -> None:
        if name in self._peers:
            del self._peers[name]
            self._hub.abandon(self._name, name)

    def post_write(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        if not notice or not len(local) or not np.array_equal(local.rows[:, 1], remote.rows[:, 1]):
            raise TransferError("a write needs a notice and equal byte counts on both sides")
        write = _Write(self._name, local.rows, remote.rows, notice)
        self._hub.post(peer, write)
        handle = Handle(self._num_posted)
        self._num_posted += 1
        self._writes[handle] = write
        return handle

    def poll(self, handle: Handle) -> HandleStatus:
        return self._writes[handle].status

    def release(self, handle: Handle) -> None:
        del self._writes[handle]

    def take_notices(self) -> list[tuple[str, bytes]]:
        return self._hub.land(self._name)

    def transport_name(self, peer: str) -> str:
        return "local"

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._hub.leave(self._name)
