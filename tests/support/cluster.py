"""A real cluster for tests: `loopline launch` as a user starts it, and what tests ask of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import yaml

from loopline.client import Client, WorkerInfo
from loopline.security import NO_CREDENTIALS, Credentials

ROOT = Path(__file__).parents[2]
LOOPLINE = Path(sys.executable).with_name("loopline")
READY_S = 60.0
DEADLINE_S = 30.0
_PAUSE_S = 0.05
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first true value of `condition`; AssertionError that says what was waited for."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(_PAUSE_S)


def write_config(path: Path, model: Path, /, **groups: dict[str, object]) -> Path:
    """A cluster YAML for `model` in fp32 on any free port; `groups` override whole sections key by key."""
    sections: dict[str, dict[str, object]] = {
        "model": {"path": str(model), "dtype": "fp32"},
        "kv": {"prefix_cache": False},  # tests of it say so
        "coordinator": {"port": 0},
        "prefill": {"num_blocks": 64, "chunk_tokens": 64},
        "decode": {"num_blocks": 128},
        "transfer": {"poll_interval_s": 0.001},  # workers that wait leave the processors to others
    }
    for name, values in groups.items():
        sections[name] = {**sections.get(name, {}), **values}
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


def worker_names(config: Path) -> list[str]:
    """Whom a launcher starts by this YAML."""
    sections = yaml.safe_load(config.read_text(encoding="utf-8"))
    return [f"{role}-{n}" for role in ("prefill", "decode") for n in range(sections.get(role, {}).get("replicas", 1))]


class Cluster:
    """A running cluster."""

    def __init__(
        self, process: subprocess.Popen[bytes], address: str, run_dir: Path, credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        self.process = process
        self.address = address
        self.run_dir = run_dir
        self.client = Client(address, credentials=credentials)

    def workers(self) -> dict[str, WorkerInfo]:
        return {worker.name: worker for worker in self.client.status().workers}

    def is_idle(self) -> bool:
        """Nothing is queued, runs or is held or quarantined anywhere, by the workers' own fresh counts."""
        status = self.client.status()
        return not (status.queued or status.running) and all(
            worker.blocks.free + worker.blocks.cached == worker.blocks.total
            and worker.blocks.total > 0
            and not worker.running
            and not worker.handoffs
            for worker in status.workers
            if worker.state != "lost"
        )

    def wait_idle(self, deadline_s: float = DEADLINE_S) -> None:
        try:
            wait_until(self.is_idle, "every block is free again", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {self.client.status()}") from None

    def is_whole(self, names: Iterable[str]) -> bool:
        """Whether these workers are ready, and each prefill worker has a link to each decode worker."""
        ready = {name: worker for name, worker in self.workers().items() if worker.state == "ready"}
        decode = {name for name in names if ready.get(name) is not None and ready[name].role == "decode"}
        links = [{link.peer for link in worker.links} for worker in ready.values() if worker.role == "prefill"]
        return ready.keys() >= set(names) and all(peers >= decode for peers in links)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """A worker stands still meanwhile, and keeps what it is given. For less than a lease."""
        process = psutil.Process(self.workers()[name].pid)
        process.suspend()
        try:
            yield
        finally:
            process.resume()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def launched(
    config: Path, folder: Path, credentials: Credentials = NO_CREDENTIALS, ready_s: float = READY_S
) -> Iterator[Cluster]:
    """`loopline launch` until all its workers serve, not only the first pair; ends it with one SIGTERM and checks that
    no process is left."""
    ready = folder / "ready.json"
    command = [str(LOOPLINE), "launch", str(config), "--ready-file", str(ready)]
    command += ["--port", "0", "--run-dir", str(folder / "run")]
    log = (folder / "launch.log").open("wb")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:
        wait_until(lambda: ready.is_file() or process.poll() is not None, "the cluster serves", ready_s)
        assert process.poll() is None, (folder / "launch.log").read_text()
        cluster = Cluster(process, json.loads(ready.read_text())["address"], folder / "run", credentials)
        names = worker_names(config)
        wait_until(lambda: cluster.is_whole(names), f"{names} are ready", ready_s)
        children = cluster.descendants()
        yield cluster
        cluster.client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, (folder / "launch.log").read_text()
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"processes left behind: {left}"
    finally:
        log.close()
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
