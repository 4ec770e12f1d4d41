"""RMS norms as Triton kernels, alone and fused with the residual sum before a norm; `kernels.triton_ops` calls them.

On CUDA they give the bits of the plain twins in `kernels.reference`: every intermediate is rounded where torch's own
kernels round it, and a row's squares are summed in the order of torch's `mean` over the last dimension. That order
depends on the number of rows (see `reduction_width`).

Shape letters: N rows, E width; B torch threads that share a row, G steps of them, each of B * 4 elements, in a tile. A
row is a tuple of tiles [G, B, 4], padded with zeros.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import INTERPRETED, launch_options, let_next_start, wait_for_previous

_VECTOR = 4
"""Elements that a thread of torch's reduction loads at a time, each into a sum of its own."""
_MAX_THREADS = 512
"""Threads of a block of torch's reduction."""
_WARP = 32
_WARPS_ALONE, _WARPS_SHARED = 4, 2
"""Of a program, measured: for fewer than 16 rows, and from there on, where 32 threads of torch's share a row."""
_STEPS_APART = 16
"""Up to so many steps each is a tile of its own, whose sums stay where its elements are. The compiler's time grows with
the cube of the number of tiles, so a longer row has tiles of several steps; these change threads to be summed.
"""
_TILE = 2048
"""Elements of a tile of several steps: 16 of each thread."""


class _Order(NamedTuple):
    """How a row is loaded and summed: what a launch passes to a kernel, by the kernels' argument names."""

    E: int
    B: int
    G: int
    TILES: int
    B_LEVELS: int  # log2(B)
    G_LEVELS: int  # log2(G)
    HALVING: bool  # see `torch_halves_warps`
    factor: float  # 1 / E


