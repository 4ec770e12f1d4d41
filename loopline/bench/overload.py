"""`loopline bench overload`: a cluster with more requests than it can take, and with a client that does not read.

Workers are scripted ones in processes of their own (a step takes a given time), real ones of a configuration, or those
of a running cluster. What the cluster can take is measured first; then arms take turns: as much as that, and several
times as much.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator.launcher import WORKER_MODULES, Launcher
from loopline.bench.host import machine
from loopline.bench.offered_load import Asked, Asker, CpuShare, figures, find_capacity, offer
from loopline.bench.scripted_worker import STEP_VARIABLE
from loopline.bench.slow_reader import measure_readers
from loopline.client import AsyncClient
from loopline.config import load_config, resolve_paths
from loopline.errors import CheckpointError, OperatorError
from loopline.identity import Role
from loopline.security import NO_CREDENTIALS, Credentials

SCRIPTED_MODULE = "loopline.bench.scripted_worker"
_SERVING_S = 120.0
_CLIENTS_PER_SLOT = 2
_IDLE_POLL_S = 0.1
_IDLE_SPARE_S = 60.0  # past the deadlines of what was asked


@dataclass(frozen=True, kw_only=True)
class OverloadBench:
    """What is measured. `config` None and `address` None: scripted workers that serve the folder `model`."""

    config: Path | None = None
    address: str | None = None
    model: Path | None = None
    seconds: float = 60.0  # of an arm's turn
    rounds: int = 1
    times: tuple[float, ...] = (1.0, 10.0)  # of what the cluster can take
    queue: int = 64
    deadline_s: float = 10.0
    slots: int = 16  # of the scripted decode worker
    step_s: float = 0.05
    prompt_tokens: int = 16
    max_tokens: int = 8
    readers: int = 0  # also: so many clients at once, of which one stops reading in every other turn
    pause_s: float = 30.0


async def measure(
    bench: OverloadBench, command: str, say: Callable[[str], None], credentials: Credentials = NO_CREDENTIALS
) -> dict[str, Any]:
    """The report. `credentials`: to show to the cluster at `address`; one that is launched has its own. Raises
    OperatorError kinds where no cluster can be had, and where it finishes nothing."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loopline-bench-")))
        address, pid, slots = bench.address, None, bench.slots
        if address is None:
            config = _write_config(bench, folder)
            decode = load_config(config).decode
            slots = decode.max_running * decode.replicas
            os.environ[STEP_VARIABLE] = str(bench.step_s)  # the launcher's children inherit it
            modules = WORKER_MODULES if bench.config is not None else dict.fromkeys(Role, SCRIPTED_MODULE)
            launcher = Launcher(config, run_dir=folder / "run", port=0, worker_modules=modules)
            await stack.enter_async_context(launcher)
            await launcher.wait_serving(_SERVING_S)
            address, pid = launcher.address, launcher.pids["coordinator"]
            credentials = launcher.credentials
        asker = Asker(address, bench.prompt_tokens, bench.max_tokens, bench.deadline_s, credentials)
        stack.push_async_callback(asker.close)
        cluster = await stack.enter_async_context(AsyncClient(address, credentials=credentials))
        say("measuring what the cluster can take")
        capacity = await find_capacity(asker, _CLIENTS_PER_SLOT * slots, max(3.0, bench.seconds / 4))
        arms = await _take_turns(bench, asker, cluster, capacity, pid, say)
        readers = await measure_readers(address, credentials, bench, say) if bench.readers else None
    return {
        "machine": machine() | {"command": command},
        "bench": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(bench).items()},
        "capacity_per_s": capacity,
        "arms": arms,
        "readers": readers,
    }


async def _take_turns(
    bench: OverloadBench,
    asker: Asker,
    cluster: AsyncClient,
    capacity: float,
    pid: int | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    await offer(asker, capacity * max(bench.times), min(5.0, bench.seconds))  # what grows once has grown
    for number in range(bench.rounds):
        for times in bench.times:
            await _until_idle(cluster, bench.deadline_s + _IDLE_SPARE_S)
            say(f"round {number + 1} of {bench.rounds}: {times:g} times {capacity:.3g} requests/s")
            turns.append(await _turn(bench, asker, times, capacity * times, pid))
    return turns


async def _turn(bench: OverloadBench, asker: Asker, times: float, rate: float, pid: int | None) -> dict[str, Any]:
    before, share, most_kib = _kib(pid), CpuShare(), 0
    cpu_before_s = _cpu_s(pid)
    load = asyncio.ensure_future(offer(asker, rate, bench.seconds))
    while not load.done():
        await asyncio.wait([load], timeout=1.0)
        most_kib = max(most_kib, _kib(pid) or 0)
    asked: list[Asked] = load.result()
    return {
        "times": times,
        "offered_per_s": rate,
        **figures(asked, bench.seconds, _warm_s(bench)),
        "generator_cpu": share.value(),
        "coordinator_cpu": None if pid is None else (_cpu_s(pid) - cpu_before_s) / bench.seconds,
        "rss_mib": None if pid is None else [(before or 0) / 1024, most_kib / 1024, (_kib(pid) or 0) / 1024],
    }


def _warm_s(bench: OverloadBench) -> float:
    """What does not count: until the queue is as long as it gets."""
    return min(bench.deadline_s, bench.seconds / 4)


async def _until_idle(cluster: AsyncClient, limit_s: float) -> None:
    """Until nothing waits or runs. Raises OperatorError where something still does after `limit_s`."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while (status := await cluster.status()).queued or status.running:
        if loop.time() >= end_s:
            held = f"{status.queued} requests wait and {status.running} run"
            raise OperatorError(f"{held} {limit_s:g} s after the bench's last one; does somebody else use the cluster?")
        await asyncio.sleep(_IDLE_POLL_S)  # back-off


def _write_config(bench: OverloadBench, folder: Path) -> Path:
    """The configuration with the bench's queue, any free port and paths that hold from `folder`."""
    if bench.config is not None:
        load_config(bench.config)  # its faults are named as they are elsewhere
        sections = yaml.safe_load(bench.config.read_text(encoding="utf-8"))
        resolve_paths(sections, bench.config.resolve().parent)
    else:
        if bench.model is None:
            raise CheckpointError("scripted workers need a checkpoint folder, for its config.json and tokenizer alone")
        group = {"num_blocks": 1 << 16, "max_running": bench.slots}
        sections = {"model": {"path": str(bench.model.resolve())}, "prefill": group, "decode": group}
    sections["coordinator"] = {**sections.get("coordinator", {}), "port": 0, "queue_limit": bench.queue}
    sections["telemetry"] = {**sections.get("telemetry", {}), "log_level": "warning"}
    path = folder / "overload.yaml"
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


def _kib(pid: int | None) -> int | None:
    """Resident memory of a process of this machine."""
    for line in _lines(pid, "status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return None


def _cpu_s(pid: int | None) -> float:
    """Processor time that it has had."""
    for line in _lines(pid, "stat"):
        fields = line.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _lines(pid: int | None, name: str) -> Sequence[str]:
    path = Path(f"/proc/{pid}/{name}")
    return path.read_text(encoding="utf-8").splitlines() if pid is not None and path.is_file() else ()
