"""A cluster whose workers are on other hosts: the coordinator, a prefill worker and decode workers in network
namespaces of their own, with cables between them that are cut and put back, or lose and delay what goes through them.

Every answer has the tokens of one engine alone, every push's bytes are compared with what was sent, and afterwards no
block is held anywhere.
"""

import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from loopline.certificates import CA_FILE, CLIENT_TOKEN_FILE
from loopline.client import Chunk, Completion, WorkerInfo
from loopline.engine.local import LocalEngine
from tests.support.asking import alone, prompt_of
from tests.support.cluster import LOOPLINE, wait_until
from tests.support.netns.cluster import HostsCluster, over_hosts
from tests.support.netns.impairment import Impairment
from tests.support.netns.network import missing

CUT_S = 10.0
RETURN_S = 60.0
DEADLINE_S = 110.0
Case = tuple[tuple[int, ...], int]  # prompt, max_tokens
CASES: list[Case] = [(prompt_of(n, 40 + 24 * n), 300 + 8 * n) for n in range(6)]
"""Answers that are far from their end when something happens to them."""
Expected = dict[tuple[int, ...], tuple[int, ...]]
LONG: Case = (prompt_of(7, 400), 40)
pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]
PREFILL: dict[str, object] = {"num_blocks": 64, "chunk_tokens": 16}
DECODE: dict[str, object] = {"num_blocks": 192, "max_running": 16}


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (lacking := missing()) != "":
        pytest.skip(lacking)


@pytest.fixture(scope="module")
def expected(small_engine: LocalEngine) -> Expected:
    """What one engine alone answers, by prompt."""
    return {prompt: alone(small_engine, prompt, max_tokens) for prompt, max_tokens in [*CASES, LONG]}


class Streams:
    """Requests that were sent together, from the moment on when all of them stream."""

    def __init__(self, cluster: HostsCluster, cases: Sequence[Case]) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor(len(cases))
        self._first = threading.Semaphore(0)
        self._answers: list[Future[Completion]] = [self._pool.submit(self._answer, *case) for case in cases]

    def wait_first_tokens(self) -> None:
        for _ in self._answers:
            assert self._first.acquire(timeout=RETURN_S), "no tokens come"

    def answers(self) -> list[Completion]:
        answers = [answer.result(DEADLINE_S + RETURN_S) for answer in self._answers]
        self._pool.shutdown()
        return answers

    def _answer(self, prompt: tuple[int, ...], max_tokens: int) -> Completion:
        answer, tokens = Completion(), 0
        with self._cluster.new_client() as client:
            events = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, deadline_s=DEADLINE_S)
            for event in events:
                answer = answer.after(event)
                if isinstance(event, Chunk) and tokens < 2:  # the second is of the decode worker
                    tokens += len(event.tokens)
                    if tokens >= 2:
                        self._first.release()
        return answer


def hold_until(moment_s: float) -> None:
    wait_until(lambda: time.monotonic() >= moment_s, "the cut lasts", CUT_S + RETURN_S)


def check(answers: Sequence[Completion], cases: Sequence[Case], expected: Expected) -> None:
    for answer, (prompt, max_tokens) in zip(answers, cases, strict=True):
        assert answer.token_ids == expected[prompt][:max_tokens]


