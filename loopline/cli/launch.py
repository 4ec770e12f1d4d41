"""`loopline launch`: a cluster on this machine, from a YAML file, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from coordinator.launcher import Launcher
from loopline.cli.options import Config
from loopline.cli.supervise import Interrupts, finish, run_folder, start, unless
from loopline.client import AsyncClient, ClusterStatus
from loopline.errors import LooplineError, OperatorError
from loopline.process import write_json_by_rename

_LOOK_S = 0.5
_KILLED = 130


def launch(
    *,
    config: Config,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File to write address and pid to once the cluster serves.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to serve at; 0: any free one.")] = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where logs go.")] = None,
    ready_timeout: Annotated[float, typer.Option(metavar="S", help="Most seconds until the cluster serves.")] = 600.0,
) -> None:
    """Start a cluster and keep it running.

    The first Ctrl-C or SIGTERM lets running requests finish within a limit; the second ends everything at once.
    """
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])
    status = asyncio.run(_launch(console, config, ready_file, port, run_dir, ready_timeout))
    if status:
        raise typer.Exit(status)


async def _launch(
    console: Console, config: Path, ready_file: Path | None, port: int | None, run_dir: Path | None, timeout_s: float
) -> int:
    with run_folder(run_dir) as folder, Interrupts() as interrupts:
        launcher = Launcher(config, port=port, run_dir=folder, forks_workers=True)
        console.print(f"starting {config}; logs are in {folder}")
        if not await start(launcher, interrupts, timeout_s, folder):
            return 0
        try:
            with _ready(ready_file, launcher.public_address):
                watch = asyncio.create_task(_show_status(console, launcher))
                try:
                    await unless(interrupts.first, launcher.wait_stopped())
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except BaseException:
            await launcher.stop()
            raise
        console.print(f"stopping: running requests have {launcher.drain_limit_s:g} s; Ctrl-C again ends them at once")
        return 0 if await finish(launcher, interrupts) else _KILLED


@contextlib.contextmanager
def _ready(path: Path | None, address: str) -> Iterator[None]:
    """The ready file, whole from its first moment on, for as long as the cluster serves."""
    if path is None:
        yield
        return
    try:
        write_json_by_rename(path, {"address": address, "pid": os.getpid()})
    except OSError as error:
        raise OperatorError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def _show_status(console: Console, launcher: Launcher) -> None:
    """A live line on a terminal, else a line for each change."""
    if not console.is_terminal:
        await _watch(launcher, console.print, counts=False)
        return
    with console.status(f"serving at {launcher.public_address}") as line:
        await _watch(launcher, line.update, counts=True)


async def _watch(launcher: Launcher, show: Callable[[str], object], counts: bool) -> None:
    """Show what changes: the workers' states, and with `counts` how many requests run and wait."""
    shown, address = "", launcher.public_address
    async with AsyncClient(launcher.address, credentials=launcher.credentials) as client:
        while True:
            try:
                words = _words(address, await client.status())
            except LooplineError as error:
                words = f"{address} does not answer: {error}"
            said = words if counts else words.partition(";")[0]
            if said != shown:
                show(said)
                shown = said
            await asyncio.sleep(_LOOK_S)


def _words(address: str, status: ClusterStatus) -> str:
    states = Counter((worker.role, worker.state) for worker in status.workers)
    workers = ", ".join(f"{count} {role} {state}" for (role, state), count in sorted(states.items()))
    serving = "serving" if status.serving else "not serving"
    return f"{serving} at {address}: {workers}; {status.running} running, {status.queued} queued"
