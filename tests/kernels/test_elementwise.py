"""Norms, activation, rotation and initial state against their plain twins: to the bit on CUDA, within rounding in the
interpreter, whose sums and exponentials are numpy's.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import activation, norm, reference, rope, state_noise
from kernels.ops import RopeStyle

DTYPES = (torch.float32, torch.bfloat16)
GPU_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 100, 128, 2048)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
"""Of the interpreter, which cuts bfloat16 off where a device rounds it: up to 2^-7 at each of a few steps. Relative to
the largest element, since steps may cancel.
"""
EPS = 1e-6
TWO_NORMS = (
    (norm.norm_add_norm, reference.norm_add_norm),
    (norm.add_norm_norm, reference.add_norm_norm),
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers whose rows differ in size by up to a million."""
    magnitude = 10.0 ** (6 * torch.rand(shape[0], *(1,) * (len(shape) - 1), generator=generator) - 3)
    return (torch.randn(shape, generator=generator) * magnitude).to(device, dtype)


def seeded(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(letter) << i % 24 for i, letter in enumerate(repr(key))))


def agree(mine: Tensor, theirs: Tensor) -> None:
    """Equal bits on CUDA, within rounding on a CPU."""
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    if mine.is_cuda:
        differ = (mine != theirs).nonzero()
        assert torch.equal(mine, theirs), f"{len(differ)} of {mine.numel()} differ, the first at {differ[0].tolist()}"
    else:
        assert torch.isfinite(mine).all()
        tolerance = TOLERANCE[mine.dtype] * theirs.abs().max().item()
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=tolerance)


def check_norms(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, width, dtype)
    residual, branch = (random(generator, num_rows, width, dtype=dtype, device=device) for _ in range(2))
    weight, next_weight = (1 + 0.3 * torch.randn(2, width, generator=generator)).to(device, dtype).unbind()
    agree(norm.rms_norm(branch, weight, EPS), reference.rms_norm(branch, weight, EPS))
    for kernel, twin in TWO_NORMS:
        mine = kernel(residual, branch, weight, next_weight, EPS)
        theirs = twin(residual, branch, weight, next_weight, EPS)
        agree(mine[0], theirs[0])
        # On a CPU the states may differ within rounding already, so the second norm is held against that of mine.
        agree(mine[1], theirs[1] if mine[1].is_cuda else reference.rms_norm(mine[0], next_weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 132), (2, 512), (1, 1000)])
def test_norms(num_rows: int, width: int, dtype: torch.dtype) -> None:
    check_norms(num_rows, width, dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2048, 5280])
@pytest.mark.parametrize("num_rows", GPU_ROWS)
def test_norms_have_the_bits_of_torch(num_rows: int, width: int, dtype: torch.dtype) -> None:
    check_norms(num_rows, width, dtype, CUDA)


@pytest.mark.parametrize(
    ("num_rows", "width", "threads"),
    [
        (1, 2048, 512),
        (2, 2048, 256),
        (3, 2048, 256),
        (4, 2048, 128),
        (8, 2048, 64),
        (16, 2048, 32),
        (2048, 2048, 32),
        (1, 5280, 512),
        (15, 5280, 64),
        (1, 132, 32),
        (1, 512, 128),
        (8, 512, 64),
        (1, 64, 16),
    ],
)
def test_reduction_width(num_rows: int, width: int, threads: int) -> None:
    assert norm.reduction_width(num_rows, width) == threads


@pytest.mark.parametrize(("num_rows", "width"), [(1, 512), (1, 5280), (4, 2048), (8, 512), (16, 256), (16, 2052)])
def test_squares_are_summed_in_the_order_of_torch_on_cuda(num_rows: int, width: int) -> None:
    """To the bit, in the interpreter: the order is spelled out here once more, one addition at a time."""
    x = random(seeded(num_rows, width), num_rows, width, dtype=torch.float32, device=CPU)
    threads = norm.reduction_width(num_rows, width)
    steps = -(-width // (4 * threads))
    squares = np.zeros((num_rows, steps, threads, 4), np.float32)
    squares.reshape(num_rows, -1)[:, :width] = (x * x).numpy()
    sums = np.zeros((num_rows, threads, 4), np.float32)
    for step in range(steps):
        sums += squares[:, step]
    total = ((sums[..., 0] + sums[..., 1]) + sums[..., 2]) + sums[..., 3]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    scale = 1 / np.sqrt(total * np.float32(1 / width) + np.float32(EPS))
    expected = x * torch.from_numpy(scale)
    assert torch.equal(norm.rms_norm(x, torch.ones(width), EPS), expected)


def check_silu_mul(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, width, dtype)
    gate_up = random(generator, num_rows, 2 * width, dtype=dtype, device=device)
    gate_up[0, :width] = torch.linspace(-120, 120, width, dtype=dtype, device=device)
    agree(activation.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 100), (3, 1500)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which gives 1 / inf, as it should
def test_silu_mul(num_rows: int, width: int, dtype: torch.dtype) -> None:
    check_silu_mul(num_rows, width, dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5632, 17920])
