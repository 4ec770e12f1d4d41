"""Position-keyed noise over a million draws, against the exact normal of deviation sqrt(2/5) cut at three deviations.

Seeds are fixed, so that a run gives the numbers of the last one; bounds are four standard errors, which a good
generator passes for all of these figures under 99 of 100 choices of seeds.
"""

import math

import pytest
import torch
from torch import Tensor

from kernels import build_ops
from loopline.model.noise import initial_state, quantile_table

CPU = torch.device("cpu")
OPS = build_ops(CPU, deterministic=True)
UNCUT, CUT = math.sqrt(2 / 5), 3.0
DRAWS = 10**6
MOST_ERRORS = 4.0
SHAPES = [(190, 5280), (4000, 256)]  # positions x channels: Huginn's width, and tiny-huginn's
SEEDS = [0, 1, 0x9E3779B97F4A7C15 - 2**64]


def moment(order: int) -> float:
    """Exact E[x^order], for an even order, of a standard normal cut at +-CUT: by parts, from the one two below."""
    if order == 0:
        return 1.0
    density = math.exp(-CUT * CUT / 2) / math.sqrt(2 * math.pi) / math.erf(CUT / math.sqrt(2))
    return (order - 1) * moment(order - 2) - 2 * CUT ** (order - 1) * density


def cdf(values: Tensor) -> Tensor:
    """Of that normal, scaled."""
    return 0.5 + torch.erf(values / UNCUT / math.sqrt(2)) / (2 * math.erf(CUT / math.sqrt(2)))


def grid(seed: int, positions: int, channels: int) -> Tensor:
    """States [positions, channels] float64 of a cluster with this seed."""
    rows = torch.arange(positions)
    zeros = torch.zeros(positions, dtype=torch.bool)
    like = torch.empty(positions, channels)
    return initial_state(OPS, torch.full_like(rows, seed), rows, zeros, like).double()


@pytest.fixture(scope="module", params=[(seed, *shape) for seed in SEEDS for shape in SHAPES], ids=str)
def states(request: pytest.FixtureRequest) -> Tensor:
    drawn = grid(*request.param)
    assert drawn.numel() >= DRAWS
    return drawn


def test_the_exact_moments_are_those_of_the_published_code() -> None:
    """0.632 before the cut and 0.62 to 0.63 after it."""
    assert UNCUT * math.sqrt(moment(2)) == pytest.approx(0.62397, abs=1e-5)
    x = torch.linspace(-CUT, CUT, 200_001, dtype=torch.float64)
    weights = torch.exp(-x * x / 2)
    for order in (2, 4, 6, 8):
        assert moment(order) == pytest.approx(((weights * x**order).sum() / weights.sum()).item(), rel=1e-4)


def test_the_table_has_the_moments_to_a_part_of_a_samples_error() -> None:
    table = quantile_table(CPU).double() / UNCUT
    assert abs(table.mean().item()) < 1e-12
    for order in (2, 4):
        error = math.sqrt((moment(2 * order) - moment(order) ** 2) / DRAWS)
        assert abs((table**order).mean().item() - moment(order)) < error / 10


def test_mean_deviation_and_fourth_moment_are_within_sampling_error(states: Tensor) -> None:
    x, count = states.flatten() / UNCUT, states.numel()
    assert abs(x.mean().item()) < MOST_ERRORS * math.sqrt(moment(2) / count)
    for order in (2, 4):
        error = math.sqrt((moment(2 * order) - moment(order) ** 2) / count)
        assert abs((x**order).mean().item() - moment(order)) < MOST_ERRORS * error
    deviation, variance_error = math.sqrt(moment(2)), math.sqrt((moment(4) - moment(2) ** 2) / count)
    assert abs(x.std(correction=0).item() - deviation) < MOST_ERRORS * variance_error / (2 * deviation)


def test_the_whole_distribution_is_within_sampling_error(states: Tensor) -> None:
    """Kolmogorov's distance: above 1.95 / sqrt(n) with probability 0.001."""
    ordered = states.flatten().sort().values
    count = len(ordered)
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    expected = cdf(ordered)
    distance = torch.maximum((steps - expected).abs(), (expected - steps + 1 / count).abs()).max().item()
    assert distance < 1.95 / math.sqrt(count) + 2**-17  # and half an entry of the table


@pytest.mark.parametrize(
    ("positions", "channels"), [(1, 0), (2, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 4)], ids=str
)
def test_neighbours_are_not_correlated(states: Tensor, positions: int, channels: int) -> None:
    """So many positions and channels apart; four channels have one Philox block. Values, and how large they are."""
    height, width = states.shape
    first, second = states[: height - positions, : width - channels], states[positions:, channels:]
    for a, b in ((first, second), (first.square(), second.square())):
        a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
        correlation = (a @ b / (a.norm() * b.norm())).item()
        assert abs(correlation) < MOST_ERRORS / math.sqrt(len(a))


def test_seeds_of_clusters_have_nothing_in_common() -> None:
    drawn = [grid(seed, *SHAPES[1]) for seed in SEEDS]
    for a, b in ((drawn[0], drawn[1]), (drawn[0], drawn[2]), (drawn[1], drawn[2])):
        a, b = a.flatten(), b.flatten()
        assert abs((a @ b / (a.norm() * b.norm())).item()) < MOST_ERRORS / math.sqrt(len(a))
        assert (a == b).double().mean().item() < 10 / 65536
