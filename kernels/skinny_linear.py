"""Products of a small batch with a weight matrix, on tensor cores: as fast as the weights can be read.

Weights are the large operand, so a program computes a transposed tile: some weight rows by the whole batch. Programs
share out both the weight rows and, where there are too few of them to keep every multiprocessor reading, the features
summed over (splits). Where tiles fill the multiprocessors a few times over and some are left, those alone are split.
The program that finishes a tile last adds up its splits in their order, so that which one that was has no influence on
the bits.

A program with few features reads all its weights into registers before it waits for the kernel before. A longer share
goes through a pipeline of copies to shared memory, which can start only when x is there. Bringing weights into L2 ahead
of the wait, here or from the small kernels between the products, was measured on an H200 and made steps slower.

The bits of a row depend on the shape of the weights and on which power of two holds the batch, not on other rows. The
engine's Triton operations call this; `kernels.matvec` serves the smallest batches. Twins: `kernels.reference.linear`
and `kernels.reference.gated_linear`.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRETED, launch_options, let_next_start, loop_bound, wait_for_previous
from kernels.matvec import check_operands, gate_times_up

MAX_ROWS = 128
"""More rows than this are refused: the batch would no longer fit one tile."""
_MIN_BATCH = 16
_MAX_TILES = 8192
_INTERPRETED = tl.constexpr(INTERPRETED)
_PROGRAMS = 132
"""The multiprocessors of an H200."""
_MOST_EACH = 3
"""Programs that a multiprocessor holds at most, where fewer would leave some with nothing to do."""
_WELL_FILLED = 0.9
"""Share of places for programs that is good enough."""
_TILE = 64
"""Weight rows of a program: the least that tensor cores want."""
_MOST_AT_ONCE = 512
"""Features that a program takes in one piece at most."""
_SHARED_BYTES = 216 * 1024
"""Shared memory of a multiprocessor for the programs that it holds."""


@dataclass(frozen=True)
class SkinnyConfig:
    """How a matrix is cut: a program takes `block_m` weight rows (of gate and of up each, where both are there) and one
    of `splits` parts of the features, `block_k` at a time, with `num_stages` such tiles on their way to shared memory.
    """

    block_m: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    num_whole: int = 0
    """How many tiles, from the first on, are not split."""


def skinny_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] by the rows of weight [M, K], both bfloat16, N at most `MAX_ROWS`: [N, M].

    Sums are float32, rounded once. K is a multiple of 8, and rows of x lie K apart or further; ValueError otherwise.
    """
    return skinny_linear_tuned(x, weight, _config(x.shape[0], *weight.shape, gated=False))


def gated_skinny_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """`silu(x @ gate^T) * (x @ up^T)` for x [N, K] and gate_up [2F, K], the gate in the first F rows: [N, F].

    On CUDA the bits of `silu_mul` of the product cut in the same way. Demands what `skinny_linear` does.
    """
    return gated_skinny_linear_tuned(x, gate_up, _config(x.shape[0], *gate_up.shape, gated=True))


def skinny_linear_tuned(x: Tensor, weight: Tensor, config: SkinnyConfig) -> Tensor:
    """`skinny_linear` cut as `config` says, of which all but `num_stages` may change the bits."""
    return _launch(x, weight, weight.shape[0], config, gated=False)


