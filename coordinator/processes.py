"""Processes of a launcher, and its own children among them: those have a life pipe, a session of their own and a log,
and are ended by SIGTERM, then SIGKILL.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from coordinator.forking import ForkServer

_TAIL_LINES = 20
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class OutOfSight:
    """What is known of a process whom nobody watches any more: it may still run."""

    why: str
    proven: Callable[[], Awaitable[None]]
    """Until it is proven to have ended; perhaps for ever."""


class Process(Protocol):
    """A process that a launcher started, wherever it runs. No call but `reap` and `wait` waits."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """On its own host."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether its end has not been seen, and it has not been lost sight of."""
        ...

    async def reap(self) -> int | OutOfSight:
        """Wait for its end; the exit status, negative for a signal. One caller only."""
        ...

    async def wait(self) -> None:
        """Until `reap` has something to say; for any number of callers."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def describe_end(self) -> str:
        """How it ended, with the last lines of its log."""
        ...


class ChildProcess(Protocol):
    """A child of this process, however it was started. Signals raise ProcessLookupError where it has ended."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """None until it has been reaped."""
        ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Child:
    """One started process. Its life pipe's write end is held here until the process has been reaped."""

    name: str
    process: ChildProcess
    life_fd: int
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.process.returncode is None

    async def reap(self) -> int:
        """Wait for its end; the exit status, negative for a signal. One caller only: it closes the life pipe."""
        exit_status = await self.process.wait()
        os.close(self.life_fd)
        return exit_status

    async def wait(self) -> None:
        """See Process."""
        await self.process.wait()

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def leave_at_once(self, limit_s: float) -> None:
        """Close its life pipe, and wait at most so long: it leaves as it does after the end of this process."""
        if self.is_alive:
            null_fd = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_fd, self.life_fd, inheritable=False)  # the number stays: whoever reaps it closes it
            os.close(null_fd)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self.process.wait()

    def describe_end(self) -> str:
        """How it ended, with the last lines of its log."""
        return f"{self.name} ended with exit status {self.process.returncode}; {tail_of(self.log_path)}"


def tail_of(log_path: Path) -> str:
    """The last lines of a log, for people."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))  # the whole may be large
            lines = log.read().decode("utf-8", errors="replace").splitlines()
    except OSError as error:  # somebody has cleaned up: no reason to know less of a process's end
        return f"its log cannot be read: {error}"
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (empty)"
    return f"the end of {log_path}:\n{tail}"


def open_log(log_path: Path) -> BinaryIO:
    """To append to. Its folder is made where it is gone: whoever cleans up temporary files stops no worker's start."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    return log_path.open("ab")


async def start_child(
    name: str, module: str, arguments: Sequence[str], log_path: Path, forks: ForkServer | None = None
) -> Child:
    """Run `python -m module ARGUMENTS --life-fd N`; it ends with this process at the latest. With `forks` it is forked
    from there, where that is possible.

    Its standard output and error are appended to `log_path`.
    """
    read_fd, write_fd = os.pipe()
    try:
        with open_log(log_path) as log:
            process: ChildProcess | None = None
            if forks is not None:
                process = await forks.start(module, arguments, log.fileno(), read_fd)
            if process is None:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "coordinator.child", module, *arguments, "--life-fd", str(read_fd)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read_fd,),
                    start_new_session=True,
                )
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        os.close(read_fd)
    return Child(name, process, write_fd, log_path)


async def end_children(children: Sequence[Process], limit_s: float) -> None:
    """Ask all to leave, kill those that are left after `limit_s`; all are gone on return."""
    living = [child for child in children if child.is_alive]
    if not living:
        return
    for child in living:
        child.terminate()
    waits = [asyncio.ensure_future(child.wait()) for child in living]
    try:
        await asyncio.wait(waits, timeout=limit_s)
        for child in living:
            if child.is_alive:
                child.kill()
        await asyncio.wait(waits)
    finally:  # the caller may have been cancelled
        for wait in waits:
            wait.cancel()
