"""A transport that goes wrong on purpose: a wrapper around any `TransferAgent`, made only where a worker's settings
name faults of the transport. The transfer thread knows nothing of it.

Pushes and notices are counted from 1, and warm-ups are not counted. What a fault breaks is the promise that its kind
names; all others of the seam still hold: a dropped or delayed push to a peer that is removed FAILS, and a status that
was terminal stays.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtransfer.agent import PENDING, Handle, HandleState, HandleStatus, TransferAgent
from kvtransfer.links import WARM_UP_NOTICE
from kvtransfer.manifest import Descriptors
from loopline.clock import Clock
from loopline.errors import TransferError
from loopline.faults import NOTICE_KINDS, PUSH_KINDS
from loopline.settings import FaultSettings

logger = logging.getLogger(__name__)
Notice = tuple[str, bytes]


def nothing() -> None:
    """What happens after a push where nobody waits for one."""


@dataclass(slots=True, eq=False)
class _Write:
    """A write as the sender sees it. `inner`: its handle below; None before it is posted, or for ever."""

    peer: str
    inner: Handle | None = None
    fails: bool = False
    status: HandleStatus = PENDING


@dataclass(frozen=True, eq=False)
class _Delayed:
    """A push that is posted at `due_s`."""

    write: _Write
    due_s: float
    post: Callable[[], Handle]


class FaultyAgent:
    """A `TransferAgent` that commits faults. Invariant: every notice and write that no fault meets goes through
    unchanged and in order."""

    def __init__(
        self,
        inner: TransferAgent,
        faults: Sequence[FaultSettings],
        clock: Clock,
        on_posted: Callable[[], None] = nothing,
    ) -> None:
        """`on_posted` is called right after each push was posted, with its handle not looked at yet."""
        self._inner = inner
        self._push_faults = tuple(fault for fault in faults if fault.do in PUSH_KINDS)
        self._notice_faults = tuple(fault for fault in faults if fault.do in NOTICE_KINDS)
        self._silences = tuple(fault for fault in faults if fault.do == "stop_polling")
        self._clock = clock
        self._on_posted = on_posted
        self._writes: dict[Handle, _Write] = {}
        self._delayed: list[_Delayed] = []
        self._arrived: deque[Notice] = deque()  # taken below, and not looked at
        self._kept: list[Notice] = []  # looked at, and taken when polling goes on
        self._held: list[Notice] = []  # waits for the next notice
        self._copies: list[NDArray[np.uint8]] = []  # registered below, so kept until it closes
        self._num_handles = 0
        self._num_pushes = 0
        self._num_notices = 0
        self._silent_until_s = clock.now_s()

    @property
    def name(self) -> str:
        return self._inner.name

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def register(self, address: int, num_bytes: int, memory_kind: str, device_id: int) -> None:
        self._inner.register(address, num_bytes, memory_kind, device_id)

    def add_peer(self, metadata: bytes) -> str:
        return self._inner.add_peer(metadata)

    def remove_peer(self, name: str) -> None:
        self._delayed = [delayed for delayed in self._delayed if delayed.write.peer != name]
        for write in self._writes.values():
            if write.peer == name and write.inner is None and not write.status.is_terminal:
                write.status = HandleStatus(HandleState.FAILED, f"peer {name} was removed")
        self._inner.remove_peer(name)

    def post_write(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        if notice == WARM_UP_NOTICE:
            return self._keep(_Write(peer, self._inner.post_write(peer, local, remote, notice)))
        self._num_pushes += 1
        number = self._num_pushes
        due = {fault.do: fault for fault in self._push_faults if fault.is_due(number)}
        _log(due, "push", number)
        if "fail_push" in due:
            raise TransferError(f"fault: push {number} is not posted")
        if "corrupt_push" in due:
            local = self._corrupted(local)
        write = _Write(peer, fails="fail_handle" in due)
        if "delay_push" in due:
            due_s = self._clock.now_s() + due["delay_push"].seconds
            self._delayed.append(_Delayed(write, due_s, lambda: self._post(peer, local, remote, notice)))
        elif "drop_push" not in due:
            write.inner = self._post(peer, local, remote, notice)
        self._maybe_fall_silent(number)
        return self._keep(write)

    def poll(self, handle: Handle) -> HandleStatus:
        write = self._writes[handle]
        if write.status.is_terminal or self._is_silent():
            return write.status
        self._post_delayed()
        if write.inner is not None and not write.status.is_terminal:
            write.status = self._inner.poll(write.inner)
            if write.fails and write.status.is_terminal:
                write.status = HandleStatus(HandleState.FAILED, "fault: the bytes were posted, the handle fails")
        return write.status

    def release(self, handle: Handle) -> None:
        write = self._writes.pop(handle)
        if write.inner is not None:
            self._inner.release(write.inner)

    def take_notices(self) -> list[Notice]:
        """Raises TransferError while the transport stands still: an empty answer would count as a poll, and polls are
        what shows that a dead peer's last bytes have landed."""
        if self._is_silent():
            raise TransferError("fault: the transport stands still, nothing was polled")
        self._post_delayed()
        self._arrived.extend(self._inner.take_notices())
        out, self._kept = self._kept, []
        while self._arrived and not self._is_silent():
            notice = self._arrived.popleft()
            if notice[1] == WARM_UP_NOTICE:
                out.append(notice)
                continue
            self._num_notices += 1
            let_in = self._let_in(notice, self._num_notices)
            if self._maybe_fall_silent(self._num_notices):
                self._kept = let_in
            else:
                out += let_in
        return out

    def transport_name(self, peer: str) -> str:
        return self._inner.transport_name(peer)

    def close(self) -> None:
        self._inner.close()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _keep(self, write: _Write) -> Handle:
        handle = Handle(self._num_handles)
        self._num_handles += 1
        self._writes[handle] = write
        return handle

    def _post(self, peer: str, local: Descriptors, remote: Descriptors, notice: bytes) -> Handle:
        handle = self._inner.post_write(peer, local, remote, notice)
        self._on_posted()
        return handle

    def _corrupted(self, local: Descriptors) -> Descriptors:
        """The same bytes but for one, in memory of their own: what others read stays as it is."""
        if local.memory_kind != "DRAM":
            raise TransferError(f"fault: corrupt_push is for DRAM, and the push is of {local.memory_kind}")
        pieces = [ctypes.string_at(address, size) for address, size, _ in local.rows.tolist()]
        copy = np.frombuffer(bytearray(b"".join(pieces)), dtype=np.uint8)
        copy[len(copy) // 2] ^= 0xFF
        self._inner.register(copy.ctypes.data, len(copy), local.memory_kind, 0)
        self._copies.append(copy)
        rows = local.rows.copy()
        rows[:, 0] = np.uint64(copy.ctypes.data) + np.cumsum(rows[:, 1], dtype=np.uint64) - rows[:, 1]
        return Descriptors(local.memory_kind, rows)

    def _post_delayed(self) -> None:
        """Post every delayed push that is due. One that cannot be posted any more has FAILED."""
        now_s = self._clock.now_s()
        due = [delayed for delayed in self._delayed if delayed.due_s <= now_s]
        self._delayed = [delayed for delayed in self._delayed if delayed.due_s > now_s]
        for delayed in due:
            write = delayed.write
            try:
                write.inner = delayed.post()
            except TransferError as error:
                write.status = HandleStatus(HandleState.FAILED, str(error))

    def _let_in(self, notice: Notice, number: int) -> list[Notice]:
        """What the receiver gets of notice `number`, and of those that were held back until it."""
        due = {fault.do for fault in self._notice_faults if fault.is_due(number)}
        _log(due, "notice", number)
        if "reorder_notices" in due:
            self._held.append(notice)
            return []
        out = [] if "drop_notice" in due else [notice]
        if "repeat_notice" in due:
            out *= 2
        out += self._held
        self._held = []
        return out

    def _is_silent(self) -> bool:
        return self._clock.now_s() < self._silent_until_s

    def _maybe_fall_silent(self, number: int) -> bool:
        """Stop polling if a fault begins with push or notice `number`."""
        due = [fault.seconds for fault in self._silences if fault.is_due(number)]
        if due:
            _log(("stop_polling",), "push or notice", number)
            self._silent_until_s = max(self._silent_until_s, self._clock.now_s() + max(due))
        return bool(due)


def _log(kinds: Iterable[str], what: str, number: int) -> None:
    for kind in kinds:
        logger.warning("fault: %s of %s %d", kind, what, number)
