"""Attention of rows that each stand alone, split over their keys; `kernels.triton_ops` calls it for a `DecodePlan`.

A row of length L (its keys: positions 0 to L - 1) is cut into splits of whole tiles, each a program of
`_attend_split`; `_merge_splits` puts them together in split order. How many splits is worked out on the device from L
and from constants of the batch's shape, so a captured graph serves every filling of the plan, and a row's bits depend
on its length and on the number of rows alone.

The work is bound by memory. A tile is [heads, tokens, d]: the heads of a token lie side by side, so a tile is read in
pieces of heads * d elements, with many independent loads of 16 bytes in flight in each thread. Tensor cores would add
nothing: with as many query heads as key/value heads a product has one row.

Shape letters are those of `kernels.ops`; here also S splits a row may have at most.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRETED, launch_options, let_next_start, loop_bound, wait_for_previous
from kernels.ops import DecodePlan

_BUSY_PROGRAMS = 1056
"""Programs that fill an H200: 8 on each of its 132 multiprocessors."""
_FEWEST_SPLITS = 4
"""Splits that a long row may have at least, so that one long row does not keep a whole batch waiting; twice as many
where lanes are padding, so that more programs make up for the loads that those lanes leave out."""
_MOST_SPLITS = 64
"""Splits of a row at most; one program merges a head's."""
_LOWEST = tl.constexpr(-3.0e38)
"""Stands for no score at all: below every real one, and the difference of two is no NaN."""


@dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut; a result's bits depend on it."""

    num_tokens: int
    """Tokens of a tile, a power of two; fewer where a block is not a multiple of it."""
    num_heads: int
    """Heads of a tile, a power of two."""
    num_warps: int
    num_stages: int
    """Tiles in flight: 1 loads to registers, more to shared memory, ahead of their use."""
    max_splits: int
    """Splits of a row at most, up to 64."""
    min_split: int
    """Tokens that are worth a split of their own."""


