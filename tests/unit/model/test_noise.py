"""Huginn's initial state: its distribution, and that it depends on (seed, position, channel) alone."""

import math

import pytest
import torch

from kernels import build_ops
from loopline.model.noise import initial_state, quantile_table

CPU = torch.device("cpu")
OPS = build_ops(CPU, deterministic=True)


def draw(seeds: list[int], positions: list[int], width: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    zeros = torch.zeros(len(seeds), dtype=torch.bool)
    return initial_state(
        OPS, torch.tensor(seeds), torch.tensor(positions), zeros, torch.empty(len(seeds), width, dtype=dtype)
    )


def test_the_table_is_a_normal_cut_at_three_deviations() -> None:
    table = quantile_table(CPU).double()
    uncut = math.sqrt(2 / 5)
    assert len(table) == 65536
    assert (table[1:] > table[:-1]).all()
    assert torch.equal(table, -table.flip(0))
    assert 2.99 * uncut < table.max() < 3 * uncut
    # Variance of a standard normal cut at +-c: 1 - 2 c pdf(c) / (2 cdf(c) - 1).
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    expected = uncut * math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))
    assert table.std(correction=0).item() == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(0.62, abs=0.005)


def test_a_sample_has_the_distribution() -> None:
    sample = draw([5] * 256, list(range(256)), width=512)
    uncut = math.sqrt(2 / 5)
    assert abs(sample.mean().item()) < 0.01
    assert sample.std().item() == pytest.approx(0.624, abs=0.005)
    assert sample.abs().max().item() <= 3 * uncut
    within = (sample.abs() < uncut).float().mean().item()
    assert within == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2)), abs=0.01)


def test_rows_do_not_depend_on_their_batch() -> None:
    seeds, positions = [3, -7, 3, 12], [0, 5, 1, 2**20]
    batch = draw(seeds, positions)
    for row in range(4):
        assert torch.equal(draw(seeds[row : row + 1], positions[row : row + 1])[0], batch[row])
    assert not torch.equal(batch[0], batch[2])


def test_zero_rows_and_dtype() -> None:
    zeros = torch.tensor([True, False])
    state = initial_state(OPS, torch.tensor([1, 1]), torch.tensor([0, 0]), zeros, torch.empty(2, 64).bfloat16())
    assert state.dtype is torch.bfloat16
    assert state[0].count_nonzero() == 0
    assert torch.equal(state[1], draw([1], [0])[0].bfloat16())