def gated_skinny_linear_tuned(x: Tensor, gate_up: Tensor, config: SkinnyConfig) -> Tensor:
    """`gated_skinny_linear` cut as `config` says."""
    return _launch(x, gate_up, gate_up.shape[0] // 2, config, gated=True)


def _launch(x: Tensor, weight: Tensor, num_out: int, config: SkinnyConfig, *, gated: bool) -> Tensor:
    check_operands(x, weight, MAX_ROWS)
    num_rows, num_in = x.shape
    batch = _batch(num_rows)
    tiles = triton.cdiv(num_out, config.block_m)
    if tiles > _MAX_TILES:
        raise ValueError(f"{num_out} features in tiles of {config.block_m}: more than {_MAX_TILES}")
    steps = triton.cdiv(num_in, config.block_k)
    num_whole = tiles if config.splits == 1 else min(config.num_whole, tiles)
    num_parts = (tiles - num_whole) * config.splits
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    num_partials = max(1, num_parts) * (2 if gated else 1) * config.block_m * batch
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    _skinny_kernel[(num_whole + num_parts,)](
        x,
        weight,
        out,
        partials,
        _arrivals(x.device),
        num_rows,
        num_out,
        x.stride(0),
        K=num_in,
        BATCH=batch,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        WHOLE=num_whole,
        SPLITS=config.splits if num_parts else 1,
        STEPS=steps,
        GATED=gated,
        **launch_options(x.device, config.num_warps, config.num_stages),
    )
    return out


def _batch(num_rows: int) -> int:
    """Columns of a tile: the power of two that holds the batch."""
    return max(_MIN_BATCH, 1 << (num_rows - 1).bit_length())


def _config(num_rows: int, num_weight_rows: int, num_in: int, *, gated: bool) -> SkinnyConfig:
    """What a multiprocessor holds is read at the same time, so that its programs share its memory. A short share of the
    features goes to registers in one piece, a longer one through a pipeline.
    """
    if gated:
        return _gated_config(num_rows, triton.cdiv(num_weight_rows // 2, _TILE), num_in)
    each, splits = _shares(triton.cdiv(num_weight_rows, _TILE), num_in)
    share = triton.cdiv(num_in, splits)
    if share <= _MOST_AT_ONCE and each == 1:
        block_k = max(_TILE, triton.next_power_of_2(share))
        return SkinnyConfig(_TILE, block_k, triton.cdiv(num_in, block_k), num_warps=8, num_stages=1)
    block_k = 2 * _TILE
    return SkinnyConfig(_TILE, block_k, splits, 4, _stages(each, block_k, _TILE + _batch(num_rows)))


def _gated_config(num_rows: int, tiles: int, num_in: int) -> SkinnyConfig:
    """Whole tiles for as many rounds as fill every multiprocessor, and what is left split over all of them."""
    num_whole = tiles // _PROGRAMS * _PROGRAMS
    block_k, each = (2 * _TILE, 1) if num_whole else (_TILE, 2)
    splits = max(1, min(_PROGRAMS // max(1, tiles - num_whole), triton.cdiv(num_in, 4 * block_k)))
    return SkinnyConfig(_TILE, block_k, splits, 4, _stages(each, block_k, 2 * _TILE + _batch(num_rows)), num_whole)


def _stages(each: int, block_k: int, num_rows: int) -> int:
    """Tiles [num_rows, block_k] for which a program has room where a multiprocessor holds `each` of them."""
    return max(2, min(8, _SHARED_BYTES // each // (2 * block_k * num_rows)))


def _shares(tiles: int, num_in: int) -> tuple[int, int]:
    """How many programs a multiprocessor is to hold, and into how many shares the features are split: the first number
    of programs that keeps nearly all of them busy at once, or the one that comes closest.
    """
    filled = []
    for each in range(1, _MOST_EACH + 1):
        splits = max(1, min(each * _PROGRAMS // tiles, triton.cdiv(num_in, _TILE)))
        rounds = triton.cdiv(tiles * splits, each * _PROGRAMS)
        filled.append((min(_WELL_FILLED, tiles * splits / (rounds * each * _PROGRAMS)), -each, splits))
    _, each, splits = max(filled)
    return -each, splits


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """How many splits of each tile are done: [_MAX_TILES] int32, zero between launches.

    Launches on one device share it, so they must be in one stream's order. The first must not be in a graph's capture.
    """
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


@triton.jit
def _dot(a, b, sums):
    """`sums + a @ b`. The interpreter would multiply the bits of bfloat16."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def _load(pointers, columns, K: tl.constexpr, FULL: tl.constexpr):
    """Weights that are read once; columns from K on are zeros, and there are none if FULL."""
    if FULL:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, columns < K, 0.0, eviction_policy="evict_first")


@triton.jit
def _sum_splits(partials, offsets, STRIDE: tl.constexpr, SPLITS: tl.constexpr):
    """The sum, in order, of SPLITS tiles that lie STRIDE apart."""
    total = tl.load(partials + offsets, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partials + split * STRIDE + offsets, cache_modifier=".cg")
    return total


@triton.jit
def _store(
    out,  # [N, num_out]
    first_sums,  # [BLOCK_M, BATCH]
    up_sums,  # [BLOCK_M, BATCH], used where GATED
    first_row,
    num_rows,
    num_out,
    GATED: tl.constexpr,
):
    rows = first_row + tl.arange(0, first_sums.shape[0])[:, None]
    batch = tl.arange(0, first_sums.shape[1])[None, :]
    if GATED:
        values = gate_times_up(first_sums, up_sums)
    else:
        values = first_sums.to(tl.bfloat16)
    tl.store(out + batch * num_out + rows, values, (rows < num_out) & (batch < num_rows))


@triton.jit
def _skinny_kernel(
    x,  # [N, K]
    weight,  # [M, K]; GATED: [2M, K]
    out,  # [N, M]
    partials,  # [tiles, SPLITS, 1 or 2, BLOCK_M, BATCH] float32
    arrivals,  # [tiles or more] int32, zero
    num_rows,
    num_out,  # M
    x_stride,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,  # tiles before those that are split
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,  # of BLOCK_K, in K
    GATED: tl.constexpr,
    pdl: tl.constexpr,
):
    let_next_start(pdl)
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    part = tl.program_id(0) - WHOLE  # of all parts of tiles that are split
    if SPLITS == 1:
        tile, split, steps = tl.program_id(0), 0, STEPS
    elif WHOLE == 0:
        tile, split, steps = part // SPLITS, part % SPLITS, SHARE
    else:
        tile = tl.where(part < 0, tl.program_id(0), WHOLE + part // SPLITS)
        split = tl.where(part < 0, 0, part % SPLITS)
        steps = tl.where(part < 0, STEPS, SHARE)
    first_row = tile * BLOCK_M
    first_column = split * (SHARE * BLOCK_K)
    up_weight = weight + num_out.to(tl.int64) * K
    rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), num_out - 1)[:, None].to(tl.int64)  # past the last: it again
    batch = tl.arange(0, BATCH)[:, None]
    FULL: tl.constexpr = K % (BLOCK_K * SPLITS) == 0
    sums = tl.zeros((BLOCK_M, BATCH), tl.float32)
    up_sums = tl.zeros((BLOCK_M, BATCH), tl.float32)
    if SHARE == 1 and WHOLE == 0:  # all that this program reads of the weights goes to registers before the wait
        columns = first_column + tl.arange(0, BLOCK_K)[None, :]
        w = _load(weight + rows * K + columns, columns, K, FULL)
        if GATED:
            up = _load(up_weight + rows * K + columns, columns, K, FULL)
        wait_for_previous(pdl)
        values = tl.load(x + batch * x_stride + columns, (batch < num_rows) & (columns < K), 0.0)
        sums = _dot(w, values.T, sums)
        if GATED:
            up_sums = _dot(up, values.T, up_sums)
    else:
        wait_for_previous(pdl)
        for step in tl.range(loop_bound(steps) if WHOLE > 0 and SPLITS > 1 else steps):
            columns = first_column + step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            w = _load(weight + rows * K + columns, columns, K, FULL)
            values = tl.load(x + batch * x_stride + columns, (batch < num_rows) & (columns < K), 0.0)
            sums = _dot(w, values.T, sums)
            if GATED:
                up_sums = _dot(_load(up_weight + rows * K + columns, columns, K, FULL), values.T, up_sums)

    if SPLITS == 1:  # noqa: SIM114 # the compiler is to see that nothing else remains
        _store(out, sums, up_sums, first_row, num_rows, num_out, GATED)
    elif part < 0:
        _store(out, sums, up_sums, first_row, num_rows, num_out, GATED)
    else:
        HALF: tl.constexpr = BLOCK_M * BATCH
        STRIDE: tl.constexpr = 2 * HALF if GATED else HALF
        offsets = tl.arange(0, BLOCK_M)[:, None] * BATCH + tl.arange(0, BATCH)[None, :]
        partials += (tile - WHOLE).to(tl.int64) * (SPLITS * STRIDE)
        tl.store(partials + split * STRIDE + offsets, sums)
        if GATED:
            tl.store(partials + split * STRIDE + HALF + offsets, up_sums)
        tl.debug_barrier()  # the whole program's partial sums come before its arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            sums = _sum_splits(partials, offsets, STRIDE, SPLITS)
            if GATED:
                up_sums = _sum_splits(partials + HALF, offsets, STRIDE, SPLITS)
            _store(out, sums, up_sums, first_row, num_rows, num_out, GATED)
            tl.store(arrivals + tile, 0)
