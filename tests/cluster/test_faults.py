"""Clusters whose workers go wrong on purpose, at one exact moment each: the answers are those of a run without faults
or a clear error, and afterwards no block is held anywhere.

The token that makes a cluster ready is the first push, notice and handoff, so faults begin with the second.
"""

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from loopline.client import Client
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS

TEXT = (MODELS / "train_tiny.py").read_bytes()
CASES = [(tuple(TEXT[53 * n : 53 * n + 25 + 16 * n]), 12) for n in range(4)]
"""(prompt, tokens to generate): of two to five chunks."""
RETURN_S = 60.0
GROUPS: dict[str, dict[str, object]] = {
    "prefill": {"num_blocks": 64, "chunk_tokens": 16},
    "decode": {"num_blocks": 64, "max_running": 8},
}
pytestmark = pytest.mark.timeout(240)


@contextlib.contextmanager
def faulty(folder: Path, *faults: dict[str, object], **groups: dict[str, object]) -> Iterator[Cluster]:
    """A cluster with these faults; `groups` are further sections."""
    sections = {name: {**GROUPS.get(name, {}), **groups.get(name, {})} for name in {**GROUPS, **groups}}
    path = write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **sections)
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**raw, "faults": list(faults)}), encoding="utf-8")
    with launched(path, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(ouro_engine: LocalEngine) -> list[tuple[int, ...]]:
    """What one engine without a cluster answers."""
    answers = []
    for prompt, count in CASES:
        params = SamplingParams(loops=ouro_engine.spec.default_loops, stop_ids=(), max_tokens=count)
        rows = ouro_engine.generate(Request(request_id="alone", prompt_ids=prompt, params=params))
        answers.append(tuple(row.token_id for row in rows if row.token_id is not None))
    return answers


def ask(cluster: Cluster, case: tuple[tuple[int, ...], int], deadline_s: float = RETURN_S) -> tuple[int, ...]:
    with Client(cluster.address) as client:
        answer = client.complete(case[0], deadline_s=deadline_s, max_tokens=case[1], ignore_eos=True)
    return answer.token_ids


def ask_all(cluster: Cluster) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(lambda case: ask(cluster, case), CASES))


def check_committed(folder: Path, worker: str, words: str) -> None:
    """The fault has really happened, by the worker's log."""
    log = (folder / "run" / f"{worker}.log").read_text(encoding="utf-8")
    assert "commits faults on purpose" in log
    assert f"fault: {words}" in log


