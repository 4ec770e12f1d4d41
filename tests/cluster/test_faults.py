"""Clusters whose workers go wrong on purpose, at one exact moment each: the answers are those of a run without faults
or a clear error, and afterwards no block is held anywhere.

The token that makes a cluster ready is the first push, notice and handoff, so faults begin with the second.
`test_handoff_states.py` has the workers that die or stop.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loopline.engine.local import LocalEngine
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import RETURN_S, Case, Fault, answers_alone, ask, faulty, has_committed
from tests.support.golden import MODELS, SMALL

TEXT = (MODELS / "train_tiny.py").read_bytes()
CASES: list[Case] = [(tuple(TEXT[53 * n : 53 * n + 25 + 16 * n]), 12) for n in range(4)]
"""Of two to five chunks."""
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def expected(small_engine: LocalEngine) -> list[tuple[int, ...]]:
    return answers_alone(small_engine, CASES)


def ask_all(cluster: Cluster) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(CASES)) as pool:
        return list(pool.map(lambda case: ask(cluster, case), CASES))


def check_committed(folder: Path, worker: str, words: str) -> None:
    """What a worker did need not be in its log before others have acted on it."""
    wait_until(lambda: has_committed(folder, worker, words), f"{worker} has committed {words}")


def check_answers_with_quarantine(cluster: Cluster, expected: list[tuple[int, ...]]) -> None:
    """All are answered while blocks wait for a writer that may still write them."""
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, cluster)
        wait_until(lambda: cluster.workers()["decode-0"].blocks.quarantined, "blocks of a late push wait for it")
        assert answers.result(RETURN_S) == expected


def test_small_faults_cost_no_token(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """All of them in one cluster, one after the other: what is lost comes in another way, what comes twice counts
    once."""
    faults: list[tuple[str, str, Fault]] = [
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
    with faulty(tmp_path, *entries, checkpoint=SMALL) as cluster:
        assert ask_all(cluster) == expected
        for worker, words, _ in faults:
            check_committed(tmp_path, worker, words)
        cluster.wait_idle()
        assert ask_all(cluster) == expected


def test_a_push_past_its_deadline_costs_no_token_and_lands_in_quarantine(
    tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    fault: Fault = {"worker": "prefill-0", "do": "delay_push", "at": 3, "seconds": 6.0}
    with faulty(tmp_path, fault, checkpoint=SMALL, transfer={"push_timeout_s": 0.5}) as cluster:
        check_answers_with_quarantine(cluster, expected)
        check_committed(tmp_path, "prefill-0", "delay_push of push 3")
        cluster.wait_idle()
        assert ask_all(cluster) == expected


def test_a_corrupted_push_costs_no_token_where_pushes_are_verified(
    tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    fault: Fault = {"worker": "prefill-0", "do": "corrupt_push", "at": 3}
    with faulty(tmp_path, fault, checkpoint=SMALL, transfer={"verify": "digest"}) as cluster:
        assert ask_all(cluster) == expected
        check_committed(tmp_path, "prefill-0", "corrupt_push of push 3")
        cluster.wait_idle()
        assert cluster.workers()["decode-0"].ignored["corrupted"] == 1
        log = (tmp_path / "run" / "decode-0.log").read_text(encoding="utf-8")
        assert len(re.findall(r"push \d+ \(blocks \d+ to \d+ of the request\) .* \[request \S+\]", log)) == 1
        assert ask_all(cluster) == expected


def test_what_nobody_says_again_costs_seconds_and_no_token(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """One fault a request. Stream and transport lose nothing in real life, so nothing is said twice: the loss is seen
    in a worker's books, or by the limit of a push, and the request starts again."""
    lost: list[tuple[str, Fault]] = [  # each request that starts again makes two of the earlier messages
        ("drop_message of Reserved 2", {"message": "Reserved", "at": 2}),
        ("drop_message of Granted 3", {"message": "Granted", "at": 3}),
        ("drop_message of StartPrefill 4", {"message": "StartPrefill", "at": 4, "worker": "prefill-0"}),
        ("drop_notice of notice 15", {"at": 15}),
        ("drop_message of Reserve 10", {"message": "Reserve", "at": 10}),
    ]
    entries = [{"worker": "decode-0", "do": words.split()[0], **more} for words, more in lost]
    limits: dict[str, dict[str, object]] = {"membership": {"reply_timeout_s": 1.5}, "transfer": {"push_timeout_s": 1.5}}
    with faulty(tmp_path, *entries, checkpoint=SMALL, **limits) as cluster:
        for words, more in lost:
            assert ask(cluster, CASES[2], deadline_s=RETURN_S / 2) == expected[2]
            check_committed(tmp_path, str(more.get("worker", "decode-0")), words)
            cluster.wait_idle()
        assert ask_all(cluster) == expected
