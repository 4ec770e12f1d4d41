"""Whole prompts through loaded models against what the public modelling code computed (tests/data/golden)."""

import functools
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from loopline.model import LoopedModel, load_model
from loopline.model.dense import DenseAttention
from tests.kernels.paged_batch import PagedPrompts, Piece
from tests.support.golden import (
    BF16_ERROR_FACTOR,
    LOGIT_TOLERANCE,
    MODELS,
    TRAINED,
    GoldenCase,
    golden_sets,
    load_case,
    load_trained,
)

SETS = golden_sets()
FP32_SETS = [name for name in SETS if name.endswith("fp32")]
BF16_SETS = [name for name in SETS if name.endswith("bf16")]


@functools.cache
def model_of(name: str) -> LoopedModel:
    return load_model(load_case(name).path)


def state_of(case: GoldenCase, num_tokens: int) -> Tensor | None:
    return None if case.s0 is None else case.s0[:num_tokens]


def test_all_sets_are_here() -> None:
    assert len(SETS) == 7
    assert all(load_case(name).cases for name in SETS)


@pytest.mark.parametrize("name", FP32_SETS)
def test_float32_prompt_logits(name: str) -> None:
    for case in load_case(name).cases:
        got = model_of(name).prompt_logits(case.prompt, initial_state=state_of(case, len(case.prompt)))
        assert (got - case.logits).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FP32_SETS)
def test_float32_greedy_tokens(name: str) -> None:
    for case in load_case(name).cases:
        tokens = [*case.prompt, *case.greedy]
        logits = model_of(name).prompt_logits(tokens, initial_state=state_of(case, len(tokens)))
        chosen = logits.argmax(dim=-1)[len(case.prompt) - 1 : -1]
        assert tuple(chosen.tolist()) == case.greedy


@pytest.mark.parametrize("name", BF16_SETS)
def test_bf16_is_as_near_to_exact_as_the_reference(name: str) -> None:
    for case in load_case(name).cases:
        got = model_of(name).prompt_logits(case.prompt, initial_state=state_of(case, len(case.prompt)))
        error = (got - case.tensors["logits_fp32math"]).abs().max().item()
        assert error <= BF16_ERROR_FACTOR * case.record["err_bf16_vs_fp32math"]


@pytest.mark.parametrize("name", BF16_SETS)
def test_bf16_choices_are_near_the_top(name: str) -> None:
    for case in load_case(name).cases:
        tokens = [*case.prompt, *case.greedy]
        logits = model_of(name).prompt_logits(tokens, initial_state=state_of(case, len(tokens)))
        chosen = logits.argmax(dim=-1)[len(case.prompt) - 1 : -1]
        saved = case.tensors["greedy_logits_full"].float()
        behind = saved.amax(dim=-1) - saved.gather(1, chosen.unsqueeze(1)).squeeze(1)
        assert behind.max().item() <= BF16_ERROR_FACTOR * case.record["err_bf16_vs_fp32math"]


@pytest.mark.parametrize("name", [name for name in FP32_SETS if name.startswith("huginn")])
def test_fewer_loops(name: str) -> None:
    for case in load_case(name).cases:
        saved = {int(key.removeprefix("logits_steps")): key for key in case.tensors if key.startswith("logits_steps")}
        assert len(saved) == 2
        for loops, key in saved.items():
            state = state_of(case, len(case.prompt))
            got = model_of(name).prompt_logits(case.prompt, loops=loops, initial_state=state)
            assert (got - case.tensors[key]).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FP32_SETS)
def test_states_after_each_loop(name: str) -> None:
    model = model_of(name)
    key = "loop_states" if model.uses_initial_state else "loop_hidden"
    for case in load_case(name).cases:
        num_tokens = len(case.prompt)
        attention = DenseAttention.of(model, num_tokens)
        e = model.prelude(torch.tensor(case.prompt), attention)
        if model.uses_initial_state:
            assert (e - case.tensors["prelude_out"]).abs().max() < LOGIT_TOLERANCE
        state = model.first_state(e, state_of(case, num_tokens))
        for loop in range(model.spec.default_loops):
            state = model.core_step(loop, state, e, attention)
            assert (state - case.tensors[key][loop]).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["huginn_fp32", "ouro_fp32", "ouro_gqa_fp32"])
def test_the_paged_path_in_chunks_and_its_planes(name: str) -> None:
    model = model_of(name)
    for case in load_case(name).cases:
        num_tokens = len(case.prompt)
        paged = PagedPrompts(model, [case.prompt], loops=model.spec.default_loops)
        if case.s0 is not None:
            paged.noise = [case.s0[:num_tokens]]
        cuts = [*range(0, num_tokens, 7), num_tokens]
        logits = torch.cat([paged.run([Piece(0, start, end - start)])[0] for start, end in pairwise(cuts)])
        assert (logits - case.logits).abs().max() < LOGIT_TOLERANCE
        if "kv_keys" not in case.tensors:
            continue
        for saved, plane in enumerate(planes_as_saved(model, case)):
            for side, key in enumerate(("kv_keys", "kv_values")):
                rows = paged.arena[paged.tables[0], plane, side].flatten(0, 1)[:num_tokens]  # [S, C, d]
                assert (rows.transpose(0, 1) - case.tensors[key][saved]).abs().max() < LOGIT_TOLERANCE


def planes_as_saved(model: LoopedModel, case: GoldenCase) -> list[int]:
    """The arena's plane (prelude, coda, then loop by loop) of each plane that the case saved."""
    if not model.uses_initial_state:
        return list(range(len(case.tensors["kv_keys"])))
    num_prelude, num_coda = model.spec.num_prelude, model.spec.num_coda
    return [
        num_prelude - 1 - public if public < 0 else public if public < num_prelude else public + num_coda
        for public in case.tensors["kv_planes"].tolist()
    ]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_checkpoints(name: str) -> None:
    model = load_model(MODELS / name, dtype="fp32")
    for case in load_trained(name):
        logits = model.prompt_logits([*case.prompt, *case.greedy], loops=case.loops)
        last = len(case.prompt) - 1
        assert tuple(logits.argmax(dim=-1)[last:-1].tolist()) == case.greedy
        for token_id, logit in case.last_logits_top5:
            assert logits[last, token_id].item() == pytest.approx(logit, abs=LOGIT_TOLERANCE)
        assert logits[last].sum().item() == pytest.approx(case.last_logits_sum, abs=0.05)
