"""The network's transport: NIXL over UCX. The one place that imports nixl. Called by the transfer thread.

NIXL raises where other libraries return an error, has no timeout of its own, and makes progress only inside its calls.
The progress thread stays off (it spins a core per agent), so `poll` and `take_notices` must be called all the time.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvtransfer.agent import DONE, PENDING, Handle, HandleState, HandleStatus
from kvtransfer.manifest import Descriptors
from loopline.errors import TransferError
from loopline.settings import TransferSettings

logger = logging.getLogger(__name__)
_BACKEND = "UCX"


def choose_error_mode(asked: str, memory_kind: str) -> tuple[str, str]:
    """UCX's error handling for an agent whose arena is in `memory_kind`, and why: (peer or none, words).

    `peer` sees a lost peer at once, but leaves out UCX's shared-memory and CUDA-IPC lanes, so device memory between
    workers of one host would go over tcp. NIXL takes one mode for an agent, when its backend is made and no peer is
    known yet, so what decides is the memory and not the link.
    """
    if asked != "auto":
        return asked, "as configured"
    if memory_kind == "VRAM":
        return "none", "device memory, which peer mode would move over tcp to a worker of the same host"
    return "peer", "host memory"


class NixlAgent:
    """A `TransferAgent` on NIXL.

    Invariants: a peer is added once; a handle is released once; errors of NIXL leave as TransferError or as FAILED.
    """

    def __init__(self, name: str, settings: TransferSettings, memory_kind: str = "DRAM") -> None:
        """`memory_kind`: of what will be registered. Raises TransferError when NIXL or its UCX backend cannot be
        started."""
        mode, why = choose_error_mode(settings.error_mode, memory_kind)
        _set_environment(settings)  # UCX reads it when the backend is made
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(_BACKEND, {"ucx_error_handling_mode": mode})
        except Exception as error:
            raise TransferError(f"NIXL cannot start agent {name}: {_text(error)}") from error
        logger.info("transfer error mode %s -> %s: %s", settings.error_mode, mode, why)
        self._name = name
        self._registrations: list[Any] = []
        self._peers: dict[str, bytes] = {}
        self._handles: dict[Handle, Any] = {}
        self._handle_peers: dict[Handle, str] = {}
        self._failures: dict[Handle, HandleStatus] = {}
        self._num_posted = 0

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int, memory_kind: str, device_id: int) -> None:
        rows = np.array([[address, num_bytes, device_id]], dtype=np.uint64)
        try:
            self._registrations.append(self._agent.register_memory(rows, memory_kind, backends=[_BACKEND]))
        except Exception as error:
            raise TransferError(f"NIXL cannot register {num_bytes} bytes of {memory_kind}: {_text(error)}") from error

    def add_peer(self, metadata: bytes) -> str:
        for known, same in self._peers.items():
            if same == metadata:
                return known
        try:
            name: str = self._agent.add_remote_agent(metadata).decode()
        except Exception as error:
            raise TransferError(f"NIXL cannot add the peer: {_text(error)}") from error
        if name in self._peers:
            raise TransferError(f"agent name {name} belongs to another peer")
        self._peers[name] = metadata
        return name

    def remove_peer(self, name: str) -> None:
        if self._peers.pop(name, None) is None:
            return
        for handle, peer in self._handle_peers.items():
            if peer == name and not self.poll(handle).is_terminal:
                self._failures[handle] = HandleStatus(HandleState.FAILED, f"peer {name} was removed")
        try:
            self._agent.remove_remote_agent(name)
        except Exception:  # the peer may have broken the connection first; it is dropped either way
            return

    def post_write(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        if peer not in self._peers:
            raise TransferError(f"peer {peer} is not known")
        if not notice or not len(local) or not np.array_equal(local.rows[:, 1], remote.rows[:, 1]):
            raise TransferError("a write needs a notice and equal byte counts on both sides")
        try:
            request = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local.rows, local.memory_kind),
                self._agent.get_xfer_descs(remote.rows, remote.memory_kind),
                peer,
                notice,
            )
        except Exception as error:
            raise TransferError(f"NIXL cannot prepare a write to {peer}: {_text(error)}") from error
        handle = Handle(self._num_posted)
        self._num_posted += 1
        self._handles[handle] = request
        self._handle_peers[handle] = peer
        try:
            self._agent.transfer(request)
        except Exception as error:
            self._failures[handle] = HandleStatus(HandleState.FAILED, _text(error))
        return handle

    def poll(self, handle: Handle) -> HandleStatus:
        failed = self._failures.get(handle)
        if failed is not None:
            return failed
        try:
            state: str = self._agent.check_xfer_state(self._handles[handle])
        except Exception as error:
            state, failed = "ERR", HandleStatus(HandleState.FAILED, _text(error))
        if state == "PROC":
            return PENDING
        if state == "DONE":
            return DONE
        self._failures[handle] = failed or HandleStatus(HandleState.FAILED, "NIXL reports an error without a text")
        return self._failures[handle]

    def release(self, handle: Handle) -> None:
        request = self._handles.pop(handle)
        del self._handle_peers[handle]
        self._failures.pop(handle, None)
        try:
            self._agent.release_xfer_handle(request)
        except Exception:  # unfinished: NIXL keeps such a handle and releases it with the agent
            return

    def take_notices(self) -> list[tuple[str, bytes]]:
        arrived: Mapping[str, list[bytes]] = self._agent.get_new_notifs()
        return [(peer, notice) for peer, notices in arrived.items() for notice in notices]

    def transport_name(self, peer: str) -> str:
        return f"{_BACKEND.lower()}:{os.environ.get('UCX_TLS', 'auto')}"

    def close(self) -> None:
        if self._agent is None:
            return
        for handle in list(self._handles):
            self.release(handle)
        for name in list(self._peers):
            self.remove_peer(name)
        for registration in self._registrations:
            try:
                self._agent.deregister_memory(registration)
            except Exception:  # freed with the agent
                continue
        self._registrations.clear()
        self._agent = None  # the bindings free the agent here, not at interpreter exit


def _set_environment(settings: TransferSettings) -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # its INFO lines go to stdout
    for name, value in settings.ucx:
        os.environ[name if name.startswith("UCX_") else f"UCX_{name}"] = value


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
