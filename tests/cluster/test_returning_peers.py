"""Workers that go and others that come in their place, under requests: at the same port, after a drain, or not for a
while. And prompts whose clients have left before anybody computed them."""

import asyncio
import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loopline.client import Accepted, AsyncClient, Chunk, Client, Completion, Finished, WorkerInfo
from loopline.engine.local import LocalEngine
from tests.support.cluster import DEADLINE_S, LOOPLINE, READY_S, Cluster, launched, wait_until, write_config
from tests.support.faulty import RETURN_S, Case, answers_alone
from tests.support.golden import MODELS, SMALL

TEXT = (MODELS / "train_tiny.py").read_bytes()
CHUNK = 16
SHORT: list[Case] = [(tuple(TEXT[61 * n : 61 * n + 20 + 9 * n]), 6) for n in range(6)]
LONG: list[Case] = [(tuple(TEXT[97 * n : 97 * n + 24]), 400) for n in range(4)]
GROUPS: dict[str, dict[str, object]] = {
    "prefill": {"num_blocks": 64, "max_running": 1, "chunk_tokens": CHUNK},
    "decode": {"num_blocks": 192, "max_running": 16},
}
NUM_LEFT, LEFT_TOKENS = 10, 30 * CHUNK
SOON_S = 10.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A prefill worker with one slot and a decode worker."""
    folder = tmp_path_factory.mktemp("returning")
    with launched(write_config(folder / "cluster.yaml", SMALL, **GROUPS), folder) as running:
        yield running


@pytest.fixture(scope="module")
def short(small_engine: LocalEngine) -> list[tuple[int, ...]]:
    return answers_alone(small_engine, SHORT)


@pytest.fixture(scope="module")
def long(small_engine: LocalEngine) -> list[tuple[int, ...]]:
    return answers_alone(small_engine, LONG)


# ---- workers by hand -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_hand(
    cluster: Cluster, folder: Path, name: str, *, port: int = 0, faults: list[dict[str, object]] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of the cluster that no launcher keeps, once it has a link; it drains at the end, if it still lives."""
    config = folder / f"{name}.yaml"
    write_config(config, SMALL, **GROUPS)
    raw = yaml.safe_load(config.read_text(encoding="utf-8"))
    raw["prefill"]["replicas"] = 2  # a fault names a worker that there is
    config.write_text(yaml.safe_dump({**raw, "faults": faults or []}), encoding="utf-8")
    command = [str(LOOPLINE), "worker", "--role", name.partition("-")[0], "--config", str(config), "--name", name]
    command += ["--coordinator", cluster.address, "--port", str(port)]
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: is_linked(cluster, name, process), f"{name} takes work", READY_S)
        yield process
        if process.poll() is None:
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def is_linked(cluster: Cluster, name: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether the process is ready, and paired with every living worker of the other role."""
    assert process.poll() is None, f"{name} has ended with exit status {process.returncode}"
    workers = {one: worker for one, worker in cluster.workers().items() if worker.state != "lost"}
    mine = workers.get(name)
    if mine is None or mine.pid != process.pid or mine.state != "ready":
        return False
    if mine.role == "prefill":
        decode = {one for one, worker in workers.items() if worker.role == "decode"}
        return {link.peer for link in mine.links} == decode
    links = [{link.peer for link in worker.links} for worker in workers.values() if worker.role == "prefill"]
    return all(name in peers for peers in links)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_lost(cluster: Cluster, before: WorkerInfo) -> bool:
    now = cluster.workers().get(before.name)
    return now is None or now.state == "lost" or now.uuid != before.uuid


# ---- requests --------------------------------------------------------------------------------------------------------


def complete(cluster: Cluster, case: Case, deadline_s: float = RETURN_S) -> Completion:
    with Client(cluster.address) as client:
        return client.complete(case[0], deadline_s=deadline_s, max_tokens=case[1], ignore_eos=True)


def route_of(answer: Completion) -> tuple[str, str]:
    assert answer.finished is not None
    return answer.finished.route.prefill, answer.finished.route.decode


class Stream:
    """An answer that the test reads as far as it likes."""

    def __init__(self, cluster: Cluster, case: Case) -> None:
        self._client = Client(cluster.address)
        self._events = self._client.generate(case[0], max_tokens=case[1], ignore_eos=True, deadline_s=RETURN_S)
        self.token_ids: tuple[int, ...] = ()
        self.finished: Finished | None = None

    def read(self, count: int) -> None:
        """Until it has so many more tokens."""
        wanted = len(self.token_ids) + count
        while len(self.token_ids) < wanted:
            self._take(next(self._events))

    def rest(self) -> tuple[int, ...]:
        """All tokens of the answer."""
        for event in self._events:
            self._take(event)
        self._client.close()
        return self.token_ids

    def _take(self, event: object) -> None:
        if isinstance(event, Chunk):
            self.token_ids += tuple(token.id for token in event.tokens)
        elif isinstance(event, Finished):
            self.finished = event


class Health:
    """What the health service says, from the beginning on."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._answers = stub.Watch(health_pb2.HealthCheckRequest())
        self.said: list[int] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(grpc.RpcError):  # the end
            for answer in self._answers:
                self.said.append(answer.status)

    def close(self) -> None:
        self._answers.cancel()
        self._thread.join(DEADLINE_S)
        self._channel.close()


def num_prefilled(log: Path) -> int:
    """How many prompts a prefill worker has computed, by its log."""
    return len(re.findall(r"prefilled \d+ tokens", log.read_text(encoding="utf-8")))


# ---- what must hold --------------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_long_ones_whose_clients_have_left(
    cluster: Cluster, short: list[tuple[int, ...]]
) -> None:
    """One slot, in which each long prompt would be many steps."""
    prompt = (TEXT * 2)[:LEFT_TOKENS]

    async def send_and_leave() -> None:
        async with AsyncClient(cluster.address) as client:
            streams = [client.generate(prompt[n:], max_tokens=4) for n in range(NUM_LEFT)]
            for event in await asyncio.gather(*(anext(stream) for stream in streams)):
                assert isinstance(event, Accepted)
            await asyncio.gather(*(stream.aclose() for stream in streams))

    async def within_a_limit() -> None:
        await asyncio.wait_for(send_and_leave(), RETURN_S)

    asyncio.run(within_a_limit())
    first_step = cluster.workers()["prefill-0"].step
    assert complete(cluster, SHORT[0], deadline_s=SOON_S).token_ids == short[0]
    cluster.wait_idle()
    steps = cluster.workers()["prefill-0"].step - first_step
    assert steps < LEFT_TOKENS // CHUNK, f"{steps} steps after the clients had left"


