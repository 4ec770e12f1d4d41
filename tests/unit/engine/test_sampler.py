"""The sampler against plain formulas, row by row, and against itself in other batches."""

import math
from typing import Any

import pytest
import torch

from loopline.engine.sampler import Sampler
from loopline.kv.ledger import Ledger
from loopline.request import SamplingParams
from loopline.sched.plan import NOT_FINITE, RowRun, Sampling, Segment, StepPlan, TokenHistory

VOCAB = 40
GENERATOR = torch.Generator().manual_seed(5)
LOGITS = torch.randn(16, VOCAB, generator=GENERATOR) * 3
LEDGER = Ledger(4, 4)


def plan_of(
    params: list[SamplingParams], positions: list[int], histories: list[TokenHistory] | None = None
) -> StepPlan:
    allocation = LEDGER.reserve(1, 1)
    assert allocation is not None
    LEDGER.release(allocation)
    runs = []
    for row, (one, position) in enumerate(zip(params, positions, strict=True)):
        history = histories[row] if histories else TokenHistory()
        sampling = Sampling(position, len(history.generated_ids), history)
        runs.append(RowRun(f"r{row}", allocation, one, position - 1, (0,), sampling))
    return StepPlan(1, (Segment(0, 4, tuple(runs)),))


def sample(logits: torch.Tensor, *params: SamplingParams, **options: Any) -> list[int]:
    positions = options.pop("positions", list(range(7, 7 + len(params))))
    plan = plan_of(list(params), positions, options.pop("histories", None))
    return list(Sampler(VOCAB, "cpu").sample(logits, plan).token_ids)


def test_greedy_takes_the_first_of_the_highest() -> None:
    tied = LOGITS[:3].clone()
    tied[:, 11] = tied[:, 29] = 50.0
    assert sample(tied, *[SamplingParams()] * 3) == [11, 11, 11]
    for tiny in (1e-50, 5e-324, 1e-9):
        assert sample(tied[:1], SamplingParams(temperature=tiny)) == [11]


def test_a_row_does_not_depend_on_its_batch() -> None:
    params = [
        SamplingParams(
            temperature=0.5 + n / 8, top_k=n % 5 * 4, top_p=1 - n % 3 * 0.2, min_p=n % 2 * 0.05, seed=2**63 + n
        )
        for n in range(15)
    ] + [SamplingParams()]
    together = sample(LOGITS, *params)
    for row, one in enumerate(params):
        assert sample(LOGITS[row : row + 1], one, positions=[7 + row]) == [together[row]]
    backwards = sample(LOGITS.flip(0), *params[::-1], positions=list(range(22, 6, -1)))
    assert backwards[::-1] == together


def test_seed_and_position_key_the_choice() -> None:
    flat = torch.zeros(1, VOCAB)
    by_seed = {sample(flat, SamplingParams(temperature=1.0, seed=seed))[0] for seed in range(60)}
    by_position = {sample(flat, SamplingParams(temperature=1.0, seed=3), positions=[p])[0] for p in range(1, 60)}
    assert len(by_seed) > 20 and len(by_position) > 20


def test_frequencies_follow_the_distribution() -> None:
    logits = LOGITS[:1]
    draws = 4000
    rows = logits.expand(draws, VOCAB)
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(draws)]
    chosen = torch.tensor(sample(rows, *params, positions=[9] * draws))
    expected = torch.softmax(logits[0] / 0.7, dim=0)
    observed = torch.bincount(chosen, minlength=VOCAB) / draws
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((observed - expected).abs() < 5 * error + 1e-3).all()


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.5, "min_p": 0.01},
    ],
)
def test_filters_keep_exactly_the_tokens_of_the_formula(params: dict[str, Any]) -> None:
    logits = LOGITS[1]
    probabilities = torch.softmax(logits, dim=0)
    kept = torch.ones(VOCAB, dtype=torch.bool)
    kept &= probabilities >= params.get("min_p", 0) * probabilities.max()
    order = torch.argsort(torch.where(kept, logits, -torch.inf), descending=True, stable=True)
    order = order[: params.get("top_k") or VOCAB]
    again = torch.softmax(torch.where(kept, logits, -torch.inf)[order], dim=0)
    before = again.cumsum(0) - again
    allowed = {int(token) for token, mass in zip(order, before, strict=True) if mass < params.get("top_p", 1.0)}
    allowed &= {int(token) for token in torch.nonzero(kept).flatten()}
    rows = [SamplingParams(temperature=1.0, seed=seed, **params) for seed in range(1500)]
    chosen = set(sample(logits.expand(1500, VOCAB), *rows, positions=[4] * 1500))
    assert chosen <= allowed
    likely = {token for token in allowed if probabilities[token] > 0.02}
    assert likely <= chosen


def test_penalties_bias_and_banned_stops() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([4.0, 3.9, 3.8, -1.0])
    history = TokenHistory(prompt_ids=(9, 1), generated_ids=(0, 0, 2))
    for params, expected in (
        (SamplingParams(repetition_penalty=1.5), 1 if 3.9 / 1.5 > 4.0 / 1.5 else 0),
        (SamplingParams(presence_penalty=0.3), 1),
        (SamplingParams(frequency_penalty=0.15), 1),
        (SamplingParams(logit_bias={3: 9.0}), 3),
    ):
        assert sample(logits, params, histories=[history]) == [expected]
    stop = SamplingParams(stop_ids=(0, 1), min_tokens=4, max_tokens=9)
    assert sample(logits, stop, histories=[history]) == [2]
    assert sample(logits, SamplingParams(stop_ids=(0, 1), min_tokens=3, max_tokens=9), histories=[history]) == [0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=2.0, top_k=2, logprobs=3, seed=1)
    result = Sampler(VOCAB, "cpu").sample(LOGITS[:2], plan_of([SamplingParams(), params], [5, 6]))
    assert list(result.extras) == [1]
    saved = torch.log_softmax(LOGITS[1], dim=0)
    one = result.extras[1].logprobs
    assert one is not None
    assert math.isclose(one.chosen, float(saved[result.token_ids[1]]), abs_tol=1e-6)
    assert [top.token_id for top in one.top] == torch.argsort(saved, descending=True)[:3].tolist()


def test_logits_that_are_not_finite_are_said_so() -> None:
    logits = LOGITS[:3].clone()
    logits[1, 5] = float("nan")
    chosen = sample(logits, *[SamplingParams(logprobs=1)] * 3)
    assert chosen[1] == NOT_FINITE
    assert NOT_FINITE not in (chosen[0], chosen[2])


def test_parameters_are_kept_while_the_same_requests_decode() -> None:
    sampler = Sampler(VOCAB, "cpu")
    params = [SamplingParams(temperature=0.5, seed=n) for n in range(3)]
    sampler.sample(LOGITS[:3], plan_of(params, [5, 6, 7]))
    known = sampler._known
    sampler.sample(LOGITS[:3], plan_of(params, [6, 7, 8]))
    assert sampler._known is known
    sampler.sample(LOGITS[:2], plan_of(params[:2], [6, 7]))
    assert sampler._known is not known
