"""Workers that are killed, stopped or told to leave under running requests: every answer is the undisturbed one, and
afterwards no block is held anywhere."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from loopline.client import Accepted, Client, Completion, Finished, WorkerInfo
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS, SMALL

TEXT = (MODELS / "train_tiny.py").read_bytes()
CASES = [(tuple(TEXT[41 * n : 41 * n + 30 + 17 * n]), 48 + 8 * n) for n in range(8)]
NAMES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
RETURN_S = 60.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of each kind, started again by the launcher when they end."""
    folder = tmp_path_factory.mktemp("losses")
    groups: dict[str, dict[str, object]] = {
        "prefill": {"replicas": 2, "num_blocks": 64, "chunk_tokens": 16},
        "decode": {"replicas": 2, "num_blocks": 128, "max_running": 16},
    }
    with launched(write_config(folder / "cluster.yaml", SMALL, **groups), folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[int, ...]]:
    """The tokens of an undisturbed run."""
    wait_whole(cluster)
    return [answer.token_ids for answer in Load(cluster).answers()]


def wait_whole(cluster: Cluster) -> None:
    """All four workers are paired again, and every block is free or cached."""

    def is_whole() -> bool:
        ready = {name for name, worker in cluster.workers().items() if worker.state == "ready" and is_paired(worker)}
        return ready == NAMES and cluster.is_idle()

    def is_paired(worker: WorkerInfo) -> bool:
        return worker.role == "decode" or len(worker.links) == 2

    try:
        wait_until(is_whole, "four ready workers without a held block", RETURN_S)
    except AssertionError as error:
        raise AssertionError(f"{error}; status: {cluster.client.status()}") from None


class Load:
    """All cases at once, watched from the first token on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(len(CASES))
        self._has_tokens = threading.Semaphore(0)
        self._answers: list[Future[Completion]] = [self._pool.submit(self._answer, case) for case in CASES]

    def _answer(self, case: tuple[tuple[int, ...], int]) -> Completion:
        answer, is_first = Completion(), True
        with Client(self._cluster.address) as client:
            for event in client.generate(case[0], max_tokens=case[1], ignore_eos=True):
                answer = answer.after(event)
                if is_first and not isinstance(event, Accepted | Finished):
                    is_first = False
                    self._has_tokens.release()
        return answer

    def wait_first_tokens(self, count: int) -> None:
        for _ in range(count):
            assert self._has_tokens.acquire(timeout=RETURN_S), "no tokens come"

    def answers(self) -> list[Completion]:
        answers = [answer.result(RETURN_S) for answer in self._answers]
        self._pool.shutdown()
        return answers


def busiest(cluster: Cluster, role: str) -> WorkerInfo:
    """The worker of a role that has most to do, once one has something."""

    def candidates() -> list[WorkerInfo]:
        workers = [worker for worker in cluster.workers().values() if worker.role == role and worker.state == "ready"]
        return [worker for worker in workers if worker.running or worker.waiting]

    try:
        return max(wait_until(candidates, f"a busy {role} worker", 3.0), key=lambda worker: worker.running)
    except AssertionError:  # prompts are short: the moment may be missed, and then any worker is as good
        return cluster.workers()[f"{role}-0"]


@pytest.mark.soak  # test_handoff_states and test_storm kill and stop workers in every run
@pytest.mark.parametrize(("role", "first_tokens"), [("prefill", 0), ("decode", 0), ("decode", 3)])
def test_a_killed_worker_costs_no_token(
    cluster: Cluster, expected: list[tuple[int, ...]], role: str, first_tokens: int
) -> None:
    wait_whole(cluster)
    load = Load(cluster)
    load.wait_first_tokens(first_tokens)
    victim = busiest(cluster, role)
    psutil.Process(victim.pid).kill()
    assert [answer.token_ids for answer in load.answers()] == expected
    wait_until(lambda: cluster.workers()[victim.name].pid != victim.pid, "it was started again", RETURN_S)
    wait_whole(cluster)


@pytest.mark.soak
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_worker_that_wakes_up_costs_no_token(
    cluster: Cluster, expected: list[tuple[int, ...]], role: str
) -> None:
    """It sleeps through its lease, is lost, and comes back as another life, or is killed by the launcher."""
    wait_whole(cluster)
    load = Load(cluster)
    load.wait_first_tokens(1)
    victim = busiest(cluster, role)
    process = psutil.Process(victim.pid)
    process.suspend()
    try:
        wait_until(lambda: cluster.workers()[victim.name].state == "lost", "its lease runs out")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the launcher may have been quicker
            process.resume()
    assert [answer.token_ids for answer in load.answers()] == expected
    wait_until(lambda: is_another_life(cluster.workers()[victim.name], victim), "it joins again", RETURN_S)
    wait_whole(cluster)


def is_another_life(now: WorkerInfo, before: WorkerInfo) -> bool:
    return (now.uuid, now.epoch) != (before.uuid, before.epoch) and now.state == "ready"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_terminated_worker_finishes_or_hands_over(
    cluster: Cluster, expected: list[tuple[int, ...]], role: str
) -> None:
    wait_whole(cluster)
    load = Load(cluster)
    load.wait_first_tokens(1)
    victim = busiest(cluster, role)
    process = psutil.Process(victim.pid)
    process.send_signal(signal.SIGTERM)
    assert [answer.token_ids for answer in load.answers()] == expected
    process.wait(RETURN_S)
    wait_whole(cluster)


def test_a_second_sigterm_ends_a_worker_at_once(cluster: Cluster, expected: list[tuple[int, ...]]) -> None:
    wait_whole(cluster)
    load = Load(cluster)
    load.wait_first_tokens(1)
    process = psutil.Process(busiest(cluster, "decode").pid)
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # another number: two of one kind may be delivered as one
    process.wait(RETURN_S)
    assert time.monotonic() - began_s < RETURN_S / 2
    assert [answer.token_ids for answer in load.answers()] == expected
    wait_whole(cluster)
