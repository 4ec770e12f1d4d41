"""What the gate between packed and per-row prefill measures, lets pass, says and chooses."""

import dataclasses
import logging
import math

import pytest
import torch
from torch import Tensor

from loopline.engine.accuracy_gate import (
    BF16_BOUNDS,
    FP32_BOUNDS,
    PROMPT_TOKENS,
    GateBounds,
    GateReport,
    bounds_for,
    choose_prefill,
    compare,
    describe,
    gate_prompts,
    passes,
)

SOUND = GateReport(num_positions=100, max_error=0.0, worst_position_error=0.0, mean_error=0.0, flipped_margins=())


def logits(seed: int, positions: int = 40, vocabulary: int = 100, spread: float = 3.0) -> Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("bounds", [FP32_BOUNDS, BF16_BOUNDS])
def test_equal_logits_pass(bounds: GateBounds) -> None:
    report = compare(logits(0), logits(0))
    assert (report.num_positions, report.top_agreement) == (40, 1.0)
    assert (report.max_error, report.worst_position_error, report.mean_error) == (0.0, 0.0, 0.0)
    assert passes(report, bounds)


def test_errors_are_in_units_of_the_spread() -> None:
    per_row = logits(1)
    per_row *= 4 / per_row.std(correction=0)
    packed = per_row.clone()
    packed[7, 3] += 2.0
    packed[9] -= 0.4
    report = compare(packed, per_row)
    assert report.max_error == pytest.approx(0.5, rel=1e-4)
    assert report.worst_position_error == pytest.approx(0.1, rel=1e-4)
    assert report.mean_error == pytest.approx((2.0 / 100 + 0.4) / 4 / 40, rel=1e-4)


def test_flat_logits_are_not_blown_up() -> None:
    per_row = logits(2, spread=1e-4)
    report = compare(per_row + 0.01, per_row)
    assert report.max_error == pytest.approx(0.01, rel=1e-3)


def test_one_position_has_a_spread() -> None:
    assert compare(logits(3, positions=1), logits(3, positions=1)).max_error == 0


def test_flips_are_told_by_the_margin_of_the_per_row_way() -> None:
    per_row = torch.zeros(4, 3)
    per_row[:, 0] = torch.tensor([0.5, 0.25, 0.125, 1.0])
    packed = per_row.clone()
    packed[0, 1], packed[2, 2] = 0.75, 0.1875
    report = compare(packed, per_row)
    assert report.flipped_margins == (0.5, 0.125)
    assert report.top_agreement == 0.5
    assert [report.decided_disagreements(margin) for margin in (0.0, 0.125, 0.3, 0.5)] == [2, 1, 1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["packed", "per_row", "both"])
def test_what_is_not_finite_does_not_pass(bad: float, where: str) -> None:
    packed, per_row = logits(4), logits(4)
    for name, values in (("packed", packed), ("per_row", per_row)):
        if where in (name, "both"):
            values[5, 6] = bad
    report = compare(packed, per_row)
    assert (report.max_error, report.worst_position_error, report.mean_error) == (math.inf,) * 3
    for bounds in (FP32_BOUNDS, BF16_BOUNDS):
        assert not passes(report, bounds)
        assert "inf" in describe(report, bounds)


@pytest.mark.parametrize("shapes", [((3, 4), (4, 4)), ((3, 4), (1, 4)), ((4,), (4,)), ((0, 4), (0, 4))])
def test_logits_that_cannot_be_compared(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"logits are \[.*\] packed"):
        compare(*(torch.zeros(shape) for shape in shapes))


def test_arguments_are_left_alone() -> None:
    packed, per_row = logits(5), logits(6)
    compare(packed, per_row)
    assert torch.equal(packed, logits(5)) and torch.equal(per_row, logits(6))


