"""The `loopline` command from outside: real processes, real gRPC, real transfers."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import wait_until

ROOT = Path(__file__).parents[2]
LOOPLINE = str(Path(sys.executable).parent / "loopline")
MODEL = ROOT / "configs/models/tiny-ouro"
READY_S = 90.0
PROMPT = 'def read_file(path):\n    """Return'

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Cluster:
    """A launched cluster: the launcher's process, and where it listens."""

    process: subprocess.Popen[str]
    address: str
    ready_file: Path


def _loopline(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LOOPLINE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    wait_until(lambda: path.exists() or process.poll() is not None, f"{path} is there", READY_S)
    assert process.poll() is None, process.communicate()[1]


def _launch(folder: Path, *, lines: str = "") -> Cluster:
    config = folder / "small.yaml"
    group = "{num_blocks: 40, max_running: 4, chunk_tokens: 32}"
    text = f"model: {{path: {MODEL}, dtype: fp32}}\nprefill: {group}\ndecode: {group}\n{lines}"
    config.write_text(text, encoding="utf-8")
    ready_file = folder / "ready.json"
    process = subprocess.Popen(
        [LOOPLINE, "launch", str(config), "--port", "0", "--ready-file", str(ready_file), "--run-dir", str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _wait_for(ready_file, process)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    ready = json.loads(ready_file.read_text(encoding="utf-8"))
    assert ready["pid"] == process.pid
    return Cluster(process, ready["address"], ready_file)


def _stop(cluster: Cluster) -> tuple[int, str]:
    """SIGTERM; the exit status and what was said. Every process that the launcher started must be gone."""
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGTERM)
    _, said = cluster.process.communicate(timeout=40)
    assert [child for child in children if child.is_running()] == []
    return cluster.process.returncode, said


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = _launch(tmp_path_factory.mktemp("cluster"))
    yield cluster
    if cluster.process.poll() is None:
        _stop(cluster)


def _answer(*arguments: str) -> dict[str, Any]:
    finished = _loopline(*arguments, "--prompt", PROMPT, "--max-tokens", "24", "--json")
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_a_cluster_answers_like_one_process(cluster: Cluster) -> None:
    through = _answer("generate", "--address", cluster.address, "--logprobs", "1")
    alone = _answer("run", str(MODEL), "--dtype", "fp32", "--logprobs", "1")
    for key in ("token_ids", "text", "finish_reason"):
        assert through[key] == alone[key]
    assert through["text"].startswith(" a dictionary")
    assert (through["usage"]["prompt_tokens"], through["usage"]["completion_tokens"]) == (len(PROMPT), 24)
    assert (through["route"]["prefill"], through["route"]["decode"]) == ("prefill-0", "decode-0")
    assert len(through["logprobs"]) == 24


def test_text_is_streamed(cluster: Cluster) -> None:
    finished = _loopline("generate", "--address", cluster.address, "--prompt", PROMPT, "--max-tokens", "8")
    assert (finished.returncode, finished.stdout) == (0, " a dicti\n")


def test_a_wrong_value_is_refused_with_the_number(cluster: Cluster) -> None:
    finished = _loopline("generate", "--address", cluster.address, "--prompt", "x", "--top-p", "3", "--json")
    assert finished.returncode == 1
    assert "top_p is 3" in json.loads(finished.stdout)["error"]
    assert "top_p is 3" in finished.stderr


def test_status_names_the_workers(cluster: Cluster) -> None:
    finished = _loopline("status", "--address", cluster.address, "--json", "--audit")
    assert finished.returncode == 0, finished.stderr
    status = json.loads(finished.stdout)
    workers = {worker["name"]: worker for worker in status["workers"]}
    assert status["serving"]
    assert {name: (worker["role"], worker["state"]) for name, worker in workers.items()} == {
        "prefill-0": ("prefill", "ready"),
        "decode-0": ("decode", "ready"),
    }
    for worker in workers.values():
        assert psutil.pid_exists(worker["pid"])
        assert worker["blocks"]["total"] == 40
    assert workers["prefill-0"]["links"][0]["peer"] == "decode-0"
    table = _loopline("status", "--address", cluster.address)
    assert "decode-0" in table.stdout
    assert "prefill-0: in flight 0 B of 2 GiB, waited " in table.stdout


def test_a_taken_port_ends_the_launch_with_the_reason(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        config = str(ROOT / "configs/local-cpu.yaml")
        finished = _loopline("launch", config, "--port", port, "--run-dir", str(tmp_path))
    assert finished.returncode != 0
    assert f"127.0.0.1:{port}" in finished.stderr


def test_sigterm_drains_and_leaves_nothing(cluster: Cluster) -> None:
    """The last test of the shared cluster: it ends it."""
    generate = [LOOPLINE, "generate", "--address", cluster.address, "--prompt", PROMPT, "--max-tokens", "16"]
    with subprocess.Popen([*generate, "--ignore-eos"], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        first = running.stdout.read(1)
        status, said = _stop(cluster)
        rest, _ = running.communicate(timeout=20)
    assert (status, running.returncode) == (0, 0), said
    assert len(first + rest) == 17
    assert not cluster.ready_file.exists()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    cluster = _launch(tmp_path)
    generate = [LOOPLINE, "generate", "--address", cluster.address, "--prompt", PROMPT, "--max-tokens", "500"]
    with subprocess.Popen([*generate, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.read(1)
        start_s = time.monotonic()
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.stderr is not None
        assert any("again ends them at once" in line for line in cluster.process.stderr)  # it drains
        status, _ = _stop(cluster)
        assert time.monotonic() - start_s < 5
        running.kill()  # it waits a while for the coordinator to come back
    assert status == 130


def test_the_demo_goes_right_and_leaves_nothing() -> None:
    finished = _loopline("demo", str(ROOT / "configs/local-cpu.yaml"), timeout_s=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "3 | " in finished.stdout
    assert "all processes have ended" in finished.stdout