def reduction_width(num_rows: int, width: int) -> int:
    """How many threads share a row in torch's float32 `mean` over the last dimension of a contiguous [N, E].

    Torch's reduction (`ATen/native/cuda/Reduce.cuh`) loads 4 adjacent elements at a time where E >= 128, so a row
    asks for E / 4 threads and the block for N rows; both are rounded down to powers of two, at most 512. A block is
    first 32 threads wide, then as high as rows and 512 threads allow, then as wide as that height allows:

        height = min(pow2(N), 512 / min(pow2(E / 4), 32)),  B = min(pow2(E / 4), 512 / height)

    Thread t adds elements 4 * (t + k * B) + j for k = 0, 1, ... into sum j of 4, then ((s0 + s1) + s2) + s3; the
    threads' sums are added in a tree: t and t + B / 2, t and t + B / 4, ... down to 32 of them, and these 32 as
    `torch_halves_warps` says. Below 8192 elements a row is never split further. Elsewhere (E < 128, E % 4 != 0,
    E >= 8192) torch has other orders, and ours agrees with them only within rounding.
    """
    by_width = min(_floor_power_of_two(width // _VECTOR), _MAX_THREADS)
    height = min(_floor_power_of_two(num_rows), _MAX_THREADS // min(by_width, _WARP))
    return min(by_width, _MAX_THREADS // height)


def _floor_power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


@functools.cache
def torch_halves_warps(device: torch.device) -> bool:
    """Whether torch's reduction adds its last 32 sums by halves (t and t + 16, then 8, ...), not by neighbours (1, 2).

    Releases differ, so it is seen from a row of which halves lose the 1: 2**24 + 1 is 2**24 in float32. The first call
    for a device waits for it, and so must not be inside a graph capture. True in the interpreter.
    """
    if INTERPRETED:
        return True
    row = torch.zeros(1, _VECTOR * _WARP)
    row[0, 0], row[0, _VECTOR], row[0, 16 * _VECTOR] = 2.0**24, -(2.0**24), 1.0
    return row.to(device).mean(dim=-1).item() == 0.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * cast(x32 * rsqrt(mean(x32^2) + eps))` for contiguous x [N, E] and weight [E]: [N, E]."""
    assert x.is_contiguous() and weight.is_contiguous()
    out = torch.empty_like(x)
    order = _order(x)
    _rms_norm_kernel[(x.shape[0],)](x, weight, out, eps, **order._asdict(), **launch_options(x.device, _num_warps(x)))
    return out


def norm_add_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`s = residual + rms_norm(branch, weight)` and `rms_norm(s, next_weight)`, each [N, E]; inputs are contiguous."""
    return _two_norms(residual, branch, weight, next_weight, eps, add_first=False)


def add_norm_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`s = rms_norm(branch + residual, weight)` and `rms_norm(s, next_weight)`, each [N, E]; inputs are contiguous."""
    return _two_norms(residual, branch, weight, next_weight, eps, add_first=True)


def _two_norms(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
    *,
    add_first: bool,
) -> tuple[Tensor, Tensor]:
    assert (
        residual.is_contiguous() and branch.is_contiguous() and weight.is_contiguous() and next_weight.is_contiguous()
    )
    state, normed = torch.empty_like(branch), torch.empty_like(branch)
    _two_norms_kernel[(branch.shape[0],)](
        residual,
        branch,
        weight,
        next_weight,
        state,
        normed,
        eps,
        ADD_FIRST=add_first,
        **_order(branch)._asdict(),
        **launch_options(branch.device, _num_warps(branch)),
    )
    return state, normed


def _num_warps(x: Tensor) -> int:
    return _WARPS_ALONE if len(x) < 16 else _WARPS_SHARED


def _order(x: Tensor) -> _Order:
    num_rows, width = x.shape
    threads = reduction_width(num_rows, width)
    steps = -(-width // (_VECTOR * threads))
    group = 1 if steps <= _STEPS_APART else _TILE // (_VECTOR * threads)
    return _Order(
        E=width,
        B=threads,
        G=group,
        TILES=-(-steps // group),
        B_LEVELS=threads.bit_length() - 1,
        G_LEVELS=group.bit_length() - 1,
        HALVING=torch_halves_warps(x.device),
        factor=1.0 / width,
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [N, E]
    weight_ptr,  # [E]
    out_ptr,  # [N, E]
    eps,
    factor,
    E: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    B_LEVELS: tl.constexpr,
    G_LEVELS: tl.constexpr,
    HALVING: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program makes one row."""
    let_next_start(pdl)
    weight = _load_row(weight_ptr, E, B, G, TILES)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64) * E
    x = _load_row(x_ptr + row, E, B, G, TILES)
    normed = _normed(x, weight, eps, factor, B, G, TILES, B_LEVELS, G_LEVELS, HALVING)
    _store_row(out_ptr + row, normed, E, B, G, TILES)


@triton.jit
def _two_norms_kernel(
    residual_ptr,  # [N, E], as branch, state and normed are
    branch_ptr,
    weight_ptr,  # [E], as next_weight is
    next_weight_ptr,
    state_ptr,
    normed_ptr,
    eps,
    factor,
    E: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    B_LEVELS: tl.constexpr,
    G_LEVELS: tl.constexpr,
    HALVING: tl.constexpr,
    ADD_FIRST: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program makes one row, which stays in registers between the norms. All its loads are issued before any use."""
    let_next_start(pdl)
    weight = _load_row(weight_ptr, E, B, G, TILES)
    next_weight = _load_row(next_weight_ptr, E, B, G, TILES)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64) * E
    branch = _load_row(branch_ptr + row, E, B, G, TILES)
    residual = _load_row(residual_ptr + row, E, B, G, TILES)
    if ADD_FIRST:
        total = _sum(branch, residual, TILES)
        state = _normed(total, weight, eps, factor, B, G, TILES, B_LEVELS, G_LEVELS, HALVING)
    else:
        normed = _normed(branch, weight, eps, factor, B, G, TILES, B_LEVELS, G_LEVELS, HALVING)
        state = _sum(residual, normed, TILES)
    _store_row(state_ptr + row, state, E, B, G, TILES)
    normed = _normed(state, next_weight, eps, factor, B, G, TILES, B_LEVELS, G_LEVELS, HALVING)
    _store_row(normed_ptr + row, normed, E, B, G, TILES)


@triton.jit
def _with(row, value):
    return row + (value,)  # noqa: RUF005 # the compiler knows no unpacking


@triton.jit
def _columns(tile: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """[G, B, 4]: element j of thread t in step k is column 4 * (t + k * B) + j of the row."""
    step = tile * G + tl.arange(0, G)[:, None, None]
    return 4 * (tl.arange(0, B)[None, :, None] + step * B) + tl.arange(0, 4)[None, None, :]


@triton.jit
def _load_row(row_ptr, E: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr):
    row = ()
    for tile in tl.static_range(TILES):
        column = _columns(tile, B, G)
        if (tile + 1) * 4 * G * B <= E:
            value = tl.load(row_ptr + column)
        else:
            value = tl.load(row_ptr + column, mask=column < E, other=0.0)
        row = _with(row, value)
    return row


@triton.jit
def _store_row(row_ptr, row, E: tl.constexpr, B: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr):
    for tile in tl.static_range(TILES):
        column = _columns(tile, B, G)
        if (tile + 1) * 4 * G * B <= E:
            tl.store(row_ptr + column, row[tile])
        else:
            tl.store(row_ptr + column, row[tile], mask=column < E)


@triton.jit
def _sum(first, second, TILES: tl.constexpr):
    """Added in float32 and then rounded, as torch does it."""
    row = ()
    for tile in tl.static_range(TILES):
        total = first[tile].to(tl.float32) + second[tile].to(tl.float32)
        row = _with(row, total.to(first[tile].dtype))
    return row


@triton.jit
def _normed(
    row,
    weight,
    eps,
    factor,
    B: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    B_LEVELS: tl.constexpr,
    G_LEVELS: tl.constexpr,
    HALVING: tl.constexpr,
):
    scale = tl.rsqrt(_sum_of_squares(row, B, G, TILES, B_LEVELS, G_LEVELS, HALVING) * factor + eps)
    normed = ()
    for tile in tl.static_range(TILES):
        scaled = (row[tile].to(tl.float32) * scale).to(row[tile].dtype)
        product = weight[tile].to(tl.float32) * scaled.to(tl.float32)
        normed = _with(normed, product.to(scaled.dtype))
    return normed


@triton.jit
def _sum_of_squares(
    row,
    B: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    B_LEVELS: tl.constexpr,
    G_LEVELS: tl.constexpr,
    HALVING: tl.constexpr,
):
    """In the order that `reduction_width` describes; every sum below is of two operands, so layouts change no bit.

    Which operation adds them is chosen for the layout that the compiler makes of it. While there are more than 128 sums
    they lie in registers of one thread, and a reduction leaves them there. `split` wants its operands in one thread, so
    the next one moves the sums between warps, once, and gives all of them to each; the last 32 lie across a warp.
    """
    sums = tl.zeros([B, 4], tl.float32)
    for tile in tl.static_range(TILES):
        x = row[tile].to(tl.float32)
        steps = _with((), x * x)
        for level in tl.static_range(G_LEVELS):
            halves = ()
            for i in tl.static_range(1 << level):
                pair = tl.reshape(steps[i], [2, G >> (level + 1), B, 4])
                lower, upper = tl.split(tl.permute(pair, [1, 2, 3, 0]))
                halves = _with(_with(halves, lower), upper)
            steps = halves
        for i in tl.static_range(G):
            sums += tl.reshape(steps[i], [B, 4])
    even, odd = tl.split(tl.reshape(sums, [B, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    total = ((first + second) + third) + fourth
    for level in tl.static_range(B_LEVELS):
        if level < B_LEVELS - 7:
            total = tl.sum(tl.reshape(total, [2, B >> (level + 1)]), axis=0)
        elif level < B_LEVELS - 5:
            upper, lower = tl.split(tl.permute(tl.reshape(total, [2, B >> (level + 1)]), [1, 0]))
            total = upper + lower
        elif HALVING:
            total = tl.sum(tl.reshape(total, [2, B >> (level + 1)]), axis=0)
        else:
            total = tl.sum(tl.reshape(total, [B >> (level + 1), 2]), axis=1)
    return tl.sum(total)
