"""A launcher's side of its fork server: worker processes without the time that loading takes.

Whatever is in the way of that, a process is started in the plain way (`coordinator.processes`): a fork server saves
time, and nothing depends on it.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator.forkserver import GO, MOST_BYTES
from coordinator.orphans import reap_orphans

_LOG = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_S = 120.0
"""The first answer takes as long as loading does."""
_LOOK_S = 10.0
"""Between looks for orphans that have ended: zombies cost little."""


class ForkedProcess:
    """A child that this process has not started itself. It is reaped as it ends; needs a running event loop."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where `pid` is no process."""
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._ended: asyncio.Future[int] = loop.create_future()
        self._fd = os.pidfd_open(pid)
        loop.add_reader(self._fd, self._reap)

    async def wait(self) -> int:
        """Its exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Nothing where it has been reaped: another process may have its id."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else's child after all: it has ended, nobody here knows how
            self.returncode = -signal.SIGKILL
        self._ended.set_result(self.returncode)


def _can_adopt() -> bool:
    """Whether this process can watch children that it has not started; from now on it is given what its descendants
    leave."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class ForkServer:
    """One process for a launcher's life. Invariants: one order at a time; after a failure there are no more; what is
    forked for an order that was given up, however late, runs nothing."""

    def __init__(
        self, modules: Sequence[str], log_path: Path, *, answer_s: float = _ANSWER_S, look_s: float = _LOOK_S
    ) -> None:
        """`modules`: what `python -m` will be asked to run; `answer_s`: an order without an answer is given up then;
        `look_s`: how often orphans are reaped that this process was given."""
        self._modules = modules
        self._log_path = log_path
        self._answer_s = answer_s
        self._look_s = look_s
        self._looks: asyncio.Task[None] | None = None
        self._forked: list[ForkedProcess] = []
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Begin to load; that does not wait for it. On Linux only: elsewhere, and where it cannot be started, all goes
        the plain way. Until `close` orphans that end are reaped."""
        if not _can_adopt():
            return
        self._looks = asyncio.get_running_loop().create_task(self._reap_orphans())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, self._log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "coordinator.forkserver", str(theirs.fileno()), *self._modules),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy's products would start threads with it
                )
            except OSError as error:
                ours.close()
                _LOG.warning("no fork server: %s", error)
                return
        self._socket = ours

    async def start(self, module: str, arguments: Sequence[str], log_fd: int, life_fd: int) -> ForkedProcess | None:
        """Run `python -m module ARGUMENTS --life-fd N`, as it were; None if that has to go the plain way. Raises
        OSError where this process lacks what watching one takes."""
        async with self._lock:
            if self._socket is None:
                return None
            go_fd, let_go_fd = os.pipe()
            try:
                try:
                    told = await self._ask(self._socket, module, arguments, (log_fd, life_fd, go_fd))
                finally:
                    os.close(go_fd)
                if told is None:
                    return None
                process = ForkedProcess(told)
                self._forked.append(process)
                with contextlib.suppress(BrokenPipeError):  # it has been killed meanwhile, which `process` will see
                    os.write(let_go_fd, GO)
                return process
            finally:
                os.close(let_go_fd)  # without the word, whatever was or will be forked ends

    async def _ask(
        self, connection: socket.socket, module: str, arguments: Sequence[str], fds: Sequence[int]
    ) -> int | None:
        """The id of a process that waits for its go; None where there is none. A failure is the fork server's end."""
        order = json.dumps({"module": module, "arguments": list(arguments)}).encode()
        answer, why = b"", "it has ended"
        try:
            socket.send_fds(connection, [order], fds)
            receive = asyncio.get_running_loop().sock_recv(connection, MOST_BYTES)
            answer = await asyncio.wait_for(receive, self._answer_s)
        except (OSError, TimeoutError) as error:
            why = f"it does not answer: {error!r}"
        finally:  # an answer that comes after all would be taken for the next order's
            if not answer:
                self._end()
        if not answer:
            _LOG.warning("the fork server is of no use any more, %s; see %s", why, self._log_path)
            return None
        told = json.loads(answer)
        if "refused" in told:
            _LOG.info("not forked: %s", told["refused"])
            return None
        return int(told["pid"])

    async def close(self) -> None:
        """End it; what it has forked goes on. An order in progress then ends in None. May be repeated."""
        if self._looks is not None:
            self._looks.cancel()
            await asyncio.wait([self._looks])
        if self._process is None:
            return
        self._kill()
        await self._process.wait()
        async with self._lock:
            self._end()

    async def _reap_orphans(self) -> None:
        """What was forked for an order that was given up is one of them."""
        while True:
            await asyncio.sleep(self._look_s)
            async with self._lock:  # what is being forked is nobody's yet
                self._forked = [process for process in self._forked if process.returncode is None]
                with contextlib.suppress(OSError):  # no descriptor to look with: the next look may have one
                    reap_orphans({process.pid for process in self._forked})

    def _end(self) -> None:
        self._kill()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