def decode_attention(q: Tensor, arena: Tensor, planes: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """Attention of q [N, H, d] over the keys at each row's position and before: [N, H, d]; zero for padding rows.

    `arena` [num_blocks, planes, 2, block_size, C, d] is contiguous, and H a multiple of C; `planes` [N] int64. A row's
    last axis is contiguous in q. Nothing behind a row's position is read.
    """
    num_rows, num_heads, head_dim = q.shape
    return decode_attention_tuned(q, arena, planes, plan, scale, _config(num_rows, num_heads, head_dim))


def decode_attention_tuned(
    q: Tensor,
    arena: Tensor,
    planes: Tensor,
    plan: DecodePlan,
    scale: float,
    config: DecodeConfig,
) -> Tensor:
    """`decode_attention`, cut as `config` says."""
    num_rows, num_heads, head_dim = q.shape
    _, num_planes, _, block_size, num_kv_heads, _ = arena.shape
    assert q.stride(2) == 1 and arena.is_contiguous() and num_heads % num_kv_heads == 0
    assert planes.is_contiguous() and plan.positions.is_contiguous() and plan.block_tables.stride(1) == 1
    assert config.max_splits <= _MOST_SPLITS
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    parts = torch.empty(num_rows, num_heads, config.max_splits, head_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(num_rows, num_heads, config.max_splits, 2, dtype=torch.float32, device=q.device)
    # Whole tiles: no tile reaches over the end of a block. `x & -x` is the largest power of two that divides x.
    tile_tokens = min(config.num_tokens, block_size & -block_size)
    tile_heads = min(config.num_heads, triton.next_power_of_2(num_heads))
    padded_dim = triton.next_power_of_2(head_dim)
    plane_stride = 2 * block_size * num_kv_heads * head_dim
    splits = {"max_splits": config.max_splits, "min_split": config.min_split, "tile_tokens": tile_tokens}
    num_groups = triton.cdiv(num_heads, tile_heads)
    _attend_split[(num_rows * num_groups, config.max_splits)](
        q,
        arena,
        planes,
        plan.positions,
        plan.block_tables,
        parts,
        weights,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        num_planes * plane_stride,
        plan.block_tables.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        tile_heads=tile_heads,
        stages=config.num_stages,
        **splits,
        **_options(q.device, config.num_warps),
    )
    split_lanes = triton.next_power_of_2(config.max_splits)
    merge_warps = max(1, min(4, split_lanes * padded_dim // 2048))
    _merge_splits[(num_rows * num_heads,)](
        plan.positions,
        parts,
        weights,
        out,
        num_heads=num_heads,
        head_dim=head_dim,
        padded_dim=padded_dim,
        split_lanes=split_lanes,
        **splits,
        **_options(q.device, merge_warps),
    )
    return out


def _config(num_rows: int, num_heads: int, head_dim: int) -> DecodeConfig:
    """What runs fastest for a batch of this shape; of constants alone, so that a row's bits are."""
    few, padded = num_rows <= 4, head_dim & (head_dim - 1) != 0
    tile_heads = 2 if few and not padded else 4
    groups = num_rows * triton.cdiv(num_heads, tile_heads)
    return DecodeConfig(
        num_tokens=8 if few or padded else 16,
        num_heads=tile_heads,
        num_warps=max(1, tile_heads * triton.next_power_of_2(head_dim) // 256),  # 8 elements of a token a thread
        num_stages=2 if padded and not few else 1,
        max_splits=min(_MOST_SPLITS, max(_FEWEST_SPLITS * (2 if padded else 1), _BUSY_PROGRAMS // groups)),
        min_split=max(8, min(64, 2 * num_rows)),
    )


def _options(device: torch.device, num_warps: int) -> dict[str, object]:
    """Launch options; products may fuse with sums here, for no library's bits are to be met."""
    options = launch_options(device, num_warps=num_warps)
    return options if INTERPRETED else options | {"enable_fp_fusion": True}


@triton.jit
def _split_tokens(length, max_splits: tl.constexpr, min_split: tl.constexpr, tile_tokens: tl.constexpr):
    """Tokens of each split of a row, whole tiles; the last split may have fewer."""
    num_splits = tl.minimum(tl.maximum((length + min_split - 1) // min_split, 1), max_splits)
    tokens = (length + num_splits - 1) // num_splits
    return (tokens + tile_tokens - 1) // tile_tokens * tile_tokens


@triton.jit(do_not_specialize=["table_stride"])
def _attend_split(
    q_ptr,  # [N, H, d]
    arena_ptr,  # [num_blocks, planes, 2, block_size, C, d]
    planes_ptr,  # [N]
    positions_ptr,  # [N]
    tables_ptr,  # [N, B]
    parts_ptr,  # [N, H, S, d] float32: values of a split, weighted by 2^(score - peak)
    weights_ptr,  # [N, H, S, 2] float32: its peak, and the sum of its weights
    scale,  # times log2(e)
    q_row_stride,
    q_head_stride,
    block_stride,
    table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile_heads: tl.constexpr,
    stages: tl.constexpr,
    max_splits: tl.constexpr,
    min_split: tl.constexpr,
    tile_tokens: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (row and head group, split): some heads of one row over one split of its keys.

    Axes of a tile are (head, token, d). The compiler deals the first and last of them to threads before the middle one,
    so that a thread holds the same heads and elements of every token, and only the sum of q * k over d crosses threads.
    """
    let_next_start(pdl)
    num_groups: tl.constexpr = (num_heads + tile_heads - 1) // tile_heads
    token_stride: tl.constexpr = num_kv_heads * head_dim
    row = tl.program_id(0) // num_groups
    split = tl.program_id(1)
    heads = tl.program_id(0) % num_groups * tile_heads + tl.arange(0, tile_heads)
    dims = tl.arange(0, padded_dim)
    inside = (heads[:, None] < num_heads) & (dims[None, :] < head_dim)  # [heads, d]

    # What the step was given is read while the kernel before still runs.
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    plane = tl.load(planes_ptr + row).to(tl.int64) * (2 * block_size * token_stride)
    split_tokens = _split_tokens(length, max_splits, min_split, tile_tokens)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, length)
    table = tables_ptr + row.to(tl.int64) * table_stride
    block = tl.load(table + tl.minimum(start, tl.maximum(length - 1, 0)) // block_size).to(tl.int64)
    tokens = tl.arange(0, tile_tokens)
    if num_heads == num_kv_heads:
        kv_heads = heads
    else:
        kv_heads = heads // (num_heads // num_kv_heads)
    wait_for_previous(pdl)
    if start >= length:
        return
    q_ptrs = q_ptr + row.to(tl.int64) * q_row_stride + heads[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0).to(tl.float32) * scale

    offsets = kv_heads[:, None] * head_dim + dims[None, :]
    offsets = offsets[:, None, :] + tokens[None, :, None] * token_stride

    peak = tl.full([tile_heads], _LOWEST, tl.float32)
    total = tl.zeros([tile_heads], tl.float32)
    mixed = tl.zeros([tile_heads, padded_dim], tl.float32)
    for first in tl.range(loop_bound(start), loop_bound(end), tile_tokens, num_stages=stages):
        keys = arena_ptr + (block * block_stride + plane + first % block_size * token_stride)
        # The next tile's block is asked for before this tile's keys, so that its latency is hidden behind theirs.
        block = tl.load(table + tl.minimum(first + tile_tokens, end - 1) // block_size).to(tl.int64)
        visible = first + tokens < end
        mask = inside[:, None, :] & visible[None, :, None]
        k = tl.load(keys + offsets, mask=mask, other=0.0)
        v = tl.load(keys + block_size * token_stride + offsets, mask=mask, other=0.0)
        scores = tl.sum(q[:, None, :] * k.to(tl.float32), axis=2)  # [heads, tokens]
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * v.to(tl.float32), axis=1)
        peak = new_peak

    slots = (row.to(tl.int64) * num_heads + heads) * max_splits + split
    tl.store(weights_ptr + slots * 2, peak, mask=heads < num_heads)
    tl.store(weights_ptr + slots * 2 + 1, total, mask=heads < num_heads)
    tl.store(parts_ptr + slots[:, None] * head_dim + dims[None, :], mixed, mask=inside)


@triton.jit
def _merge_splits(
    positions_ptr,  # [N]
    parts_ptr,  # [N, H, S, d] float32
    weights_ptr,  # [N, H, S, 2] float32
    out_ptr,  # [N, H, d]
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    split_lanes: tl.constexpr,
    max_splits: tl.constexpr,
    min_split: tl.constexpr,
    tile_tokens: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (row and head): the splits that the row has, put together."""
    let_next_start(pdl)
    index = tl.program_id(0).to(tl.int64)
    length = tl.load(positions_ptr + index // num_heads).to(tl.int32) + 1
    wait_for_previous(pdl)
    splits = tl.arange(0, split_lanes)
    used = splits * _split_tokens(length, max_splits, min_split, tile_tokens) < length
    dims = tl.arange(0, padded_dim)
    slots = index * max_splits + splits
    mask = used[:, None] & (dims[None, :] < head_dim)
    peaks = tl.load(weights_ptr + slots * 2, mask=used, other=_LOWEST)
    totals = tl.load(weights_ptr + slots * 2 + 1, mask=used, other=0.0)
    parts = tl.load(parts_ptr + slots[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
    shares = tl.exp2(peaks - tl.max(peaks, axis=0))
    total = tl.sum(shares * totals, axis=0)
    mixed = tl.sum(shares[:, None] * parts, axis=0) / tl.where(length > 0, total, 1.0)
    tl.store(out_ptr + index * head_dim + dims, mixed.to(out_ptr.dtype.element_ty), mask=dims < head_dim)