def check_answers_with_quarantine(cluster: Cluster, expected: list[tuple[int, ...]]) -> None:
    """All are answered while blocks wait for a writer that may still write them."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, cluster)
        wait_until(lambda: cluster.workers()["decode-0"].blocks.quarantined, "blocks of a late push wait for it")
        assert answers.result(RETURN_S) == expected


def ready(cluster: Cluster, name: str, but_pid: int) -> bool:
    worker = cluster.workers().get(name)
    return worker is not None and worker.state == "ready" and worker.pid != but_pid


def test_small_faults_cost_no_token(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """All of them in one cluster, one after the other: what is lost comes in another way, what comes twice counts
    once."""
    faults: list[tuple[str, str, dict[str, object]]] = [
        ("decode-0", "repeat_notice of notice 2", {"at": 2, "times": 3}),
        ("decode-0", "reorder_notices of notice 6", {"at": 6, "times": 2}),
        ("decode-0", "repeat_message of Reserved 2", {"message": "Reserved", "at": 2, "times": 2}),
        ("decode-0", "repeat_message of Granted 2", {"message": "Granted", "at": 2, "times": 2}),
        ("decode-0", "repeat_message of StepTokens 3", {"message": "StepTokens", "at": 3, "times": 5}),
        ("prefill-0", "drop_message of Prefilled 2", {"message": "Prefilled", "at": 2, "times": 2}),
        ("prefill-0", "repeat_message of StartPrefill 3", {"message": "StartPrefill", "at": 3}),
        ("decode-0", "stop_polling of push or notice 9", {"at": 9, "seconds": 1.0}),
        ("prefill-0", "fail_push of push 12", {"at": 12}),
    ]
    entries = [{"worker": worker, "do": words.split()[0], **more} for worker, words, more in faults]
    with faulty(tmp_path, *entries) as cluster:
        assert ask_all(cluster) == expected
        for worker, words, _ in faults:
            check_committed(tmp_path, worker, words)
        cluster.wait_idle()
        assert ask_all(cluster) == expected


def test_a_push_past_its_deadline_costs_no_token_and_lands_in_quarantine(
    tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    fault: dict[str, object] = {"worker": "prefill-0", "do": "delay_push", "at": 3, "seconds": 4.0}
    with faulty(tmp_path, fault, transfer={"push_timeout_s": 0.5}) as cluster:
        check_answers_with_quarantine(cluster, expected)
        check_committed(tmp_path, "prefill-0", "delay_push of push 3")
        cluster.wait_idle()
        assert ask_all(cluster) == expected


def test_a_corrupted_push_costs_no_token_where_pushes_are_verified(
    tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    fault: dict[str, object] = {"worker": "prefill-0", "do": "corrupt_push", "at": 3}
    with faulty(tmp_path, fault, transfer={"verify": "digest"}) as cluster:
        assert ask_all(cluster) == expected
        check_committed(tmp_path, "prefill-0", "corrupt_push of push 3")
        cluster.wait_idle()
        assert cluster.workers()["decode-0"].ignored["corrupted"] == 1
        log = (tmp_path / "run" / "decode-0.log").read_text(encoding="utf-8")
        assert len(re.findall(r"request \S+, generation \d+: push \d+ \(blocks \d+ to \d+ of the request\)", log)) == 1
        assert ask_all(cluster) == expected


def test_what_nobody_says_again_costs_seconds_and_no_token(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """One fault a request. Stream and transport lose nothing in real life, so nothing is said twice: the loss is seen
    in a worker's books, or by the limit of a push, and the request starts again."""
    lost: list[tuple[str, dict[str, object]]] = [  # each request that starts again makes two of the earlier messages
        ("drop_message of Reserved 2", {"message": "Reserved", "at": 2}),
        ("drop_message of Granted 3", {"message": "Granted", "at": 3}),
        ("drop_message of StartPrefill 4", {"message": "StartPrefill", "at": 4, "worker": "prefill-0"}),
        ("drop_notice of notice 15", {"at": 15}),
        ("drop_message of Reserve 10", {"message": "Reserve", "at": 10}),
    ]
    entries = [{"worker": "decode-0", "do": words.split()[0], **more} for words, more in lost]
    limits: dict[str, dict[str, object]] = {"membership": {"reply_timeout_s": 1.5}, "transfer": {"push_timeout_s": 1.5}}
    with faulty(tmp_path, *entries, **limits) as cluster:
        for words, more in lost:
            assert ask(cluster, CASES[2], deadline_s=RETURN_S / 2) == expected[2]
            check_committed(tmp_path, str(more.get("worker", "decode-0")), words)
            cluster.wait_idle()
        assert ask_all(cluster) == expected


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        ("prefill-0", "pushing"),
        pytest.param("prefill-0", "committed", marks=pytest.mark.soak),
        pytest.param("decode-0", "bound", marks=pytest.mark.soak),
        ("decode-0", "active"),
    ],
)
def test_a_worker_that_dies_at_one_moment_costs_no_token(
    tmp_path: Path, expected: list[tuple[int, ...]], worker: str, state: str
) -> None:
    fault: dict[str, object] = {"worker": worker, "do": "kill", "at": state, "nth": 3}
    with faulty(tmp_path, fault) as cluster:
        pid = cluster.workers()[worker].pid
        assert ask_all(cluster) == expected
        check_committed(tmp_path, worker, f"kill at {state} 3")
        wait_until(lambda: ready(cluster, worker, pid), "it was started again", RETURN_S)
        cluster.wait_idle()
        assert ask_all(cluster) == expected  # the worker that was started again has no faults


@pytest.mark.parametrize("wakes_up", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["woken", "killed"])
def test_a_worker_that_stands_still_while_pushing_costs_no_token(
    tmp_path: Path, expected: list[tuple[int, ...]], wakes_up: bool
) -> None:
    """Its requests go to the other one. Woken up after that, it finishes what it had posted, into blocks that nobody
    else has got; left alone, it is killed."""
    fault: dict[str, object] = {"worker": "prefill-0", "do": "freeze", "at": "pushing", "nth": 3}
    with faulty(tmp_path, fault, prefill={"replicas": 2}) as cluster:
        process = psutil.Process(cluster.workers()["prefill-0"].pid)
        check_answers_with_quarantine(cluster, expected)
        check_committed(tmp_path, "prefill-0", "freeze at pushing 3")
        if wakes_up:
            with contextlib.suppress(psutil.NoSuchProcess):  # the launcher may have been quicker
                process.resume()
        else:
            process.wait(RETURN_S)
        names = ("prefill-0", "prefill-1", "decode-0")
        wait_until(lambda: all(ready(cluster, name, 0) for name in names), "all are back", RETURN_S)
        cluster.wait_idle()
        assert ask_all(cluster) == expected
