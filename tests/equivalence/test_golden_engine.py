"""The reference data through the engine: paged KV, chunked prefill, all cases of a set in one batch."""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loopline.engine.local import LocalEngine
from loopline.messages import TokenRow
from loopline.request import InitialState, Request, SamplingParams
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.golden import (
    BF16_ERROR_FACTOR,
    LOGIT_TOLERANCE,
    MODELS,
    TRAINED,
    GoldenCase,
    GoldenSet,
    golden_sets,
    load_case,
    load_trained,
)

SCHEDULER = SchedulerSettings(chunk_tokens=8, max_token_loops=128)
WIDE = SchedulerSettings(chunk_tokens=64)
NEW_TOKENS = 32
FED = range(0, NEW_TOKENS, 1 if os.environ.get("LOOPLINE_SOAK") == "1" else 4)  # continuations that are fed in bf16


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = [("cpu", "packed"), *(pytest.param("cuda", way, marks=pytest.mark.gpu) for way in ("packed", "per_row"))]


def scheduler_for(settings: SchedulerSettings, device: str) -> SchedulerSettings:
    """As a worker on that device would run it."""
    return replace(settings, steps_ahead=1 if device == "cuda" else 0)


class GivenStates:
    """The saved initial states: a request's seed is its case's number, row p of its table belongs to position p."""

    def __init__(self, cases: Sequence[GoldenCase]) -> None:
        self._tables = [case.s0 for case in cases]

    def __call__(self, seeds: Tensor, positions: Tensor, zeros: Tensor, like: Tensor) -> Tensor:
        states = torch.zeros_like(like)
        for row, (seed, position, is_padding) in enumerate(zip(seeds, positions, zeros, strict=True)):
            table = self._tables[int(seed)]
            if table is not None and not is_padding:
                states[row] = table[int(position)]
        return states


def engine_for(golden: GoldenSet, device: str, prefill: str = "packed") -> LocalEngine:
    settings = EngineSettings(
        model_path=str(golden.path),
        device=device,
        block_size=4,
        num_blocks=128,
        prefill=prefill,
        scheduler=scheduler_for(SCHEDULER, device),
    )
    return LocalEngine(settings, GivenStates(golden.cases))


def request(case: int, prompt: Sequence[int], max_tokens: int, loops: int, known: Sequence[int] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, loops=loops, seed=case, logprobs=0)
    name = f"case{case}.{len(known)}"
    return Request(request_id=name, prompt_ids=tuple(prompt), generated_ids=tuple(known), params=params)


def chosen_logprobs(rows: Sequence[TokenRow]) -> Tensor:
    return torch.tensor([row.logprobs.chosen for row in rows if row.logprobs is not None])


def saved_logprobs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


@pytest.mark.parametrize(("device", "prefill"), WAYS)
@pytest.mark.parametrize("name", [name for name in golden_sets() if name.endswith("fp32")])
def test_fp32_tokens_and_logprobs(name: str, device: str, prefill: str) -> None:
    golden = load_case(name)
    engine = engine_for(golden, device, prefill)
    loops = engine.spec.default_loops
    requests = [request(i, case.prompt, NEW_TOKENS, loops) for i, case in enumerate(golden.cases)]
    answers = engine.generate_all(requests)
    for one, case in zip(requests, golden.cases, strict=True):
        rows = answers[one.request_id]
        assert [row.token_id for row in rows] == list(case.greedy)
        saved = saved_logprobs(case.tensors["greedy_logits_full"], case.greedy)
        assert (chosen_logprobs(rows) - saved).abs().max() < LOGIT_TOLERANCE
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in golden_sets() if name.startswith("huginn") and "fp32" in name])
def test_fewer_loops(name: str, device: str) -> None:
    golden = load_case(name)
    engine = engine_for(golden, device)
    for loops in (1, engine.spec.default_loops // 2):
        for i, case in enumerate(golden.cases):
            (row,) = engine.generate(request(i, case.prompt, 1, loops))
            logits = case.tensors[f"logits_steps{loops}"][-1:]
            assert row.token_id == int(logits.argmax())
            assert row.depth == loops
            saved = saved_logprobs(logits, [int(logits.argmax())])
            assert (chosen_logprobs([row]) - saved).abs().max() < LOGIT_TOLERANCE
    engine.close()


@pytest.mark.parametrize(("device", "prefill"), WAYS)
@pytest.mark.parametrize("name", [name for name in golden_sets() if name.endswith("bf16")])
def test_bf16_choices_are_within_the_references_own_error(name: str, device: str, prefill: str) -> None:
    """Each saved continuation is fed; the token chosen next must be as good as the saved one, within rounding."""
    golden = load_case(name)
    engine = engine_for(golden, device, prefill)
    loops = engine.spec.default_loops
    for i, case in enumerate(golden.cases):
        saved = case.tensors["greedy_logits_full"].float()
        error = BF16_ERROR_FACTOR * float(case.record["err_bf16_vs_fp32math"])
        requests = [request(i, case.prompt, n + 1, loops, case.greedy[:n]) for n in FED]
        answers = engine.generate_all(requests)
        for n, one in zip(FED, requests, strict=True):
            (row,) = answers[one.request_id]
            assert row.token_id is not None
            assert saved[n].max() - saved[n][row.token_id] <= error
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_continuations(name: str, device: str) -> None:
    cases = load_trained(name)
    scheduler = scheduler_for(WIDE, device)
    settings = EngineSettings(
        model_path=str(MODELS / name), device=device, dtype="fp32", block_size=16, num_blocks=64, scheduler=scheduler
    )
    engine = LocalEngine(settings)
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=case.prompt,
            params=SamplingParams(max_tokens=len(case.greedy), loops=case.loops, initial_state=InitialState.ZEROS),
        )
        for i, case in enumerate(cases)
    ]
    answers = engine.generate_all(requests)
    for one, case in zip(requests, cases, strict=True):
        assert tuple(row.token_id for row in answers[one.request_id]) == case.greedy
    engine.close()
