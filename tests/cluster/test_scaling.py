"""Workers that come and go by order, under a constant load: no request fails, every answer is the undisturbed one, and
afterwards no block is held anywhere."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopline.client import Client, Completion, Token, WorkerInfo
from tests.support.cluster import LOOPLINE, ROOT, Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS, SMALL
from tests.support.load import DEADLINE_S, LOOPS, Case, ConstantLoad, ask

TEXT = (MODELS / "train_tiny.py").read_bytes()
SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
CASES = [(tuple(TEXT[41 * n : 41 * n + 30 + 17 * n]), 300 if SOAK else 24 + 4 * n) for n in range(6)]
LONG = (tuple(TEXT[7:60]), 300)
ROLES = ("prefill", "decode")
CLIENTS = 32 if SOAK else 3
RETURN_S = 300.0 if SOAK else 90.0
pytestmark = pytest.mark.timeout(1500 if SOAK else 300, func_only=True)  # setting up the module's cluster comes on top


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaling")


@pytest.fixture(scope="module")
def config(folder: Path) -> Path:
    groups: dict[str, dict[str, object]] = {
        "prefill": {"replicas": 2, "num_blocks": 64, "chunk_tokens": 16},
        "decode": {"replicas": 2, "num_blocks": 192, "max_running": 16},
    }
    return write_config(folder / "cluster.yaml", SMALL, **groups)


@pytest.fixture(scope="module")
def cluster(folder: Path, config: Path) -> Iterator[Cluster]:
    """Two workers of each kind."""
    with launched(config, folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[int, ...]]:
    """The tokens of an undisturbed run."""
    return ask_at_once(cluster, [*CASES, LONG])


def ask_at_once(cluster: Cluster, cases: list[Case]) -> list[tuple[int, ...]]:
    def answer(case: Case) -> tuple[int, ...]:
        return ask(cluster.client, case).token_ids

    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(answer, cases))


@pytest.fixture
def load(cluster: Cluster, expected: list[tuple[int, ...]]) -> Iterator[ConstantLoad]:
    """Runs during the test; afterwards two workers of each kind are ready and nothing is held."""
    with ConstantLoad(cluster, CASES, expected, CLIENTS, RETURN_S) as running:
        running.wait_answers(1)
        yield running
        running.wait_answers(CLIENTS)
    assert operate(cluster, "scale", "--prefill", "2", "--decode", "2")
    cluster.wait_idle()


def operate(cluster: Cluster, command: str, *arguments: str) -> str:
    """What a `loopline` command printed."""
    done = subprocess.run(
        [LOOPLINE, command, *arguments, "--address", cluster.address],
        capture_output=True,
        text=True,
        timeout=3 * RETURN_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ready(cluster: Cluster, role: str) -> list[str]:
    return sorted(
        worker.name for worker in cluster.workers().values() if (worker.role, worker.state) == (role, "ready")
    )


def test_a_rolling_restart_costs_no_request(cluster: Cluster, load: ConstantLoad) -> None:
    before = cluster.workers()
    said = operate(cluster, "rolling-restart")
    after = cluster.workers()
    assert before.keys() == after.keys()
    assert all(after[name].pid != worker.pid and after[name].state == "ready" for name, worker in before.items())
    assert said.count("is ready again") == 4


@pytest.mark.soak
@pytest.mark.parametrize("role", ROLES)
def test_scaling_up_and_down_costs_no_request(
    cluster: Cluster, expected: list[tuple[int, ...]], load: ConstantLoad, role: str
) -> None:
    assert f"{role}: 2 -> 1" in operate(cluster, "scale", f"--{role}", "1")
    assert ready(cluster, role) == [f"{role}-0"]
    load.wait_answers(CLIENTS)
    assert f"{role}: 1 -> 3" in operate(cluster, "scale", f"--{role}", "3")
    assert ready(cluster, role) == [f"{role}-{index}" for index in range(3)]
    assert ask_at_once(cluster, CASES * 2) == expected[: len(CASES)] * 2  # more than the first two workers would get
    wait_until(lambda: cluster.workers()[f"{role}-2"].step > 0, "the new worker gets work")
    assert f"{role}: 3 -> 1" in operate(cluster, "scale", f"--{role}", "1")
    assert ready(cluster, role) == [f"{role}-0"]
    launcher = cluster.client.status().launcher
    assert launcher is not None
    assert [worker.name for worker in launcher.workers if worker.role == role] == [f"{role}-0"]


def test_at_the_limit_of_a_drain_a_long_answer_is_handed_over(
    cluster: Cluster, load: ConstantLoad, expected: list[tuple[int, ...]]
) -> None:
    answer = Completion()
    victim: WorkerInfo | None = None
    with Client(cluster.address) as client:
        prompt, max_tokens = LONG
        for event in client.generate(
            prompt, deadline_s=DEADLINE_S, max_tokens=max_tokens, ignore_eos=True, loops=LOOPS
        ):
            answer = answer.after(event)
            if victim is None and len(answer.tokens) > 3:
                workers = [
                    worker for worker in cluster.workers().values() if worker.role == "decode" and worker.running
                ]
                victim = max(workers, key=lambda worker: worker.running, default=None)
                if victim is not None:
                    operate(cluster, "drain", victim.name, "--limit", "0", "--no-wait")
    assert answer.token_ids == expected[-1]
    assert all(isinstance(token, Token) for token in answer.tokens)
    assert victim is not None
    before = victim
    wait_until(
        lambda: before.name in ready(cluster, "decode") and cluster.workers()[before.name].uuid != before.uuid,
        "its launcher started it again",
        RETURN_S,
    )


def test_a_role_without_workers_makes_requests_wait(cluster: Cluster, load: ConstantLoad) -> None:
    operate(cluster, "scale", "--decode", "0")
    assert ready(cluster, "decode") == []
    wait_until(lambda: cluster.client.status().queued >= CLIENTS, "every client waits")
    operate(cluster, "scale", "--decode", "2")


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.soak), "decode"])
def test_a_worker_started_by_hand_joins_serves_and_leaves(
    cluster: Cluster, load: ConstantLoad, config: Path, folder: Path, role: str
) -> None:
    name = f"by-hand-{role}"
    command = [str(LOOPLINE), "worker", "--role", role, "--coordinator", cluster.address, "--config", str(config)]
    with (folder / f"{name}.log").open("ab") as log, started([*command, "--name", name], log) as process:
        wait_until(lambda: name in ready(cluster, role) or process.poll() is not None, "it joins", RETURN_S)
        wait_until(lambda: name in cluster.workers() and cluster.workers()[name].step > 0, "it gets work", RETURN_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(RETURN_S) == 0
        assert name not in cluster.workers()
    load.wait_answers(CLIENTS)


@contextlib.contextmanager
def started(command: list[str], log: object) -> Iterator["subprocess.Popen[bytes]"]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_what_cannot_be_done_is_said(cluster: Cluster) -> None:
    def complaint(*arguments: str) -> str:
        done = subprocess.run(
            [LOOPLINE, *arguments, "--address", cluster.address],
            capture_output=True,
            text=True,
            timeout=RETURN_S,
            check=False,
        )
        assert done.returncode == 1
        return done.stderr

    assert complaint("drain", "decode-9").startswith("error: no worker is named 'decode-9'; there are: ")
    assert "decode-0" in complaint("drain", "decode-9")
    assert complaint("drain", "decode-0", "--limit", "1e9").startswith("error: limit_s is 1e+09; allowed: 0 to 86400")
    assert complaint("scale", "--decode", "5000").startswith("error: decode is 5000; allowed: 0 to 1000")


@pytest.mark.soak  # test_returning_peers has one such drain in every run
def test_a_prefill_worker_outlives_what_it_posted(tmp_path: Path) -> None:
    """Told to leave while one of its pushes takes long, it stays until that has arrived: nothing is handed over."""
    config = write_config(tmp_path / "cluster.yaml", SMALL, prefill={"chunk_tokens": 16})
    with config.open("a", encoding="utf-8") as file:
        file.write("faults: [{worker: prefill-0, do: delay_push, at: 3, seconds: 4.0}]\n")
    prompt, max_tokens = CASES[-1]
    with launched(config, tmp_path) as cluster, ThreadPoolExecutor(1) as pool:
        before = cluster.workers()["prefill-0"]
        answer = pool.submit(cluster.client.complete, prompt, max_tokens=max_tokens, ignore_eos=True)
        wait_until(lambda: cluster.workers()["prefill-0"].handoffs, "pushes are under way")
        operate(cluster, "drain", "prefill-0", "--limit", "60")
        finished = answer.result(RETURN_S).finished
        assert finished is not None and finished.route.earlier == ()
        assert "delay_push of push 3" in (tmp_path / "run" / "prefill-0.log").read_text(encoding="utf-8")
        assert cluster.workers()["prefill-0"].uuid != before.uuid
        cluster.wait_idle()
        again = cluster.client.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
        assert answer.result().token_ids == again.token_ids
