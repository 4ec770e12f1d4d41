"""Products with weights, of few rows and of small batches, against float64 and against themselves."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.launch import INTERPRETED
from kernels.matvec import MatvecConfig, gated_matvec, gated_matvec_tuned, matvec, matvec_tuned
from kernels.reference import silu_mul
from kernels.skinny_linear import (
    SkinnyConfig,
    _config,
    gated_skinny_linear,
    gated_skinny_linear_tuned,
    skinny_linear,
    skinny_linear_tuned,
)
from kernels.triton_ops import TritonOps

ROUNDING = 1.2e-2 if INTERPRETED else 5e-3
"""Of a result relative to itself: half a unit in the last place, or a whole one in the interpreter, which truncates."""


@dataclass(frozen=True)
class Pair:
    """A product, the same with the gate, and what the gate is given: a product cut as the gated one is."""

    linear: Callable[[Tensor, Tensor], Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    ungated: Callable[[Tensor, Tensor], Tensor]


def skinny_cut_as_gated(x: Tensor, gate_up: Tensor) -> Tensor:
    config = _config(x.shape[0], *gate_up.shape, gated=True)
    return torch.cat([skinny_linear_tuned(x, half, config) for half in gate_up.chunk(2)], dim=1)


MATVEC = Pair(matvec, gated_matvec, matvec)
SKINNY = Pair(skinny_linear, gated_skinny_linear, skinny_cut_as_gated)

SMALL = [
    *((MATVEC, n, 48, 96) for n in (1, 3)),
    *((MATVEC, n, 50, 1032) for n in (2, 5)),
    (MATVEC, 8, 20, 96),
    *((SKINNY, n, 160, 352) for n in (1, 8, 17)),
    (SKINNY, 5, 50, 96),
]
SHAPES = [  # [M, K] of Ouro's products, then Huginn's
    (6144, 2048),
    (2048, 2048),
    (11264, 2048),
    (2048, 5632),
    (49152, 2048),
    (15840, 5280),
    (5280, 5280),
    (35840, 5280),
    (5280, 17920),
    (5280, 10560),
    (65536, 5280),
]
REAL = [
    *((MATVEC, n, *shape) for shape in SHAPES for n in (1, 4)),
    *((SKINNY, n, *shape) for shape in SHAPES for n in (8, 32, 128)),
    *((MATVEC, n, 2048, 5632) for n in (2, 3, 5, 8)),
    *((SKINNY, n, 11264, 2048) for n in (1, 17, 64, 100)),
]
CASES = [*SMALL, *(pytest.param(*case, marks=pytest.mark.gpu) for case in REAL)]
each_case = pytest.mark.parametrize(("pair", "num_rows", "num_out", "num_in"), CASES)


def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


def operands(num_rows: int, num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    """x [N, K] and weights [M, K] whose products are about as large as x."""
    generator = torch.Generator(device()).manual_seed(num_rows * num_out + num_in)
    x = torch.randn(num_rows, num_in, generator=generator, device=device())
    weight = torch.randn(num_out, num_in, generator=generator, device=device()) / num_in**0.5
    return x.bfloat16(), weight.bfloat16()


@pytest.fixture
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written is not a number."""
    empty = torch.empty

    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(*shape, dtype=dtype, device=device).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x.double() @ weight.double().T
    assert got.dtype is x.dtype
    assert got.shape == expected.shape
    error = (got.double() - expected).abs()
    assert (error <= ROUNDING * expected.abs() + 1e-4 * expected.abs().max()).all(), (error / expected.abs()).max()


def assert_gated(got: Tensor, ungated: Tensor) -> None:
    """The interpreter rounds, and takes exponentials, in another way than torch does."""
    if INTERPRETED:
        expected = silu_mul(ungated)
        assert torch.allclose(got.float(), expected.float(), rtol=3e-2, atol=1e-6)
    else:
        assert torch.equal(got, silu_mul(ungated))


@pytest.mark.usefixtures("_poison")
@each_case
def test_a_product(pair: Pair, num_rows: int, num_out: int, num_in: int) -> None:
    x, weight = operands(num_rows, num_out, num_in)
    assert_product(pair.linear(x, weight), x, weight)


@pytest.mark.usefixtures("_poison")
@each_case
def test_the_gate_is_that_of_the_product(pair: Pair, num_rows: int, num_out: int, num_in: int) -> None:
    x, weight = operands(num_rows, num_out, num_in)
    assert_gated(pair.gated(x, weight), pair.ungated(x, weight))


@each_case
def test_a_row_is_the_same_whatever_the_others_hold(pair: Pair, num_rows: int, num_out: int, num_in: int) -> None:
    x, weight = operands(num_rows, num_out, num_in)
    others = torch.full_like(x, float("nan"))
    row = num_rows // 2
    others[row] = x[row]
    assert torch.equal(pair.linear(others, weight)[row], pair.linear(x, weight)[row])


