"""`loopline demo`: bring a cluster up, stream three requests at once, show what they cost, leave nothing behind."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from coordinator.launcher import Launcher
from loopline.cli.options import Config
from loopline.cli.status import audit_faults
from loopline.cli.supervise import Interrupts, finish, run_folder, start, unless
from loopline.client import AsyncClient, Completion
from loopline.config import ClusterConfig, load_config
from loopline.errors import ConfigError, LooplineError
from loopline.intake import RequestOptions
from loopline.launcher_messages import WorkerCounts
from loopline.messages import HandoffStats
from loopline.request import FinishReason

_READY_S = 120.0
_DEADLINE_S = 120.0
_PROMPTS = (
    'def read_file(path):\n    """Return',
    "import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument(",
    "    try:\n        return self.get_value(key)\n    except KeyError:\n",
)
_REQUESTS = (
    RequestOptions(prompt=_PROMPTS[0], max_tokens=96),
    RequestOptions(prompt=_PROMPTS[1], max_tokens=96),
    RequestOptions(prompt=_PROMPTS[2], max_tokens=96, temperature=0.6, seed=7),
)


@dataclass(frozen=True)
class Answer:
    """One request's end: what came, and the failure if it has one."""

    number: int
    completion: Completion
    failure: str | None = None


def demo(*, config: Config) -> None:
    """Show a whole cluster at work, in under a minute."""
    console = Console(highlight=False, soft_wrap=True)
    asyncio.run(_demo(console, config))


async def _demo(console: Console, path: Path) -> None:
    config = load_config(path)
    if config.launcher.kind != "local":
        raise ConfigError(f"launcher.kind is {config.launcher.kind}; allowed with `loopline demo`: local")
    with run_folder(None) as folder, Interrupts() as interrupts:
        launcher = Launcher(path, port=0, run_dir=folder, forks_workers=True)
        counts = WorkerCounts.by_role(lambda role: config.group(role).replicas)
        console.print(f"starting {counts} workers ...")
        if not await start(launcher, interrupts, _READY_S, folder):
            conclude(console, ["interrupted"], folder)
        pids = launcher.pids
        faults: list[str] = []
        try:
            console.print(f"serving at {launcher.address}; {len(_REQUESTS)} requests at once:\n")
            if not await unless(interrupts.first, _show(console, launcher, config, faults)):
                faults.append("interrupted")
        finally:
            await finish(launcher, interrupts)
        faults += [f"{name} (pid {pid}) is still there" for name, pid in pids.items() if _is_alive(pid)]
        conclude(console, faults, folder)


def conclude(console: Console, faults: list[str], folder: Path) -> None:
    """The last words. Faults end the command here, inside `run_folder`, which then keeps the logs that are named."""
    if not faults:
        console.print("all processes have ended")
        return
    for fault in faults:
        console.print(f"failed: {fault}", style="bold red", markup=False)
    console.print(f"logs are in {folder}", markup=False)
    raise typer.Exit(1)


async def _show(console: Console, launcher: Launcher, config: ClusterConfig, faults: list[str]) -> None:
    async with AsyncClient(launcher.address, credentials=launcher.credentials) as client:
        answers = await asyncio.gather(
            *(_stream(console, client, number, options) for number, options in enumerate(_REQUESTS, start=1))
        )
        status = await client.status()
    console.print()
    console.print(_table(answers))
    routing = config.routing
    may_be_local = routing.prefix_source == "local" or routing.local_prefill_below_tokens or config.unified.replicas
    faults += [fault for answer in answers if (fault := fault_of(answer, not may_be_local)) is not None]
    faults += audit_faults(status)


async def _stream(console: Console, client: AsyncClient, number: int, options: RequestOptions) -> Answer:
    """Print an answer line by line as it comes, each line under its request's number."""
    completion, line = Completion(), str(options.prompt)
    try:
        async for event in client.stream(options, label=f"demo {number}", deadline_s=_DEADLINE_S):
            completion = completion.after(event)
            *whole, line = (line + getattr(event, "text", "")).split("\n")
            for text in whole:
                _print_line(console, number, text)
    except LooplineError as error:
        return Answer(number, completion, str(error))
    _print_line(console, number, line)
    return Answer(number, completion)


def _print_line(console: Console, number: int, text: str) -> None:
    console.print(f"{number} | {text}", style=("cyan", "green", "magenta")[number % 3], markup=False)


def fault_of(answer: Answer, expects_handoff: bool) -> str | None:
    """What is wrong with an answer, in words; None: nothing."""
    finished = answer.completion.finished
    if answer.failure is not None or finished is None:
        return f"request {answer.number}: {answer.failure}"
    if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return f"request {answer.number} ended by {finished.reason}"
    if not answer.completion.tokens:
        return f"request {answer.number} has no tokens"
    if expects_handoff and (finished.handoff is None or not finished.handoff.num_bytes):
        return f"request {answer.number}: no KV was handed over"
    return None


def _table(answers: list[Answer]) -> Table:
    table = Table("#", "tokens", "first token", "per token", "handoff", "descriptors", "transport", box=SIMPLE)
    for answer in answers:
        finished = answer.completion.finished
        if finished is None:
            table.add_row(str(answer.number), str(len(answer.completion.tokens)), "failed")
            continue
        timing, handoff = finished.timing, finished.handoff
        later = max(1, len(answer.completion.tokens) - 1)
        table.add_row(
            str(answer.number),
            str(len(answer.completion.tokens)),
            f"{timing.ttft_s * 1e3:.0f} ms",
            f"{(timing.total_s - timing.ttft_s) / later * 1e3:.1f} ms",
            *_handoff_cells(handoff),
        )
    return table


def _handoff_cells(handoff: HandoffStats | None) -> tuple[str, str, str]:
    if handoff is None:
        return "none", "", ""
    return f"{handoff.num_bytes / 2**20:.2f} MiB", str(handoff.descriptors), handoff.transport


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