def test_a_prefill_worker_that_drains_outlives_its_pushes(
    cluster: Cluster, short: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Each push takes a while; the order to leave comes after the commit and before the first has arrived. The other
    prefill worker stands still until then, with the one request that it has room for."""
    slow: dict[str, object] = {"worker": "prefill-1", "do": "delay_push", "times": 1000, "seconds": 2.0}
    with by_hand(cluster, tmp_path, "prefill-1", faults=[slow]) as leaving, ThreadPoolExecutor(len(SHORT)) as pool:
        with cluster.stopped("prefill-0"):
            answers = [pool.submit(complete, cluster, case) for case in SHORT]
            log = tmp_path / "prefill-1.log"
            committed = wait_until(lambda: num_prefilled(log), "a commit whose pushes are on their way")
            leaving.terminate()
        assert leaving.wait(DEADLINE_S) == 0
        held = cluster.workers()["decode-0"].handoffs
        assert "quarantined" not in held, held
        done = [answer.result(RETURN_S) for answer in answers]
    assert [answer.token_ids for answer in done] == short
    routes = [answer.finished.route for answer in done if answer.finished is not None]
    by_it = [route for route in routes if route.prefill == "prefill-1"]
    assert len(by_it) >= committed and not any(route.earlier for route in by_it)
    assert "not drained within" not in (tmp_path / "prefill-1.log").read_text(encoding="utf-8")
    cluster.wait_idle()


def test_a_worker_that_replaces_a_killed_one_at_its_port_serves_old_and_new_peers(
    cluster: Cluster, short: list[tuple[int, ...]], long: list[tuple[int, ...]], tmp_path: Path
) -> None:
    port = free_port()
    with by_hand(cluster, tmp_path, "decode-hand", port=port) as killed:
        before = cluster.workers()["decode-hand"]
        streams = [Stream(cluster, case) for case in LONG]
        for stream in streams:
            stream.read(3)  # one of the prefill worker, the others of a decode worker: nothing is on its way any more
        killed.kill()
        killed.wait()
    with by_hand(cluster, tmp_path, "decode-hand", port=port), by_hand(cluster, tmp_path, "prefill-new"):
        after = cluster.workers()["decode-hand"]
        assert after.address == before.address and after.uuid != before.uuid
        assert [stream.rest() for stream in streams] == long
        earlier = [stream.finished.route.earlier for stream in streams if stream.finished is not None]
        assert any(earlier), "it had some of them"
        missing = {("prefill-0", "decode-hand"), ("prefill-new", "decode-hand")}

        def all_served() -> bool:
            with ThreadPoolExecutor(len(SHORT)) as pool:
                answers = list(pool.map(lambda case: complete(cluster, case), SHORT))
            assert [answer.token_ids for answer in answers] == short
            missing.difference_update(route_of(answer) for answer in answers)
            return not missing

        wait_until(all_served, f"requests go all ways to the new worker, {missing} are missing", RETURN_S)
    cluster.wait_idle()


def test_a_decode_worker_serves_on_without_prefill_workers(
    tmp_path: Path, short: list[tuple[int, ...]], long: list[tuple[int, ...]]
) -> None:
    """The cluster's health is SERVING while there is one; without any, answers in progress go on and others wait."""
    groups = {**GROUPS, "launcher": {"restart": "never"}}
    with (
        launched(write_config(tmp_path / "cluster.yaml", SMALL, **groups), tmp_path) as cluster,
        contextlib.closing(Health(cluster.address)) as health,
        ThreadPoolExecutor(1) as pool,
    ):
        decode, first = cluster.workers()["decode-0"], cluster.workers()["prefill-0"]

        def check_decode(state: str) -> None:
            now = cluster.workers()["decode-0"]
            assert (now.uuid, now.epoch, now.pid, now.state) == (decode.uuid, decode.epoch, decode.pid, state)

        with by_hand(cluster, tmp_path, "prefill-1") as second:
            stream = Stream(cluster, LONG[0])
            stream.read(3)
            kill(cluster, first)
            check_decode("ready")
            assert complete(cluster, SHORT[0]).token_ids == short[0]
            assert stream.rest() == long[0]
            assert stream.finished is not None and stream.finished.route.earlier == ()
            assert health.said == [health_pb2.HealthCheckResponse.SERVING]
            stream = Stream(cluster, LONG[1])
            stream.read(3)
            last = cluster.workers()["prefill-1"]
            second.kill()
            second.wait()
        wait_until(lambda: is_lost(cluster, last), "prefill-1 is lost")
        waits = pool.submit(complete, cluster, SHORT[1])
        assert stream.rest() == long[1]
        assert stream.finished is not None and stream.finished.route.earlier == ()
        check_decode("starting")  # it takes work again with the first prefill worker that joins
        assert not waits.done()
        with by_hand(cluster, tmp_path, "prefill-2"):
            assert waits.result(RETURN_S).token_ids == short[1]
            check_decode("ready")
            cluster.wait_idle()
            wait_until(lambda: health.said[-1] == health_pb2.HealthCheckResponse.SERVING, "the cluster serves again")


def kill(cluster: Cluster, worker: WorkerInfo) -> None:
    """End a launched worker, and wait until the coordinator knows."""
    psutil.Process(worker.pid).kill()
    wait_until(lambda: is_lost(cluster, worker), f"{worker.name} is lost")
