"""A prefill and a decode worker as two processes on GPUs, at the real shapes with random weights.

With one GPU both are on it; with two each has its own. What it measures is written to $LOOPLINE_FIGURES, a folder, if
that is set.
"""

import gc
import json
import os
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from loopline.bench.shapes import SHAPES, config_json
from loopline.client import Chunk, Client
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.cluster import Cluster, launched, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
READY_S = 180.0
PROMPT_TOKENS, NEW_TOKENS, ONE_BY_ONE, TOGETHER = 2048, 64, 6, 8
CHUNK_TOKENS, MAX_TOKEN_LOOPS, SEED = 512, 65536, 7
Timed = tuple[tuple[int, ...], float, float]
"""Token ids, seconds to the first of them, seconds for each later one."""


@pytest.mark.parametrize("shape", ["ouro-1.4b", "huginn-0125"])
def test_two_processes_answer_as_one_engine_does(shape: str, tmp_path: Path) -> None:
    """Same chunks, same batch of one, so the same bits whoever computes them and wherever the KV went between."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_json(SHAPES[shape])), encoding="utf-8")
    torch.manual_seed(11)
    prompts = [tuple(row) for row in torch.randint(64, 40_000, (ONE_BY_ONE, PROMPT_TOKENS)).tolist()]
    expected = _by_one_engine(tmp_path / "model", prompts)
    gpus = torch.cuda.device_count()
    config = write_config(
        tmp_path / "cluster.yaml",
        tmp_path / "model",
        model={"dtype": "bf16", "load_format": "dummy"},
        telemetry={"metrics_port": 0},
        prefill={
            "device": "cuda:0",
            "num_blocks": None,
            "memory_fraction": 0.3,
            "chunk_tokens": CHUNK_TOKENS,
            "max_token_loops": MAX_TOKEN_LOOPS,
            "max_running": 8,
        },
        decode={
            "device": f"cuda:{min(1, gpus - 1)}",
            "num_blocks": None,
            "memory_fraction": 0.6,
            "max_running": 8,
        },
        transfer={"in_flight_limit_bytes": 6 * 2**30, "peer_share": 1.0},
    )
    with launched(config, tmp_path, ready_s=READY_S) as cluster:
        found = [_timed(cluster.client, prompt) for prompt in prompts]
        pushed = _pushes(cluster)
        cluster.wait_idle()
        with ThreadPoolExecutor(TOGETHER) as threads:
            begin_s = time.monotonic()
            together = list(threads.map(lambda prompt: _timed(cluster.client, prompt), (prompts * 2)[:TOGETHER]))
            took_s = time.monotonic() - begin_s
        cluster.wait_idle()
        links = [link for worker in cluster.workers().values() for link in worker.links]
    figures = {
        "shape": shape,
        "gpus": gpus,
        "device": torch.cuda.get_device_name(0),
        "engine": _figures(expected),
        "cluster": _figures(found),
        "cluster_together": {**_figures(together), "tok_per_s": TOGETHER * NEW_TOKENS / took_s},
        "together_equal": sum(one[0] == expected[i % ONE_BY_ONE][0] for i, one in enumerate(together)),
        "push_gb_per_s": pushed["bytes"] / pushed["seconds"] / 1e9,
        "pushes_per_prompt": pushed["count"] / ONE_BY_ONE,
        "probe": [(link.transport, link.bytes_per_s / 1e9) for link in links],
    }
    print(json.dumps(figures))  # noqa: T201
    folder = os.environ.get("LOOPLINE_FIGURES")
    if folder:
        (Path(folder) / f"pair-{shape}-{gpus}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    assert [one[0] for one in found] == [one[0] for one in expected]


def _by_one_engine(model: Path, prompts: list[tuple[int, ...]]) -> list[Timed]:
    scheduler = SchedulerSettings(max_running=8, chunk_tokens=CHUNK_TOKENS, max_token_loops=MAX_TOKEN_LOOPS)
    settings = EngineSettings(
        model_path=str(model),
        device="cuda:0",
        dtype="bf16",
        load_format="dummy",
        num_blocks=(PROMPT_TOKENS + NEW_TOKENS) // 16 * 2,
        prefix_cache="off",
        scheduler=scheduler,
    )
    engine = LocalEngine(settings)
    answers = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=SEED, loops=engine.spec.default_loops)
        request = Request(request_id=str(index), prompt_ids=prompt, params=params)
        ids: list[int] = []
        begin_s, moments = time.monotonic(), []
        for row in engine.generate(request):
            assert row.token_id is not None
            ids.append(row.token_id)
            moments.append(time.monotonic())
        answers.append((tuple(ids), moments[0] - begin_s, (moments[-1] - moments[0]) / (len(ids) - 1)))
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return answers


def _timed(client: Client, prompt: tuple[int, ...]) -> Timed:
    begin_s, ids, moments = time.monotonic(), [], []
    for event in client.generate(prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, seed=SEED):
        if isinstance(event, Chunk) and event.tokens:
            ids += [token.id for token in event.tokens]
            moments.append(time.monotonic())
    return tuple(ids), moments[0] - begin_s, (moments[-1] - moments[0]) / (len(ids) - 1)


def _pushes(cluster: Cluster) -> dict[str, float]:
    """Count, bytes and seconds of the prefill worker's pushes so far, as it tells whoever scrapes it."""
    address = next(one.metrics_address for one in cluster.workers().values() if one.role == "prefill")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    named = {"count": "loopline_push_seconds_count", "seconds": "loopline_push_seconds_sum"}
    named["bytes"] = "loopline_pushed_bytes_total"
    return {
        key: sum(float(value) for name, _, value in lines if name.partition("{")[0] == metric)
        for key, metric in named.items()
    }


def _figures(answers: list[Timed]) -> dict[str, Any]:
    """Medians; the first answer, which warms up, is left out."""
    return {
        "ttft_ms": statistics.median(one[1] for one in answers[1:]) * 1000,
        "tpot_ms": statistics.median(one[2] for one in answers[1:]) * 1000,
    }
