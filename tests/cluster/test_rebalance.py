"""Three workers and a load that turns from long prompts to long answers: one of them changes its role each time, and
every answer is what one engine answers."""

import logging
import os
import re
from pathlib import Path
from time import monotonic

import pytest

from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS
from tests.support.soak import Case
from tests.support.turning_load import TurningLoad

logger = logging.getLogger(__name__)
TEXT = (MODELS / "train_tiny.py").read_bytes()
LONG_PROMPT, SHORT_PROMPT, LONG_ANSWER = 420, 12, 96
NUM_CASES = 4
NUM_CLIENTS = 12
MOVED_S = 100.0
"""From a turn of the load to ready workers in their new roles, on a busy machine."""
PHASE_S = float(os.environ.get("LOOPLINE_PHASE_S", "90"))
"""Of the long run."""
GROUPS: dict[str, dict[str, object]] = {
    "prefill": {"replicas": 1, "num_blocks": 128, "max_running": 4},
    "decode": {"replicas": 2, "num_blocks": 128, "max_running": 4},
}


def cases(engine: LocalEngine, prompt_tokens: int, max_tokens: int) -> list[Case]:
    params = SamplingParams(loops=engine.spec.default_loops, stop_ids=(), max_tokens=max_tokens)
    prompts = [tuple(TEXT[331 * number :][:prompt_tokens]) for number in range(NUM_CASES)]
    requests = [
        Request(request_id=f"alone {number}", prompt_ids=prompt, params=params) for number, prompt in enumerate(prompts)
    ]
    rows = engine.generate_all(requests)
    expected = [tuple(row.token_id for row in rows[r.request_id] if row.token_id is not None) for r in requests]
    return [Case(prompt, max_tokens, 0.0, 0, tokens) for prompt, tokens in zip(prompts, expected, strict=True)]


@pytest.fixture(scope="module")
def long_prompts(ouro_engine: LocalEngine) -> list[Case]:
    return cases(ouro_engine, LONG_PROMPT, 2)


@pytest.fixture(scope="module")
def long_answers(ouro_engine: LocalEngine) -> list[Case]:
    return cases(ouro_engine, SHORT_PROMPT, LONG_ANSWER)


def ready(cluster: Cluster) -> list[str]:
    """All workers' names if all are ready, else none."""
    workers = cluster.workers()
    return sorted(workers) if all(worker.state == "ready" for worker in workers.values()) else []


def moves(folder: Path) -> list[str]:
    """What the coordinator says of workers that it moved."""
    text = (folder / "run" / "coordinator.log").read_text(encoding="utf-8")
    return re.findall(r"rebalance: (\w+) was the bottleneck [^;]*;[^;]*; from (.*)", text)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_worker_follows_the_load(long_prompts: list[Case], long_answers: list[Case], tmp_path: Path) -> None:
    launcher = {"rebalance": "auto", "rebalance_patience_s": 2.0}
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro", launcher=launcher, **GROUPS)
    with launched(config, tmp_path) as cluster:
        with TurningLoad(cluster, NUM_CLIENTS) as load:

            def arrived(names: list[str]) -> bool:
                load.check()
                return ready(cluster) == names

            def answered(count: int) -> bool:
                load.check()
                return load.requests >= count

            load.turn("long prompts", long_prompts)
            wait_until(lambda: arrived(["decode-0", "prefill-0", "prefill-1"]), "a prefill worker more", MOVED_S)
            before = load.requests
            wait_until(lambda: answered(before + 4), "it goes on", MOVED_S)
            assert len(moves(tmp_path)) == 1
            load.turn("long answers", long_answers)
            wait_until(lambda: arrived(["decode-0", "decode-1", "prefill-0"]), "a decode worker more", MOVED_S)
            before = load.requests
            wait_until(lambda: answered(before + 4), "it goes on", MOVED_S)
        load.check()
        cluster.wait_idle()
        assert cluster.client.status().launcher is not None
    found = moves(tmp_path)
    logger.info("%s", found)
    assert found == [
        ("prefill", "1 prefill and 2 decode workers to 2 and 1"),
        ("decode", "2 prefill and 1 decode workers to 1 and 2"),
    ]


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("rebalance", ["off", "auto"])
def test_what_it_brings(rebalance: str, long_prompts: list[Case], long_answers: list[Case], tmp_path: Path) -> None:
    """The same load with and without, to compare by hand: what came in each phase is in the log."""
    launcher = {"rebalance": rebalance, "rebalance_patience_s": 5.0}
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro", launcher=launcher, **GROUPS)
    with launched(config, tmp_path) as cluster:
        with TurningLoad(cluster, NUM_CLIENTS) as load:
            for name, kind in (("long prompts", long_prompts), ("long answers", long_answers)):
                load.turn(name, kind)
                began_s = load.phases[-1].began_s
                wait_until(lambda began_s=began_s: not _is_on(load, began_s), "the phase is over", 2 * PHASE_S)
        load.check()
        cluster.wait_idle()
    for phase in load.phases:
        logger.info("%s: %s", rebalance, phase)
    logger.info("load average %.1f %.1f %.1f; moves: %s", *os.getloadavg(), moves(tmp_path))
    assert len(moves(tmp_path)) == (0 if rebalance == "off" else len(load.phases))


def _is_on(load: TurningLoad, began_s: float) -> bool:
    load.check()
    return monotonic() - began_s < PHASE_S
