"""The thin supervisor of one worker: it lives in an actor of Ray's on the worker's node, and the worker is its child.

What it says of an end is what the kernel told it, as its parent. When it is gone, the worker goes with it: by its life
pipe, and by the kernel's signal at its parent's death. No Ray here: this class is all that an actor of it runs.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.processes import Child, start_child
from coordinator.seat import Seat, end_and_look, seat_of, this_network
from loopline.errors import OperatorError
from loopline.security import is_loopback_host

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Started:
    """A worker that runs. `seat` is None if it has ended already."""

    pid: int
    host_name: str
    seat: Seat | None


class Supervisor:
    """Starts one process, once; `wait` may be asked before or after its end, by any number of callers."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._folder: Path | None = None
        self._reaped: asyncio.Task[int] | None = None

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
        self._folder = Path(tempfile.mkdtemp(prefix=f"loopline-{name}-"))
        config_path = self._folder / "cluster.yaml"
        config_path.write_text(config, encoding="utf-8")
        arguments = ["--config", str(config_path), *arguments]
        self._child = child = await start_child(name, module, arguments, self._folder / "worker.log")
        seat = seat_of(child.pid)
        self._reaped = asyncio.get_running_loop().create_task(child.reap())
        return Started(child.pid, socket.gethostname(), seat)

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

    async def end_and_look(self, seat: Seat) -> bool:
        """Whether another process of this machine has ended, whose supervisor is gone; see `coordinator.seat`."""
        return end_and_look(seat)
