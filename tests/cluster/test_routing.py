"""Routing policies over real workers: prefixes that they report, and links that fail."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from loopline.client import Completion
from tests.support.cluster import launched, wait_until, write_config
from tests.support.golden import MODELS

TEXT = (MODELS / "train_tiny.py").read_bytes()
FIRST, SECOND = tuple(TEXT[:200]), tuple(TEXT[300:500])


def prefilled_by(answer: Completion) -> str:
    assert answer.finished is not None
    return answer.finished.route.prefill


def test_a_prompt_goes_where_its_beginning_is_cached(tmp_path: Path) -> None:
    """The least work, and then the name, would choose prefill-0 in an idle cluster."""
    config = write_config(
        tmp_path / "cluster.yaml",
        MODELS / "tiny-ouro",
        kv={"prefix_cache": "auto"},
        prefill={"replicas": 2},
        routing={"policy": "prefix_aware"},
    )
    with launched(config, tmp_path) as cluster, ThreadPoolExecutor(2) as threads:
        both = [threads.submit(cluster.client.complete, prompt, max_tokens=4) for prompt in (FIRST, SECOND)]
        routes = {prefilled_by(one.result()): prompt for one, prompt in zip(both, (FIRST, SECOND), strict=True)}
        assert routes.keys() == {"prefill-0", "prefill-1"}
        # A heartbeat with cached blocks comes behind the report of what they are.
        wait_until(lambda: cluster.workers()["prefill-1"].blocks.cached, "prefill-1 has cached blocks")
        cluster.wait_idle()
        for _ in range(2):
            answer = cluster.client.complete((*routes["prefill-1"], 7, 8, 9), max_tokens=4)
            assert prefilled_by(answer) == "prefill-1"
            assert answer.finished is not None and answer.finished.usage.cached_tokens == 192
        cluster.wait_idle()


@pytest.mark.parametrize("policy", ["power_of_two", "session_affinity"])
def test_a_fault_of_a_link_costs_an_attempt_and_no_worker(policy: str, tmp_path: Path) -> None:
    """A push that cannot be posted: the request starts again, and everybody stays."""
    config = write_config(
        tmp_path / "cluster.yaml",
        MODELS / "tiny-ouro",
        prefill={"replicas": 2},
        routing={"policy": policy},
    )
    fault = {"worker": "prefill-0", "do": "fail_push", "at": 2}  # the first one is the probe's
    config.write_text(f"{config.read_text(encoding='utf-8')}{yaml.safe_dump({'faults': [fault]})}", encoding="utf-8")
    with launched(config, tmp_path) as cluster:
        answers = [cluster.client.complete(FIRST, max_tokens=4, session="one") for _ in range(4)]
        assert len({answer.token_ids for answer in answers}) == 1
        assert {worker.state for worker in cluster.workers().values()} == {"ready"}
        log = (cluster.run_dir / "coordinator.log").read_text(encoding="utf-8")
        assert "is avoided for 1 s" in log
        cluster.wait_idle()
