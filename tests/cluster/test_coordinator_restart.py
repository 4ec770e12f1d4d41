"""The coordinator is killed, stopped or told to leave under running answers: clients and workers come back to it, every
answer is the undisturbed one, and afterwards no block is held anywhere."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from loopline.client import Chunk, Client, Completion
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS

TEXT = (MODELS / "train_tiny.py").read_bytes()
NUM_STREAMS = 16
MAX_TOKENS = 60
CASES = [(tuple(TEXT[37 * n : 37 * n + 20 + 5 * n]), 0.0 if n % 2 else 0.8) for n in range(NUM_STREAMS)]
DEADLINE_S = 90.0
"""Answers are of one loop, which is enough for text that goes on where it was cut off."""
_LOG = logging.getLogger(__name__)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("coordinator")
    groups: dict[str, dict[str, object]] = {
        "prefill": {"replicas": 2, "num_blocks": 64, "chunk_tokens": 32},
        "decode": {"replicas": 2, "num_blocks": 128, "max_running": 16},
    }
    with launched(write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **groups), folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens and text of an undisturbed run."""
    return Load(cluster).answers()


class Load:
    """All cases at once, by clients of their own; greedy and sampled ones."""

    def __init__(self, cluster: Cluster) -> None:
        self._address = cluster.address
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._lock = threading.Lock()
        self.num_tokens = 0
        self._answers: list[Future[Completion]] = [
            self._pool.submit(self._answer, seed, *case) for seed, case in enumerate(CASES)
        ]

    def _answer(self, seed: int, prompt: tuple[int, ...], temperature: float) -> Completion:
        answer = Completion()
        with Client(self._address) as client:
            options = {"max_tokens": MAX_TOKENS, "temperature": temperature, "seed": seed, "loops": 1}
            for event in client.generate(prompt, deadline_s=DEADLINE_S, ignore_eos=True, **options):
                answer = answer.after(event)
                if isinstance(event, Chunk):
                    with self._lock:
                        self.num_tokens += len(event.tokens)
        return answer

    def wait_tokens(self, count: int) -> None:
        wait_until(lambda: self.num_tokens >= count, f"{count} tokens", DEADLINE_S)

    def answers(self) -> list[tuple[tuple[int, ...], str | None]]:
        answers = [answer.result(2 * DEADLINE_S) for answer in self._answers]
        self._pool.shutdown()
        for answer in answers:
            assert answer.finished is not None
            assert answer.finished.usage.completion_tokens == len(answer.tokens) == MAX_TOKENS
            assert 0 < answer.finished.timing.ttft_s <= answer.finished.timing.total_s < DEADLINE_S
        return [(answer.token_ids, answer.text) for answer in answers]


def coordinator(cluster: Cluster) -> psutil.Process:
    return wait_until(lambda: next(coordinators(cluster), None), "there is a coordinator")


def coordinators(cluster: Cluster) -> Iterator[psutil.Process]:
    """Of a launch there is one, but for the moment between its end and the next one's start."""
    for child in cluster.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "coordinator" in child.cmdline():
                yield child


def plain_call(address: str) -> tuple[grpc.Channel, Any]:
    """A call without our client, at its first token."""
    channel = grpc.insecure_channel(address)
    stub: Any = loopline_pb2_grpc.LooplineStub(channel)  # type: ignore[no-untyped-call]
    sampling = loopline_pb2.SamplingParams(max_tokens=1000, ignore_eos=True, loops=1)
    call = stub.Generate(loopline_pb2.GenerateRequest(text=b"def main():", sampling=sampling))
    while not next(call).chunk.tokens:
        pass
    return channel, call


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.soak), 400])
def test_a_killed_coordinator_costs_no_token(
    cluster: Cluster, expected: list[tuple[tuple[int, ...], str | None]], num_tokens: int
) -> None:
    epoch = cluster.client.status().epoch
    channel, call = plain_call(cluster.address)
    load = Load(cluster)
    load.wait_tokens(num_tokens)
    killed_s = time.monotonic()
    coordinator(cluster).kill()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    channel.close()
    with Client(cluster.address) as client:
        assert len(client.complete("def main():", max_tokens=2, deadline_s=DEADLINE_S).tokens) == 2
    _LOG.info("a new request was served %.1f s after the kill", time.monotonic() - killed_s)
    assert load.answers() == expected
    _LOG.info("all answers were whole %.1f s after the kill", time.monotonic() - killed_s)
    cluster.wait_idle()
    assert cluster.client.status().epoch > epoch


def test_a_coordinator_that_is_told_to_leave_comes_back(
    cluster: Cluster, expected: list[tuple[tuple[int, ...], str | None]]
) -> None:
    load = Load(cluster)
    load.wait_tokens(100)
    process = coordinator(cluster)
    process.send_signal(signal.SIGTERM)
    with Client(cluster.address) as client:  # refused while it drains, and then nobody is there
        assert len(client.complete("def main():", max_tokens=2, deadline_s=DEADLINE_S).tokens) == 2
    assert load.answers() == expected
    process.wait(DEADLINE_S)
    wait_until(lambda: coordinator(cluster).pid != process.pid, "another coordinator")
    cluster.wait_idle()


def test_a_coordinator_that_sleeps_and_wakes_costs_no_token(
    cluster: Cluster, expected: list[tuple[tuple[int, ...], str | None]]
) -> None:
    epoch = cluster.client.status().epoch
    load = Load(cluster)
    load.wait_tokens(100)
    process = coordinator(cluster)
    process.suspend()
    threading.Timer(2.0, process.resume).start()
    assert load.answers() == expected
    assert cluster.client.status().epoch == epoch
    cluster.wait_idle()
