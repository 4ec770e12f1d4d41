"""The exit gate's probabilities against the reference data, at prompt and at decode positions, and the same from one
process, from a worker pair and from a request that goes on elsewhere."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from decode_worker.policy import DecodePolicy
from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings, SchedulerSettings
from prefill_worker.policy import PrefillPolicy
from tests.property.test_worker_pair import Script
from tests.support.golden import GOLDEN, LOGIT_TOLERANCE, GoldenCase, golden_sets, load_case
from tests.support.pair import BLOCK_SIZE, Pair
from tests.unit.worker.clocks import OwnClock

OURO_SETS = [name for name in golden_sets() if name.startswith("ouro") and name.endswith("fp32")]
WAYS = [("cpu", "packed"), *(pytest.param("cuda", way, marks=pytest.mark.gpu) for way in ("packed", "per_row"))]
FORCED = 1e4  # a bias that no logit overcomes
SETTINGS = EngineSettings(
    model_path=str(GOLDEN / "ouro_fp32"),
    block_size=BLOCK_SIZE,
    num_blocks=96,
    prefix_cache="off",
    exit_gate=True,
    scheduler=SchedulerSettings(max_running=8, chunk_tokens=8),
)
COUNTER = itertools.count()


def request(name: str, prompt: Sequence[int], max_tokens: int, **more: object) -> Request:
    params = replace(SamplingParams(max_tokens=max_tokens, loops=4, exit_probabilities=True), **more)
    return Request(request_id=name, prompt_ids=tuple(prompt), params=params)


def requests_of(index: int, case: GoldenCase) -> dict[str, Request]:
    """A request for every position of the prompt, as a prompt's last one and as one that is decoded."""
    asked = {}
    for position, token in enumerate(case.prompt):
        name = f"{index}.{position}"
        asked[f"{name}.prompt"] = request(f"{name}.prompt", case.prompt[: position + 1], 1)
        if position:
            start, bias = case.prompt[:position], {token: FORCED}
            asked[f"{name}.decode"] = request(f"{name}.decode", start, 2, logit_bias=bias)
    return asked


@pytest.mark.parametrize(("device", "prefill"), WAYS)
@pytest.mark.parametrize("name", OURO_SETS)
def test_the_references_distribution_at_every_position(name: str, device: str, prefill: str) -> None:
    golden = load_case(name)
    scheduler = SchedulerSettings(chunk_tokens=8, steps_ahead=1 if device == "cuda" else 0)
    settings = replace(
        SETTINGS, model_path=str(golden.path), device=device, prefill=prefill, scheduler=scheduler, num_blocks=128
    )
    engine = LocalEngine(settings)
    for index, case in enumerate(golden.cases):
        asked = requests_of(index, case)
        rows = engine.generate_all(list(asked.values()))
        saved = case.tensors["exit_pdf"].T  # [S, T]
        for position, expected in enumerate(saved):
            for way in ("prompt", "decode")[: 1 + (position > 0)]:
                found = rows[f"{index}.{position}.{way}"]
                assert way == "prompt" or found[0].token_id == case.prompt[position]
                assert (torch.tensor(found[-1].exit_probabilities) - expected).abs().max() < LOGIT_TOLERANCE
                assert sum(found[-1].exit_probabilities) == pytest.approx(1, abs=1e-12)
    engine.close()


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return Engine(SETTINGS, PrefillPolicy()), Engine(SETTINGS, DecodePolicy())


def test_a_pair_of_workers_reports_what_one_process_reports(engines: tuple[Engine, Engine]) -> None:
    prompts = [tuple((7 * i + start) % 250 for i in range(length)) for start, length in ((1, 5), (2, 17), (3, 11))]
    asked = [request(f"r{next(COUNTER)}", prompt, 6) for prompt in prompts]
    asked.append(request(f"r{next(COUNTER)}", prompts[0], 6, exit_probabilities=False))
    asked.append(request(f"r{next(COUNTER)}", prompts[1], 6, loops=3, logprobs=1, temperature=1.0))
    pair = Pair(*engines, name="exit-pair", clock=OwnClock())
    script = Script(pair)
    for one in asked:
        script.send(one)
    script.settle()
    assert not script.failed
    pair.audit()
    pair.close()
    alone = LocalEngine(replace(SETTINGS, scheduler=SchedulerSettings()))
    expected = alone.generate_all(asked)
    for one in asked:
        rows = [script.tokens[one.request_id][row.position] for row in expected[one.request_id]]
        assert rows == expected[one.request_id]
        depth = one.params.loops if one.params.exit_probabilities else 0
        assert {len(row.exit_probabilities) for row in rows} == {depth}
    alone.close()


def test_a_request_that_goes_on_elsewhere_reports_the_same() -> None:
    engine = LocalEngine(SETTINGS)
    whole = list(engine.generate(request("whole", (5, 6, 7), 8)))
    for known in range(1, 8):
        ids = tuple(row.token_id for row in whole[:known] if row.token_id is not None)
        again = replace(request("again", (5, 6, 7), 8), generated_ids=ids)
        rows = list(engine.generate(again))
        assert [row.exit_probabilities for row in rows] == [row.exit_probabilities for row in whole[known:]]
    engine.close()
