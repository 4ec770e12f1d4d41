"""Requests that end every worker that computes them: such a request is given up after its attempts, and those that ran
beside it are answered as if it had not been there."""

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from loopline.client import Chunk, Client
from loopline.engine.local import LocalEngine
from loopline.errors import WorkerLost
from tests.support.cluster import Cluster, wait_until
from tests.support.faulty import RETURN_S, Case, Fault, answers_alone, ask, faulty, is_ready
from tests.support.golden import MODELS, SMALL

TEXT = (MODELS / "train_tiny.py").read_bytes()
CRASHES = 7
"""The token id, a byte, that no other prompt has."""
MOST_TOKENS = 40
CRASHING = (*TEXT[100:140], CRASHES)
CASES: list[Case] = [(tuple(TEXT[61 * n : 61 * n + 30 + 9 * n]), 24) for n in range(12)]
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
GROUPS: dict[str, dict[str, object]] = {"prefill": {"replicas": 2, "max_running": 8}, "decode": {"replicas": 2}}
MOST_ENDS = 3
"""Attempts without progress, after which a request is given up."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(small_engine: LocalEngine) -> list[tuple[int, ...]]:
    assert not any(CRASHES in prompt for prompt, _ in CASES)
    return answers_alone(small_engine, CASES)


@pytest.mark.parametrize(
    ("workers", "role"), [(("*",), "prefill"), (("decode-0", "decode-1"), "decode")], ids=["whoever", "decode"]
)
def test_a_request_that_ends_its_workers_is_given_up_alone(
    tmp_path: Path, expected: list[tuple[int, ...]], workers: tuple[str, ...], role: str
) -> None:
    """It comes first, and the others share its workers from the beginning."""
    faults: list[Fault] = [{"worker": name, "do": "kill", "prompt_token": CRASHES} for name in workers]
    with faulty(tmp_path, *faults, checkpoint=SMALL, **GROUPS) as cluster, ThreadPoolExecutor(1 + len(CASES)) as pool:
        wait_whole(cluster)
        before = {name: worker.pid for name, worker in cluster.workers().items()}
        crashing = pool.submit(delivered_and_error, cluster)
        others: list[Future[tuple[int, ...]]] = [pool.submit(ask, cluster, case) for case in CASES]
        delivered, error = crashing.result(2 * RETURN_S)
        assert f"given up after {MOST_ENDS} attempts that brought no token of a decode worker" in error, error
        assert f"; {delivered} tokens were delivered" in error, error
        assert [each.result(2 * RETURN_S) for each in others] == expected
        wait_whole(cluster)
        assert ask(cluster, CASES[0]) == expected[0]
        cluster.wait_idle()
        after = {name: worker.pid for name, worker in cluster.workers().items()}
        changed = {name for name in before if before[name] != after[name]}
        assert changed and all(name.startswith(role) for name in changed)
        assert num_ends(tmp_path, role) == MOST_ENDS


def delivered_and_error(cluster: Cluster) -> tuple[int, str]:
    """How many tokens of the crashing request came, and what its end says."""
    delivered = 0
    with Client(cluster.address) as client, pytest.raises(WorkerLost) as caught:
        for event in client.generate(CRASHING, max_tokens=MOST_TOKENS, ignore_eos=True):
            delivered += len(event.tokens) if isinstance(event, Chunk) else 0
    return delivered, str(caught.value)


def num_ends(folder: Path, role: str) -> int:
    """How often workers of the role have ended themselves."""
    logs = [path.read_text(encoding="utf-8") for path in (folder / "run").glob(f"{role}-*.log")]
    return sum(len(re.findall(f"fault: kill with prompt token {CRASHES}\n", log)) for log in logs)


def wait_whole(cluster: Cluster) -> None:
    wait_until(
        lambda: (
            all(is_ready(cluster, name) for name in NAMES)
            and all(psutil.pid_exists(worker.pid) for worker in cluster.workers().values())
        ),
        "four ready workers",
        RETURN_S,
    )