@pytest.mark.parametrize("bounds", [FP32_BOUNDS, BF16_BOUNDS])
def test_each_number_alone_can_fail(bounds: GateBounds) -> None:
    at_bounds = GateReport(
        num_positions=1000,
        max_error=bounds.max_error,
        worst_position_error=bounds.worst_position_error,
        mean_error=bounds.mean_error,
        flipped_margins=(bounds.decided_margin,) * round(1000 * (1 - bounds.top_agreement) - 1),
    )
    assert passes(at_bounds, bounds)
    assert "OUT OF BOUNDS" not in describe(at_bounds, bounds)
    for change in (
        {"max_error": bounds.max_error * 1.01},
        {"worst_position_error": bounds.worst_position_error * 1.01},
        {"mean_error": bounds.mean_error * 1.01},
        {"flipped_margins": (0.0,) * round(1000 * (1 - bounds.top_agreement) + 1)},
        {"flipped_margins": (bounds.decided_margin * 1.01,)},
    ):
        report = dataclasses.replace(at_bounds, **change)
        assert not passes(report, bounds)
        assert describe(report, bounds).count("OUT OF BOUNDS") == 1


def test_bounds_follow_the_dtype() -> None:
    assert bounds_for(torch.float32) is FP32_BOUNDS
    assert bounds_for(torch.bfloat16) is BF16_BOUNDS


@pytest.mark.parametrize("context_tokens", [1, 33, 100, 2048])
def test_prompts_are_fixed_and_within_the_model(context_tokens: int) -> None:
    prompts = gate_prompts(320, context_tokens)
    assert prompts == gate_prompts(320, context_tokens)
    assert prompts != gate_prompts(320, context_tokens, seed=1)
    assert sorted({len(prompt) for prompt in prompts}) == [len(prompt) for prompt in prompts]
    assert max(len(prompt) for prompt in prompts) == min(context_tokens, max(PROMPT_TOKENS))
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)


def test_all_lengths_where_the_context_is_long() -> None:
    assert tuple(len(prompt) for prompt in gate_prompts(65536, 4096)) == PROMPT_TOKENS


def per_row_way() -> Tensor:
    return logits(9)


def rounded_way() -> Tensor:
    return logits(9).bfloat16().float()


def never() -> Tensor:
    raise AssertionError("nothing is to be computed")


@pytest.mark.parametrize("mode", ["packed", "per_row"])
def test_a_given_mode_computes_nothing(mode: str) -> None:
    assert choose_prefill(mode, never, never, torch.bfloat16) == (mode, None)


def test_an_unknown_mode() -> None:
    with pytest.raises(ValueError, match="prefill is 'both'; allowed: auto, packed, per_row"):
        choose_prefill("both", never, never, torch.bfloat16)


def test_auto_packs_what_is_within_bounds_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    way, report = choose_prefill("auto", rounded_way, per_row_way, torch.bfloat16)
    assert way == "packed"
    assert report == compare(rounded_way(), per_row_way())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == f"prefill is packed: {describe(report, BF16_BOUNDS)}"


def test_auto_falls_back_with_a_warning_that_has_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    way, report = choose_prefill("auto", rounded_way, per_row_way, torch.float32)
    assert way == "per_row"
    assert report is not None and report.max_error > FP32_BOUNDS.max_error
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"prefill is per row, slower: {describe(report, FP32_BOUNDS)}"
    assert f"OUT OF BOUNDS: largest error {report.max_error:.2e} (at most 0.002)" in record.getMessage()


def test_one_bad_position_is_enough() -> None:
    def wrong_once() -> Tensor:
        packed = per_row_way()
        packed[-1] = packed[-1].roll(1)
        return packed

    assert choose_prefill("auto", wrong_once, per_row_way, torch.bfloat16)[0] == "per_row"


def test_what_a_way_raises_is_raised() -> None:
    with pytest.raises(AssertionError, match="nothing is to be computed"):
        choose_prefill("auto", never, per_row_way, torch.bfloat16)