def audit(cluster: HostsCluster) -> None:
    """Nothing is held or quarantined anywhere, and each worker's counts add up."""
    cluster.wait_idle(RETURN_S)
    secrets = cluster.run_dir / "secrets"
    command = [str(LOOPLINE), "status", "--audit", "--address", cluster.address]
    command += ["--ca-file", str(secrets / CA_FILE), "--token-file", str(secrets / CLIENT_TOKEN_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RETURN_S, check=False)
    assert done.returncode == 0, done.stderr


def returns(cluster: HostsCluster, before: WorkerInfo) -> None:
    """The same process, as its next life, paired again."""

    def is_back() -> bool:
        now = cluster.workers().get(before.name)
        return now is not None and now.state == "ready" and (now.uuid, now.pid) == (before.uuid, before.pid)

    wait_until(is_back, f"{before.name} is back", RETURN_S)
    now = cluster.workers()[before.name]
    assert now.epoch > before.epoch
    names = [worker.name for worker in cluster.workers().values()]
    wait_until(lambda: cluster.is_whole(names), "all pairs are back", RETURN_S)


def serves_again(cluster: HostsCluster, name: str, expected: Expected) -> None:
    """Requests come to this worker, too, and end well there."""

    def serves() -> bool:
        streams = Streams(cluster, [(prompt, 8) for prompt, _ in CASES[:3]])
        answers = streams.answers()
        check(answers, [(prompt, 8) for prompt, _ in CASES[:3]], expected)
        routes = [answer.finished.route for answer in answers if answer.finished is not None]
        return any(name in (route.prefill, route.decode) for route in routes)

    wait_until(serves, f"{name} serves", RETURN_S)


def test_workers_on_other_hosts_serve_and_survive_a_cut_decode_host(expected: Expected, tmp_path: Path) -> None:
    with over_hosts(tmp_path, ["prefill", "decode", "decode"], prefill=PREFILL, decode=DECODE) as cluster:
        workers = cluster.workers()
        for host, worker in workers.items():
            assert worker.address.startswith(f"{cluster.net.address(host)}:")
        at_first = {host: cluster.net.received_bytes(host) for host in workers}
        answer = cluster.client.complete(*CASES[5][:1], max_tokens=8, ignore_eos=True)
        check([answer], [(CASES[5][0], 8)], expected)
        assert answer.finished is not None and answer.finished.handoff.transport == "ucx:tcp"
        taker = answer.finished.route.decode
        assert cluster.net.received_bytes(taker) - at_first[taker] > answer.finished.handoff.num_bytes > 0

        streams = Streams(cluster, CASES)
        streams.wait_first_tokens()
        victim = cluster.workers()["decode-0"]
        cluster.net.cut("decode-0")
        cut_s = time.monotonic()
        wait_until(lambda: cluster.workers()["decode-0"].state == "lost", "its lease runs out")
        hold_until(cut_s + CUT_S)
        cluster.net.restore("decode-0")
        answers = streams.answers()
        check(answers, CASES, expected)
        recovered = [answer for answer in answers if answer.finished is not None and answer.finished.route.earlier]
        assert recovered, "no stream was cut off"
        returns(cluster, victim)
        serves_again(cluster, "decode-0", expected)
        audit(cluster)


def test_requests_wait_for_the_only_decode_host(expected: Expected, tmp_path: Path) -> None:
    with over_hosts(tmp_path, ["prefill", "decode"], prefill=PREFILL, decode=DECODE) as cluster:
        streams = Streams(cluster, CASES[:4])
        streams.wait_first_tokens()
        victim = cluster.workers()["decode-0"]
        cluster.net.cut("decode-0")
        cut_s = time.monotonic()
        wait_until(lambda: cluster.workers()["decode-0"].state == "lost", "its lease runs out")
        late = Streams(cluster, CASES[4:])
        hold_until(cut_s + CUT_S)
        status = cluster.client.status()
        assert status.running + status.queued == len(CASES)
        cluster.net.restore("decode-0")
        check(streams.answers() + late.answers(), CASES, expected)
        returns(cluster, victim)
        audit(cluster)


def test_a_handoff_survives_a_cut_prefill_host(expected: Expected, tmp_path: Path) -> None:
    """The cable is cut while pushes are on their way; what was lost on it is sent again by tcp when it is back."""
    slow = {"prefill-0": Impairment(delay_s=0.05)}
    with over_hosts(tmp_path, ["prefill", "decode"], slow, prefill=PREFILL, decode=DECODE) as cluster:
        cluster.net.impair("prefill-0", Impairment(delay_s=0.3))  # so the handoff takes seconds
        before = cluster.net.received_bytes("decode-0")
        victim = cluster.workers()["prefill-0"]
        streams = Streams(cluster, [LONG])
        part = 3 * 98304
        wait_until(lambda: cluster.net.received_bytes("decode-0") > before + part, "three blocks have arrived")
        cluster.net.impair("prefill-0", Impairment(is_cut=True))
        cut_s = time.monotonic()
        arrived = cluster.net.received_bytes("decode-0") - before
        assert arrived < 24 * 98304, "the handoff was whole already"
        wait_until(lambda: cluster.workers()["prefill-0"].state == "lost", "its lease runs out")
        hold_until(cut_s + CUT_S)
        assert cluster.net.impair("prefill-0", Impairment()) > 0
        check(streams.answers(), [LONG], expected)
        returns(cluster, victim)
        serves_again(cluster, "prefill-0", expected)
        audit(cluster)


def test_a_host_behind_a_bad_line_serves(expected: Expected, tmp_path: Path) -> None:
    """Of its packets 5 % are lost, in both directions, and every one takes 50 ms."""
    bad = {"decode-0": Impairment(loss=0.05, delay_s=0.05)}
    cases = [(prompt, 24) for prompt, _ in CASES[:4]]
    with over_hosts(tmp_path, ["prefill", "decode"], bad, prefill=PREFILL, decode=DECODE) as cluster:
        joined = cluster.workers()["decode-0"].epoch  # each try to connect is a life, and a try may fail on such a line
        began_s = time.monotonic()
        check(Streams(cluster, cases).answers(), cases, expected)
        took_s = time.monotonic() - began_s
        assert cluster.net.impair("decode-0", bad["decode-0"]) > 0
        assert cluster.workers()["decode-0"].epoch == joined, f"it was lost within {took_s:.1f} s"
        audit(cluster)
