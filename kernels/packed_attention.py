"""Attention of packed runs of rows; `kernels.triton_ops` calls it for a `PackedPlan` or a `TiledPlan`.

A program takes a tile of consecutive rows of one run and one head, and walks over tiles of keys with a running softmax
(Dao, "FlashAttention-2", 2023). Keys are gathered through the block table; a chunk's own keys are in the arena before
the call. Key tiles stand at fixed positions and are taken in order, and one that a row does not see changes none of its
bits, so a row's bits depend on its position and keys alone, however its prompt was cut into runs.

Shape letters are those of `kernels.ops`; here also T tiles of rows, M rows of a tile, S keys of a tile.
"""

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRETED, launch_options, let_next_start, loop_bound, wait_for_previous
from kernels.ops import PackedPlan, TiledPlan, tiles_of


@dataclass(frozen=True)
class PackedConfig:
    """How the work is cut; a result's bits depend on it."""

    num_rows: int
    """Rows of a tile, a power of two."""
    num_keys: int
    """Keys of a tile, a power of two."""
    num_warps: int
    num_stages: int
    """Key tiles in flight to shared memory, ahead of their use."""
    mask_all: bool
    """One loop that hides keys in every tile, rather than a second one for those that some row does not see whole."""
    max_registers: int | None = None
    """Of a thread, for more programs on a multiprocessor; none: as many as the compiler likes."""


_INTERPRETED = tl.constexpr(INTERPRETED)
_tiles_of_plans: WeakKeyDictionary[PackedPlan, dict[tuple[int, torch.device], Tensor]] = WeakKeyDictionary()
"""Worked out at the first of a step's many calls; by rows of a tile and device."""


def packed_attention(q: Tensor, arena: Tensor, planes: Tensor, plan: PackedPlan | TiledPlan, scale: float) -> Tensor:
    """Attention of q [N, H, d] over the keys at each row's position and before: [N, H, d]; zero for padding rows.

    `arena` [num_blocks, planes, 2, block_size, C, d] is contiguous, and H a multiple of C; of `planes` [N] int64 a
    run's first row counts. A row's last axis is contiguous in q. Nothing behind a run's last position is read.
    """
    return packed_attention_tuned(q, arena, planes, plan, scale, _config(q.dtype))