@pytest.mark.parametrize("num_rows", [1, 7, 128, 2048])
def test_silu_mul_has_the_bits_of_torch(num_rows: int, width: int, dtype: torch.dtype) -> None:
    check_silu_mul(num_rows, width, dtype, CUDA)


def check_rope(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    style: RopeStyle,
    has_bias: bool,
    dtype: torch.dtype,
    arena_dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = seeded(num_rows, num_heads, num_kv_heads, head_size, style, has_bias, dtype, arena_dtype)
    num_blocks, num_planes, block_size = num_rows + 3, 5, 16
    qkv = random(generator, num_rows, num_heads + 2 * num_kv_heads, head_size, dtype=dtype, device=device)
    bias = random(generator, num_heads + num_kv_heads, head_size, dtype=dtype, device=device) if has_bias else None
    angles = 10 * torch.rand(num_rows, head_size // 2, generator=generator)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    planes = torch.randint(num_planes, (num_rows,), generator=generator).to(device)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_rows].to(device)
    arena = torch.full(
        (num_blocks, num_planes, 2, block_size, num_kv_heads, head_size), math.nan, dtype=arena_dtype, device=device
    )
    expected = arena.clone()
    mine = rope.rope_write_kv(qkv, bias, cos, sin, style, arena, planes, slots)
    theirs = reference.rope_write_kv(qkv, bias, cos, sin, style, expected, planes, slots)
    agree(mine, theirs)
    assert torch.equal(arena.isnan(), expected.isnan())
    agree(arena.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("style", RopeStyle)
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_kv_heads", "head_size"),
    [(1, 4, 4, 16), (3, 5, 5, 96), (2, 16, 16, 128), (5, 4, 2, 32)],
)
@pytest.mark.parametrize(
    ("dtype", "arena_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_rope_write_kv(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    style: RopeStyle,
    has_bias: bool,
    dtype: torch.dtype,
    arena_dtype: torch.dtype,
) -> None:
    check_rope(num_rows, num_heads, num_kv_heads, head_size, style, has_bias, dtype, arena_dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 128, 512])
@pytest.mark.parametrize(
    ("num_heads", "head_size", "style", "has_bias"),
    [(16, 128, RopeStyle.HALF_SPLIT, False), (55, 96, RopeStyle.ADJACENT_PAIRS, True)],
)
@pytest.mark.parametrize(
    ("dtype", "arena_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_rope_write_kv_has_the_bits_of_torch(
    num_rows: int,
    num_heads: int,
    head_size: int,
    style: RopeStyle,
    has_bias: bool,
    dtype: torch.dtype,
    arena_dtype: torch.dtype,
) -> None:
    check_rope(num_rows, num_heads, num_heads, head_size, style, has_bias, dtype, arena_dtype, CUDA)


@pytest.mark.gpu
def test_rope_write_kv_reaches_the_end_of_an_arena_past_32_bits() -> None:
    arena = torch.empty(360, 96, 2, 16, 16, 128, dtype=torch.bfloat16, device=CUDA)  # 4.5 GB
    assert arena.numel() > 2**31
    qkv = torch.randn(2, 48, 128, device=CUDA).to(torch.bfloat16)
    cos, sin = torch.randn(2, 2, 64, device=CUDA).unbind()
    planes, slots = torch.tensor([95, 0], device=CUDA), torch.tensor([360 * 16 - 1, 3], device=CUDA)
    rope.rope_write_kv(qkv, None, cos, sin, RopeStyle.HALF_SPLIT, arena, planes, slots)
    keys = reference.rotate(qkv[:, 16:32], cos, sin, RopeStyle.HALF_SPLIT)
    for row, place in enumerate([arena[359, 95, :, 15], arena[0, 0, :, 3]]):
        assert torch.equal(place[0], keys[row])
        assert torch.equal(place[1], qkv[row, 32:])


def check_initial_state(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(num_rows, width, dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**40, (num_rows,), generator=generator)
    zeros = torch.rand(num_rows, generator=generator) < 0.3
    zeros[0] = False
    table = torch.randn(65536, generator=generator)
    inputs = [tensor.to(device) for tensor in (seeds, positions, zeros, table)]
    like = torch.empty(num_rows, width, dtype=dtype, device=device)
    mine, theirs = state_noise.initial_state(*inputs, like), reference.initial_state(*inputs, like)
    agree(mine, theirs)
    assert (device == CPU and dtype is torch.bfloat16) or torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 132), (5, 1031)])
def test_initial_state(num_rows: int, width: int, dtype: torch.dtype) -> None:
    check_initial_state(num_rows, width, dtype, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 17, 512])
def test_initial_state_has_the_bits_of_torch(num_rows: int, dtype: torch.dtype) -> None:
    check_initial_state(num_rows, 5280, dtype, CUDA)
