"""Routing policies over real workers: prefixes that they report, and links that fail."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import yaml

from loopline.client import Completion
from tests.support.cluster import launched, wait_until, write_config
from tests.support.golden import MODELS, SMALL

TEXT = (MODELS / "train_tiny.py").read_bytes()
PROMPTS = tuple(TEXT[:200]), tuple(TEXT[300:500])
HELD_S = 60.0


def prefilled_by(answer: Completion) -> str:
    assert answer.finished is not None
    return answer.finished.route.prefill


def test_a_prompt_goes_where_its_beginning_is_cached(tmp_path: Path) -> None:
    """The least work, and then the name, would choose prefill-0 in an idle cluster. It stands still while the first two
    prompts come, so that one of them stays with it and the other one goes past it."""
    config = write_config(
        tmp_path / "cluster.yaml",
        SMALL,
        kv={"prefix_cache": "auto"},
        prefill={"replicas": 2},
        routing={"policy": "prefix_aware"},
        membership={"lease_s": HELD_S, "reply_timeout_s": HELD_S},
    )
    with launched(config, tmp_path) as cluster, ThreadPoolExecutor(2) as threads:
        cluster.wait_idle()
        with cluster.stopped("prefill-0"):
            prompts = {threads.submit(cluster.client.complete, prompt, max_tokens=4): prompt for prompt in PROMPTS}
            (past,) = wait(prompts, HELD_S, FIRST_COMPLETED).done
        assert [prefilled_by(one.result()) for one in (past, *(prompts.keys() - {past}))] == ["prefill-1", "prefill-0"]
        # A heartbeat with cached blocks comes behind the report of what they are.
        wait_until(lambda: cluster.workers()["prefill-1"].blocks.cached, "prefill-1 has cached blocks")
        cluster.wait_idle()
        for _ in range(2):
            answer = cluster.client.complete((*prompts[past], 7, 8, 9), max_tokens=4)
            assert prefilled_by(answer) == "prefill-1"
            assert answer.finished is not None and answer.finished.usage.cached_tokens == 192
        cluster.wait_idle()


@pytest.mark.parametrize("policy", ["power_of_two", "session_affinity"])
def test_a_fault_of_a_link_costs_an_attempt_and_no_worker(policy: str, tmp_path: Path) -> None:
    """A push that cannot be posted: the request starts again, and everybody stays. In an idle cluster requests go to
    prefill-0 by its name, a session's from the first one on, so the second at the latest brings its second push."""
    config = write_config(
        tmp_path / "cluster.yaml",
        SMALL,
        prefill={"replicas": 2},
        routing={"policy": policy},
    )
    fault = {"worker": "prefill-0", "do": "fail_push", "at": 2}  # the probe's may be the first
    config.write_text(f"{config.read_text(encoding='utf-8')}{yaml.safe_dump({'faults': [fault]})}", encoding="utf-8")
    with launched(config, tmp_path) as cluster:
        cluster.wait_idle()
        answers = [cluster.client.complete(PROMPTS[0], max_tokens=4, session="one") for _ in range(4)]
        assert len({answer.token_ids for answer in answers}) == 1
        assert {worker.state for worker in cluster.workers().values()} == {"ready"}
        log = (cluster.run_dir / "coordinator.log").read_text(encoding="utf-8")
        assert "is avoided for 1 s" in log
        cluster.wait_idle()