def packed_attention_tuned(
    q: Tensor, arena: Tensor, planes: Tensor, plan: PackedPlan | TiledPlan, scale: float, config: PackedConfig
) -> Tensor:
    """`packed_attention`, cut as `config` says."""
    num_rows, num_heads, head_dim = q.shape
    _, num_planes, _, block_size, num_kv_heads, _ = arena.shape
    assert q.stride(2) == 1 and arena.is_contiguous() and num_heads % num_kv_heads == 0
    assert planes.is_contiguous() and plan.block_tables.stride(1) == 1
    if isinstance(plan, TiledPlan):
        tiles, has_padding = plan.tiles, True
    else:
        tiles = _row_tiles(plan, config.num_rows, q.device)
        has_padding = sum(run.num_rows for run in plan.runs) < num_rows
    # Rows in no tile are padding, which no program writes.
    out = (torch.zeros if has_padding else torch.empty)(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    options = launch_options(q.device, num_warps=config.num_warps, num_stages=config.num_stages)
    if not INTERPRETED:
        # Products may fuse with sums: no library's bits are to be met here.
        options |= {"enable_fp_fusion": True, "maxnreg": config.max_registers}
    plane_stride = 2 * block_size * num_kv_heads * head_dim
    _attend_tile[(len(tiles) * num_heads,)](
        q,
        arena,
        planes,
        plan.block_tables,
        tiles,
        out,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        num_planes * plane_stride,
        plan.block_tables.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_dim=max(16, triton.next_power_of_2(head_dim)),
        block_size=block_size,
        tile_rows=config.num_rows,
        tile_keys=config.num_keys,
        mask_all=config.mask_all,
        **options,
    )
    return out


def _config(dtype: torch.dtype) -> PackedConfig:
    """What runs fastest; the same for every plan, so that a row's bits depend on no other."""
    if dtype == torch.float32:
        return PackedConfig(num_rows=16, num_keys=16, num_warps=4, num_stages=1, mask_all=False)
    return PackedConfig(num_rows=128, num_keys=64, num_warps=8, num_stages=3, mask_all=False, max_registers=128)


def tile_rows(dtype: torch.dtype) -> int:
    """Rows that a `TiledPlan`'s tiles may have, for q of this dtype."""
    return _config(dtype).num_rows


def _row_tiles(plan: PackedPlan, tile_rows: int, device: torch.device) -> Tensor:
    """The plan's tiles of `tile_rows` rows [T, 4], on the device."""
    by_size = _tiles_of_plans.setdefault(plan, {})
    if (tile_rows, device) not in by_size:
        tiles = torch.tensor(tiles_of(plan.runs, tile_rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        by_size[tile_rows, device] = tiles.to(device, non_blocking=True)
    return by_size[tile_rows, device]


@triton.jit
def _dot(a, b, start, precise: tl.constexpr):
    """`start` [m, n] float32, and the product of a [m, k] and b [k, n] on top."""
    if _INTERPRETED:  # it would multiply the bit patterns of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if precise:
        return tl.dot(a, b, start, input_precision="ieee")
    return tl.dot(a, b, start)


@triton.jit
def _mix(
    scores,  # [M, S]
    scale,  # above zero
    v,  # [S, d]
    peak,  # [M], scaled
    total,  # [M]
    mixed,  # [M, d]
    precise: tl.constexpr,
):
    """The running softmax after one more tile of keys: its peak, sum of weights and weighted values."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = _dot(weights.to(v.dtype), v, mixed * shrink[:, None], precise)
    return new_peak, total, mixed


@triton.jit(do_not_specialize=["table_stride"])
def _attend_tile(
    q_ptr,  # [N, H, d]
    arena_ptr,  # [num_blocks, planes, 2, block_size, C, d]
    planes_ptr,  # [N]
    tables_ptr,  # [R, B]
    tiles_ptr,  # [T, 4]
    out_ptr,  # [N, H, d]
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
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    mask_all: tl.constexpr,
    pdl: tl.constexpr,
):
    """Program (tile and head): one head of a tile of rows."""
    let_next_start(pdl)
    token_stride: tl.constexpr = num_kv_heads * head_dim
    precise: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    head = tl.program_id(0) % num_heads
    record = tiles_ptr + tl.program_id(0) // num_heads * 4
    run = tl.load(record).to(tl.int64)
    first_row = tl.load(record + 1).to(tl.int64)
    num_rows = tl.load(record + 2)
    first_position = tl.load(record + 3)
    plane = tl.load(planes_ptr + first_row).to(tl.int64) * (2 * block_size * token_stride)
    table = tables_ptr + run * table_stride
    wait_for_previous(pdl)

    rows = tl.arange(0, tile_rows)
    keys = tl.arange(0, tile_keys)
    dims = tl.arange(0, padded_dim)
    real = (rows < num_rows)[:, None] & (dims < head_dim)[None, :]
    q_ptrs = q_ptr + first_row * q_row_stride + head * q_head_stride + rows[:, None] * q_row_stride + dims[None, :]
    q = tl.load(q_ptrs, mask=real, other=0.0)
    key_ptr = arena_ptr + (plane + head // (num_heads // num_kv_heads) * head_dim)
    value_ptr = key_ptr + block_size * token_stride

    peak = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.full([tile_rows], 0.0, tl.float32)
    mixed = tl.full([tile_rows, padded_dim], 0.0, tl.float32)
    no_scores = tl.full([tile_rows, tile_keys], 0.0, tl.float32)
    end = first_position + num_rows
    # Every row sees the tiles of keys before this position whole.
    seen_whole = 0
    if not mask_all:
        seen_whole = (first_position + 1) // tile_keys * tile_keys
        for start in tl.range(0, loop_bound(seen_whole), tile_keys):
            blocks = tl.load(table + (start + keys) // block_size).to(tl.int64)
            offsets = blocks * block_stride + (start + keys) % block_size * token_stride
            offsets = offsets[:, None] + dims[None, :]
            if head_dim == padded_dim:
                k = tl.load(key_ptr + offsets).to(q.dtype)
                v = tl.load(value_ptr + offsets).to(q.dtype)
            else:
                k = tl.load(key_ptr + offsets, mask=(dims < head_dim)[None, :], other=0.0).to(q.dtype)
                v = tl.load(value_ptr + offsets, mask=(dims < head_dim)[None, :], other=0.0).to(q.dtype)
            scores = _dot(q, tl.trans(k), no_scores, precise)
            peak, total, mixed = _mix(scores, scale, v, peak, total, mixed, precise)
    for start in tl.range(loop_bound(seen_whole), loop_bound(end), tile_keys):
        positions = start + keys
        blocks = tl.load(table + positions // block_size, mask=positions < end, other=0).to(tl.int64)
        offsets = blocks * block_stride + positions % block_size * token_stride
        offsets = offsets[:, None] + dims[None, :]
        # Behind the last position the arena may hold anything, NaN too, which a weight of zero would not hide.
        written = (positions < end)[:, None] & (dims < head_dim)[None, :]
        k = tl.load(key_ptr + offsets, mask=written, other=0.0).to(q.dtype)
        v = tl.load(value_ptr + offsets, mask=written, other=0.0).to(q.dtype)
        visible = positions[None, :] <= (first_position + rows)[:, None]
        scores = tl.where(visible, _dot(q, tl.trans(k), no_scores, precise), float("-inf"))
        peak, total, mixed = _mix(scores, scale, v, peak, total, mixed, precise)

    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # an empty tile has seen nothing
    out_ptrs = out_ptr + (first_row * num_heads + head) * head_dim
    out_ptrs = out_ptrs + rows[:, None] * (num_heads * head_dim) + dims[None, :]
    tl.store(out_ptrs, mixed.to(out_ptr.dtype.element_ty), mask=real)
