"""The thin supervisor of one worker: it lives in an actor of Ray's on the worker's node, and the worker is its child.

What it says of an end is what the kernel told it, as its parent. When it is gone, the worker goes with it: by its life
pipe, and by the kernel's signal at its parent's death. No Ray here: this class is all that an actor of it runs.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from coordinator.processes import Child, start_child
from coordinator.seat import Seat, end_all_with, end_and_look, has_ended, seat_of, this_machine, this_network
from loopline.errors import OperatorError
from loopline.security import is_loopback_host

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 18
_PREFIX = "loopline-of-ray-"
_OWNER = "supervisor.json"


@dataclass(frozen=True)
class Started:
    """A worker that runs. `seat` is None if it has ended already."""

    pid: int
    seat: Seat | None


@dataclass(frozen=True)
class Trace:
    """What is known of a process whose end is to be proven: where it is or, of one whose start nobody heard of, its
    supervisor and arguments that no other process has."""

    seat: Seat
    arguments: tuple[str, ...] = ()


class Supervisor:
    """Starts one process, once; `wait` may be asked before or after its end, by any number of callers."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._folder: Path | None = None
        self._reaped: asyncio.Task[int] | None = None

    async def introduce(self) -> tuple[str, Seat]:
        """The host's name, and this process itself."""
        seat = seat_of(os.getpid())
        assert seat is not None
        return socket.gethostname(), seat

    async def start(
        self, name: str, module: str, arguments: Sequence[str], config: str, coordinator: str, network: str
    ) -> Started:
        """Run `python -m module` with the cluster YAML `config`. `network` is the coordinator's. Raises OperatorError
        where this node could not reach the `coordinator`, HOST:PORT."""
        if is_loopback_host(coordinator.rpartition(":")[0].strip("[]")) and network != this_network():
            raise OperatorError(
                f"{name} would run on {socket.gethostname()}, and the coordinator is at {coordinator}, which only its "
                "own machine reaches; needed: a coordinator.host that all nodes reach"
            )
        assert self._child is None  # one life, one actor
        self._folder = await asyncio.to_thread(make_folder, name)
        config_path = self._folder / "cluster.yaml"
        config_path.write_text(config, encoding="utf-8")
        arguments = ["--config", str(config_path), *arguments]
        self._child = child = await start_child(name, module, arguments, self._folder / "worker.log")
        seat = seat_of(child.pid)
        self._reaped = asyncio.get_running_loop().create_task(child.reap())
        return Started(child.pid, seat)

    async def wait(self) -> int:
        """Until the process has been reaped; its exit status, negative for a signal."""
        assert self._reaped is not None
        return await asyncio.shield(self._reaped)

    async def read_log(self, offset: int) -> bytes:
        """What the process has written from byte `offset` on, as soon as there is something; nothing once it has ended
        and all has been read, and then its folder is gone."""
        assert self._folder is not None and self._reaped is not None
        while self._folder.is_dir():
            has_ended = self._reaped.done()
            with (self._folder / "worker.log").open("rb") as log:
                log.seek(offset)
                if chunk := log.read(_CHUNK_BYTES):
                    return chunk
            if has_ended:
                shutil.rmtree(self._folder, ignore_errors=True)
            await asyncio.sleep(_POLL_S)
        return b""

    async def terminate(self) -> None:
        """SIGTERM."""
        if self._child is not None:
            self._child.terminate()

    async def kill(self) -> None:
        """SIGKILL."""
        if self._child is not None:
            self._child.kill()

    async def end_and_look(self, trace: Trace) -> bool:
        """Whether another process of this machine has ended, whose supervisor is gone; see `look_for`."""
        return look_for(trace)


def look_for(trace: Trace) -> bool:
    """Kill it if it still runs, since nobody watches it any more; whether it has ended. On its own machine."""
    if not end_and_look(trace.seat):
        return False
    return not trace.arguments or end_all_with(trace.arguments)  # its supervisor starts nothing any more


def make_folder(name: str) -> Path:
    """For a worker's log and YAML, and for as long as this process lives: then the next one that makes a folder removes
    it, unless somebody has."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # another's, or gone, or still being written
            seat = Seat(**json.loads(owner.read_text(encoding="utf-8")))
            if seat.machine == this_machine() and has_ended(seat):
                shutil.rmtree(owner.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
    mine = seat_of(os.getpid())
    assert mine is not None
    (folder / _OWNER).write_text(json.dumps(asdict(mine)), encoding="utf-8")
    return folder
