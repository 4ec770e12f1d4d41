"""The plain twins against formulas written out row by row."""

import math

import pytest
import torch
from torch import Tensor

from kernels import RopeStyle, build_ops
from kernels.reference import (
    add_norm_norm,
    norm_add_norm,
    reference_ops,
    rms_norm,
    rope_write_kv,
    rotate,
    silu_mul,
)
from kernels.reference_attention import group_queries
from tests.kernels.paged_batch import plan_of

DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE, NUM_BLOCKS, PLANES = 16, 24, 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_scales_in_float32_and_weighs_in_the_model_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 48).to(dtype), (torch.rand(48) + 0.5).to(dtype)
    for row, got in zip(x, rms_norm(x, weight, 1e-6), strict=True):
        scale = 1 / math.sqrt(sum(float(value) ** 2 for value in row) / 48 + 1e-6)
        expected = (row.float() * scale).to(dtype) * weight
        assert got.dtype is dtype
        assert torch.allclose(got.float(), expected.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_the_two_residuals() -> None:
    x, branch, weight, following = torch.randn(8, 48), torch.randn(8, 48), torch.rand(48), torch.rand(48)
    for residual, expected in (
        (norm_add_norm, x + rms_norm(branch, weight, 1e-6)),
        (add_norm_norm, rms_norm(branch + x, weight, 1e-6)),
    ):
        state, normed = residual(x, branch, weight, following, 1e-6)
        assert torch.equal(state, expected)
        assert torch.equal(normed, rms_norm(expected, following, 1e-6))


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(8, 20), torch.randn(8, 20)
    assert torch.allclose(silu_mul(torch.cat((gate, up), dim=1)), gate / (1 + torch.exp(-gate)) * up, atol=1e-6)


@pytest.mark.parametrize("style", RopeStyle)
def test_rotate_turns_pairs_by_the_angle(style: RopeStyle) -> None:
    x, angles = torch.randn(5, 2, 8), torch.rand(5, 4) * 6
    got = rotate(x, angles.cos(), angles.sin(), style)
    for row in range(5):
        for pair in range(4):
            first, second = (pair, pair + 4) if style is RopeStyle.HALF_SPLIT else (2 * pair, 2 * pair + 1)
            turn = torch.exp(1j * angles[row, pair])
            expected = torch.complex(x[row, :, first], x[row, :, second]) * turn
            assert torch.allclose(got[row, :, first], expected.real, atol=1e-6)
            assert torch.allclose(got[row, :, second], expected.imag, atol=1e-6)


def test_adjacent_pairs_round_once() -> None:
    x, angles = torch.randn(5, 2, 8).bfloat16(), torch.rand(5, 4) * 6
    exact = rotate(x.float(), angles.cos(), angles.sin(), RopeStyle.ADJACENT_PAIRS)
    assert torch.equal(rotate(x, angles.cos(), angles.sin(), RopeStyle.ADJACENT_PAIRS), exact.bfloat16())


def test_rope_write_kv_writes_one_plane_at_the_slots() -> None:
    arena = torch.zeros(NUM_BLOCKS, PLANES, 2, BLOCK_SIZE, 2, 8)
    q, k, v = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    angles, slots = torch.rand(8, 4), torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:8]
    cos, sin = angles.cos(), angles.sin()
    qkv, planes = torch.cat((q, k, v), dim=1), torch.full((8,), 1)
    rotated = rope_write_kv(qkv, None, cos, sin, RopeStyle.HALF_SPLIT, arena, planes, slots)
    assert torch.equal(rotated, rotate(q, cos, sin, RopeStyle.HALF_SPLIT))
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        assert torch.equal(arena[block, 1, 0, offset], rotate(k, cos, sin, RopeStyle.HALF_SPLIT)[row])
        assert torch.equal(arena[block, 1, 1, offset], v[row])
    assert arena[:, 1].count_nonzero() == 2 * 8 * 2 * 8
    assert arena[:, [0, 2]].count_nonzero() == 0


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query [H, d] over keys and values [S, C, d], in float64: [H, d]."""
    group = q.shape[0] // keys.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        out[head] = torch.softmax(k @ q[head].double() * scale, dim=0) @ v
    return out


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (4, 2, 32), (3, 1, 40), (5, 5, 96)])
def test_paged_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, deterministic: bool) -> None:
    arena = torch.randn(NUM_BLOCKS, PLANES, 2, BLOCK_SIZE, kv_heads, head_dim).to(dtype)
    tables = torch.randperm(NUM_BLOCKS).view(3, 8)
    spans = [(0, 19), (127, 1), (60, 9)]  # a prompt's start, a decode row, a later chunk
    num_rows = sum(count for _, count in spans)
    q = torch.randn(num_rows + 3, heads, head_dim).to(dtype)  # three padding rows
    plan = plan_of(spans, list(tables))
    scale = head_dim**-0.5
    got = reference_ops(deterministic=deterministic).paged_attention(q, arena, torch.full((len(q),), 2), plan, scale)
    assert got.dtype is dtype
    assert got[num_rows:].count_nonzero() == 0
    row = 0
    for (start, count), table in zip(spans, tables, strict=True):
        keys, values = (arena[table, 2, side].flatten(0, 1) for side in (0, 1))
        for position in range(start, start + count):
            expected = naive_attention(q[row], keys[: position + 1], values[: position + 1], scale)
            assert torch.allclose(got[row].double(), expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-5)
            row += 1


@pytest.mark.parametrize("block_size", [1, 5, 8, 24, 64, 128])
def test_paged_attention_at_every_block_size(block_size: int) -> None:
    length = 130
    num_blocks = -(-length // block_size)
    arena = torch.full((num_blocks, 1, 2, block_size, 2, 8), torch.nan)
    table, positions = torch.randperm(num_blocks), torch.arange(length)
    keys, values = torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    for side, rows in enumerate((keys, values)):
        arena[:, 0, side][table[positions // block_size], positions % block_size] = rows
    q = torch.randn(16, 2, 8)
    got = reference_ops(deterministic=True).paged_attention(
        q, arena, torch.zeros(16).long(), plan_of([(114, 16)], [table]), 0.3
    )
    for row in range(16):
        expected = naive_attention(q[row], keys[: 115 + row], values[: 115 + row], 0.3)
        assert torch.allclose(got[row].double(), expected, atol=1e-5)


def test_rows_keep_their_bits_however_many_keys_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = torch.randn(NUM_BLOCKS, PLANES, 2, BLOCK_SIZE, 2, 16)
    tables = [torch.randperm(NUM_BLOCKS)[:8] for _ in range(9)]
    q, planes = torch.randn(9, 4, 16), torch.ones(9).long()
    plan = plan_of([(60 + 7 * row, 1) for row in range(9)], tables)
    expected, counts = reference_ops(deterministic=True).paged_attention(q, arena, planes, plan, 0.25), []
    for most_bytes in (1, 35_000, 70_000, 1 << 30):
        monkeypatch.setattr("kernels.reference_attention._MOST_KEY_BYTES", most_bytes)
        counts.append(len(group_queries(plan, arena)))
        assert torch.equal(reference_ops(deterministic=True).paged_attention(q, arena, planes, plan, 0.25), expected)
    assert counts[0] == 9 and counts == sorted(set(counts), reverse=True)  # a row alone, up to all of a length at once


def test_large_scores_do_not_overflow() -> None:
    arena = torch.randn(1, 1, 2, 16, 1, 8) * 1e4
    got = reference_ops(deterministic=True).paged_attention(
        torch.randn(8, 1, 8) * 1e4, arena, torch.zeros(8).long(), plan_of([(0, 8)], [torch.tensor([0])]), 1.0
    )
    assert torch.isfinite(got).all()


def test_linear_is_a_matrix_product() -> None:
    x, weight = torch.randn(11, 24), torch.randn(40, 24)
    for deterministic in (True, False):
        ops = build_ops(torch.device("cpu"), deterministic=deterministic)
        assert torch.allclose(ops.linear(x, weight), x @ weight.T, atol=1e-5)
