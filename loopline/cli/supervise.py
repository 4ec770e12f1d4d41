"""Starting and ending a cluster from a command: signals, the folder for logs, draining. `launch` and `demo` use it."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coordinator.launcher import Launcher
from loopline.errors import OperatorError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Ctrl-C and SIGTERM as two events: the first asks for an end in order, the second for an end at once.

    To be entered inside a running event loop.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Run `work` until it is done (True; its error is raised) or `event` is set (False; it is cancelled)."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


async def start(launcher: Launcher, interrupts: Interrupts, timeout_s: float, folder: Path) -> bool:
    """Bring a cluster up until it serves; False if it was interrupted. Unless True, nothing of it is left.

    Raises OperatorError with the reason where it could not start.
    """
    serving = False
    try:
        serving = await unless(interrupts.first, launcher.__aenter__()) and await unless(
            interrupts.first, launcher.wait_serving(timeout_s)
        )
    except TimeoutError:
        raise OperatorError(f"the cluster did not serve within {timeout_s:g} s; logs are in {folder}") from None
    finally:
        if not serving:
            await launcher.stop()
    return serving


async def finish(launcher: Launcher, interrupts: Interrupts) -> bool:
    """Let running requests finish, then stop everything; False if a second interrupt ended it at once."""
    if await unless(interrupts.second, launcher.stop()):
        return True
    launcher.kill()
    await launcher.stop()
    return False


@contextlib.contextmanager
def run_folder(path: Path | None) -> Iterator[Path]:
    """The folder for logs: the given one, or a temporary one that stays only if the command fails."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="loopline-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
