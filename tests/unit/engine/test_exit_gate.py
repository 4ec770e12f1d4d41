"""The exit gate's probabilities: the arithmetic, what a row asks for, and what models and settings allow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopline.engine.exit_gate import asked_exit_logits, exit_probabilities
from loopline.engine.local import LocalEngine
from loopline.errors import ConfigError, InvalidRequest
from loopline.model.layers import ExitGate
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings
from tests.support.golden import MODELS

ASKS, PLAIN = SamplingParams(exit_probabilities=True), SamplingParams()


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40))
def test_they_are_a_distribution_over_the_loops(logits: list[float]) -> None:
    found = exit_probabilities(logits)
    assert len(found) == len(logits)
    assert all(0 <= one <= 1 for one in found)
    assert math.isclose(sum(found), 1, abs_tol=1e-12)


def test_each_loop_is_reached_only_where_the_earlier_ones_went_on() -> None:
    assert exit_probabilities([0.0, 0.0, 0.0, 9.0]) == (0.5, 0.25, 0.125, 0.125)  # the last gate is not asked
    assert exit_probabilities([1000.0, 0.0]) == (1.0, 0.0)
    assert exit_probabilities([-1000.0, 0.0]) == (0.0, 1.0)
    assert exit_probabilities([3.0]) == (1.0,)


def test_rows_that_ask_are_found_in_every_part_of_a_step() -> None:
    params = (PLAIN, ASKS, PLAIN, ASKS, PLAIN)
    shallow, deep = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(2, 4)
    found = asked_exit_logits(params, [(3, shallow), (2, deep)], torch.from_numpy)
    assert [one.rows for one in found] == [(1,), (3,)]
    assert torch.equal(found[0].logits, shallow[1:2])
    assert torch.equal(found[1].logits, deep[:1])
    assert asked_exit_logits((PLAIN, PLAIN), [(2, deep)], torch.from_numpy) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_gate_depends_on_no_other_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn((264, 2048), generator=generator).to(dtype)
    gate = ExitGate(torch.randn(2048, generator=generator), torch.tensor([0.5]))
    whole = gate.logits(states)
    for start, count in ((0, 8), (8, 16), (256, 8)):
        assert torch.equal(gate.logits(states[start : start + count].clone()), whole[start : start + count])


def engine_settings(name: str, *, exit_gate: bool) -> EngineSettings:
    return EngineSettings(model_path=str(MODELS / name), num_blocks=8, exit_gate=exit_gate)


def test_a_model_without_a_gate_is_refused_where_the_gate_is_on() -> None:
    with pytest.raises(ConfigError, match=r"model\.exit_gate is on.*huginn"):
        LocalEngine(engine_settings("tiny-huginn", exit_gate=True))


def test_an_engine_that_does_not_evaluate_the_gate_refuses_who_asks() -> None:
    engine = LocalEngine(engine_settings("tiny-ouro", exit_gate=False))
    with pytest.raises(InvalidRequest, match=r"exit_probabilities.*model\.exit_gate is off"):
        next(
            engine.generate(
                Request(request_id="r", prompt_ids=(1, 2), params=SamplingParams(max_tokens=4, exit_probabilities=True))
            )
        )


def test_rows_that_do_not_ask_get_nothing_and_the_same_tokens() -> None:
    engine = LocalEngine(engine_settings("tiny-ouro", exit_gate=True))
    prompts = np.random.default_rng(3).integers(0, 200, (4, 9)).tolist()
    requests = [
        Request(
            request_id=str(index),
            prompt_ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=5, loops=4 - index % 3, exit_probabilities=index % 2 == 0, logprobs=1 if index > 1 else None
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    rows = engine.generate_all(requests)
    for request in requests:
        asks, depth = request.params.exit_probabilities, request.params.loops
        for row in rows[request.request_id]:
            assert len(row.exit_probabilities) == (depth if asks else 0)
            assert (row.logprobs is not None) == (request.params.logprobs is not None)
    plain = LocalEngine(engine_settings("tiny-ouro", exit_gate=False))
    for request in requests:
        params = SamplingParams(max_tokens=5, loops=request.params.loops)
        again = plain.generate(Request(request_id="r", prompt_ids=request.prompt_ids, params=params))
        assert [row.token_id for row in again] == [row.token_id for row in rows[request.request_id]]