@pytest.mark.gpu
@each_case
def test_bits_repeat(pair: Pair, num_rows: int, num_out: int, num_in: int) -> None:
    x, weight = operands(num_rows, num_out, num_in)
    expected, expected_gated = pair.linear(x, weight), pair.gated(x, weight)
    for _ in range(20):
        assert torch.equal(pair.linear(x, weight), expected)
        assert torch.equal(pair.gated(x, weight), expected_gated)


@pytest.mark.parametrize(
    ("num_out", "num_in"), [(48, 96), *(pytest.param(*shape, marks=pytest.mark.gpu) for shape in SHAPES)]
)
def test_few_rows_have_the_bits_of_one(num_out: int, num_in: int) -> None:
    x, weight = operands(4, num_out, num_in)
    alone = matvec(x[:1], weight)
    for num_rows in (2, 3, 4):
        assert torch.equal(matvec(x[:num_rows], weight)[:1], alone)


@pytest.mark.usefixtures("_poison")
@pytest.mark.parametrize(
    ("num_splits", "block_m", "num_whole"), [(1, 64, 0), (2, 32, 0), (3, 64, 0), (2, 32, 2), (9, 16, 1), (2, 64, 5)]
)
def test_other_cuts_of_a_matrix(num_splits: int, block_m: int, num_whole: int) -> None:
    x, weight = operands(9, 192, 232)
    config = SkinnyConfig(block_m, 32, num_splits, num_warps=4, num_stages=3, num_whole=num_whole)
    assert_product(skinny_linear_tuned(x, weight, config), x, weight)
    halves = [skinny_linear_tuned(x, half, config) for half in weight.chunk(2)]
    assert_gated(gated_skinny_linear_tuned(x, weight, config), torch.cat(halves, dim=1))
    few = MatvecConfig(rows=32, num_warps=num_splits if num_splits < 3 else 8)
    assert_product(matvec_tuned(x[:2], weight, few), x[:2], weight)
    assert_gated(gated_matvec_tuned(x[:2], weight, few), matvec_tuned(x[:2], weight, few))


@pytest.mark.parametrize("pair", [MATVEC, SKINNY])
def test_rows_of_x_may_lie_apart(pair: Pair) -> None:
    x, weight = operands(3, 48, 96)
    apart = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :96]
    assert torch.equal(pair.linear(apart, weight), pair.linear(x, weight))


@pytest.mark.parametrize("pair", [MATVEC, SKINNY])
def test_what_cannot_be_read_is_refused(pair: Pair) -> None:
    x, weight = operands(3, 48, 96)
    for product in (pair.linear, pair.gated):
        with pytest.raises(ValueError, match="bfloat16"):
            product(x.float(), weight)
        with pytest.raises(ValueError, match="columns"):
            product(x[:, :88], weight)
        with pytest.raises(ValueError, match="columns"):
            product(x[:, ::2], weight[:, ::2])
        with pytest.raises(ValueError, match="contiguous"):
            product(x[:, :80], weight[:, :80])
        with pytest.raises(ValueError, match="200 rows"):
            product(x[:1].expand(200, 96), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 8, 32, 128])
def test_overlapping_launches_see_each_others_results(num_rows: int) -> None:
    """A captured chain, each kernel starting while the one before it runs, has the bits of kernels run one by one."""
    pair = MATVEC if num_rows <= 4 else SKINNY
    x = operands(num_rows, 2048, 2048)[0]
    layers = [[operands(seed, *shape)[1] for shape in SHAPES[:4]] for seed in range(3)]

    def chain(after_each: Callable[[], None]) -> Tensor:
        state = x
        for qkv, out, gate_up, down in layers:
            mixed = pair.linear(state, qkv)
            after_each()
            attended = pair.linear(mixed[:, :2048], out)
            after_each()
            products = pair.gated(attended, gate_up)
            after_each()
            state = pair.linear(products, down)
            after_each()
        return state

    expected = chain(torch.cuda.synchronize)
    assert 0 < expected.abs().max() < 100
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("num_rows", "shape", "is_ours"),
    [
        (8, (6144, 2048), True),
        (32, (5280, 17920), True),
        (32, (5280, 10560), True),
        (32, (15840, 5280), False),
        (8, (5280, 5280), False),
        (8, (65536, 5280), False),
        (33, (2048, 5632), False),
    ],
)
def test_small_products_are_ours_and_large_ones_that_give_fewer_features_than_they_sum_over(
    num_rows: int, shape: tuple[int, int], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Ouro's and Huginn's; by measurements of docs/performance.md."""
    ours: list[torch.Size] = []
    monkeypatch.setattr("kernels.skinny_linear.skinny_linear", lambda x, weight: ours.append(weight.shape))
    x, weight = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((num_rows, shape[1]), shape))
    TritonOps().linear(x, weight)
    assert bool(ours) is is_ours
