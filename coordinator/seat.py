"""Telling one process from every other, and whether it has ended, by what the kernel of its machine says.

That its parent reaped it is the usual proof. Where the parent is gone, any process of the same machine that sees the
same process ids can give another: a process id and the moment of its start are never given twice within one boot.
"""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_STATE, _START_TICKS = 0, 19  # fields of /proc/PID/stat after the name in brackets; proc(5) counts them from 3
_ENDED_STATES = ("Z", "X")


@dataclass(frozen=True)
class Seat:
    """One process, for good. `machine`: where its process id means something: a boot, and a namespace of ids."""

    machine: str
    pid: int
    start_ticks: int


def this_machine() -> str:
    """Equal for two processes that see each other's process ids, and for no others."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROC / 'self/ns/pid')}"


def this_network() -> str:
    """Equal for two processes that have the same loopback interface."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROC / 'self/ns/net')}"


def seat_of(pid: int) -> Seat | None:
    """Of a process that is here now; None if it is not any more."""
    fields = _stat(_PROC / str(pid) / "stat")
    return None if fields is None else Seat(this_machine(), pid, int(fields[_START_TICKS]))


def has_ended(seat: Seat) -> bool:
    """Whether no thread of it runs any more. To be asked on its own machine."""
    assert seat.machine == this_machine()
    fields = _stat(_PROC / str(seat.pid) / "stat")
    if fields is None or int(fields[_START_TICKS]) != seat.start_ticks:
        return True
    with contextlib.suppress(FileNotFoundError):
        threads = [_stat(path / "stat") for path in (_PROC / str(seat.pid) / "task").iterdir()]
        return all(thread is None or thread[_STATE] in _ENDED_STATES for thread in threads)
    return True


def end_and_look(seat: Seat) -> bool:
    """Kill it if it still runs, since nobody watches it any more; whether it has ended. On its own machine."""
    if has_ended(seat):
        return True
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(seat.pid)  # from here on the id cannot be another's
        try:
            if not has_ended(seat):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)
    return has_ended(seat)


def end_all_with(arguments: Sequence[str]) -> bool:
    """Kill every process of this machine among whose arguments these are, one after the other, as they are among those
    of one process at most; whether there is none any more."""
    wanted = "\0".join(("", *arguments, "")).encode()
    found = [seat for pid in _pids() if wanted in _arguments(pid) and (seat := seat_of(pid)) is not None]
    ended = [end_and_look(seat) for seat in found]  # all are killed, before any is waited for
    return all(ended)


def _pids() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def _arguments(pid: int) -> bytes:
    """Of a process, each with a null byte after it; by any thread of it, since one that ends has none any more."""
    found = b""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = (_PROC / str(pid) / "cmdline").read_bytes()
        tasks = [] if found else [*(_PROC / str(pid) / "task").iterdir()]
        for task in tasks:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += (task / "cmdline").read_bytes()
    return found


def _stat(path: Path) -> list[str] | None:
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
