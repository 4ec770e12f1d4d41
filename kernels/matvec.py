"""Products of a few rows with a weight matrix, on CUDA cores: as fast as the weights can be read.

A program owns a few weight rows. It loads all of them into registers, 16 bytes a load, before it waits for the kernel
before, so that the weights of one product stream in while the previous one drains; then it reads every row of x, which
by that time lie in L2. `kernels.skinny_linear` takes over where multiplying would take longer than loading, and shares
`check_operands` and `gate_times_up`. `kernels.triton_ops` calls both.

A row's sums run in an order that the feature counts alone decide: its bits depend neither on other rows nor on their
number. Twins: `kernels.reference.linear` and `kernels.reference.gated_linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import silu
from kernels.launch import INTERPRETED, launch_options, let_next_start, wait_for_previous

MAX_ROWS = 8
"""More rows than this are refused: every one costs a multiplication per weight."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class MatvecConfig:
    """How a matrix is cut: a program takes `rows` weight rows (of gate and up together, where both are there), and its
    `num_warps` warps read `256 * num_warps` consecutive elements of each at a time.
    """

    rows: int
    num_warps: int

    @property
    def block_k(self) -> int:
        """Elements of a row that the program reads at once: 8, which is 16 bytes, a thread."""
        return 256 * self.num_warps


def matvec(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] by the rows of weight [M, K], both bfloat16, N at most `MAX_ROWS`: [N, M].

    Sums are float32, rounded once. K is a multiple of 8, and rows of x lie K apart or further; ValueError otherwise.
    """
    return matvec_tuned(x, weight, _config(x.shape[0], weight.shape[1], gated=False))


def gated_matvec(x: Tensor, gate_up: Tensor) -> Tensor:
    """`silu(x @ gate^T) * (x @ up^T)` for x [N, K] and gate_up [2F, K], the gate in the first F rows: [N, F].

    The bits of `silu_mul(matvec(x, gate_up))`, on a CUDA device. Demands what `matvec` does.
    """
    return gated_matvec_tuned(x, gate_up, _config(x.shape[0], gate_up.shape[1], gated=True))


def matvec_tuned(x: Tensor, weight: Tensor, config: MatvecConfig) -> Tensor:
    """`matvec` cut as `config` says; `config.num_warps` alone decides the order of the sums."""
    check_operands(x, weight, MAX_ROWS)
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _matvec_kernel[(triton.cdiv(num_out, config.rows),)](
        x,
        weight,
        out,
        num_out,
        x.stride(0),
        K=num_in,
        N=num_rows,
        BATCH=triton.next_power_of_2(num_rows),
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        **launch_options(x.device, config.num_warps),
    )
    return out


def gated_matvec_tuned(x: Tensor, gate_up: Tensor, config: MatvecConfig) -> Tensor:
    """`gated_matvec` cut as `config` says, whose `rows` is even."""
    check_operands(x, gate_up, MAX_ROWS)
    (num_rows, num_in), num_out = x.shape, gate_up.shape[0] // 2
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _gated_matvec_kernel[(triton.cdiv(num_out, config.rows // 2),)](
        x,
        gate_up,
        out,
        num_out,
        x.stride(0),
        K=num_in,
        N=num_rows,
        BATCH=triton.next_power_of_2(num_rows),
        ROWS=config.rows // 2,
        BLOCK_K=config.block_k,
        **launch_options(x.device, config.num_warps),
    )
    return out


def _config(num_rows: int, num_in: int, *, gated: bool) -> MatvecConfig:
    """At most 24 KB of weights a program, where that is a row or more: 48 registers a thread; half of it for a single
    row of x, where more and smaller programs stream better. The number of warps must not depend on the batch, nor on
    `gated`.
    """
    room = max(1, min(16, (12 if num_rows == 1 else 24) * 1024 // (2 * num_in)))
    rows = triton.next_power_of_2(room + 1) // 2
    return MatvecConfig(rows=max(rows, 2) if gated else rows, num_warps=4 if num_in <= 8192 else 8)


def check_operands(x: Tensor, weight: Tensor, max_rows: int) -> None:
    """ValueError unless x [N, K] and weight [M, K] are what these products can read."""
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}, not bfloat16")
    if x.shape[1] != weight.shape[1] or x.shape[1] % 8:
        raise ValueError(f"x has {x.shape[1]} columns and weight {weight.shape[1]}: equal multiples of 8 are needed")
    if not 1 <= x.shape[0] <= max_rows:
        raise ValueError(f"{x.shape[0]} rows; from 1 to {max_rows} are possible")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x has columns {x.stride(1)} apart, or weight is not contiguous")


@triton.jit
def gate_times_up(gate, up):
    """`silu(gate) * up` of float32 sums, with torch's roundings to bfloat16 at every step of its own: bfloat16."""
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    return (silu(gate, _INTERPRETED).to(tl.bfloat16).to(tl.float32) * up).to(tl.bfloat16)


@triton.jit
def _load_rows(weight, first_row, num_out, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weight rows [ROWS, K], as a tuple of tiles [ROWS, BLOCK_K]; rows past the last repeat it, columns are zero."""
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_out - 1)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    starts = weight + rows.to(tl.int64) * K
    tiles = ()  # type: tuple[object, ...]
    for start in tl.static_range(0, K, BLOCK_K):
        if start + BLOCK_K <= K:
            tile = tl.load(starts + start + columns, eviction_policy="evict_first")
        else:
            tile = tl.load(starts + start + columns, start + columns < K, 0.0, eviction_policy="evict_first")
        tiles = tiles + (tile,)  # noqa: RUF005 # the compiler knows no unpacking
    return tiles


@triton.jit
def _load_x(x, start: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[1, BLOCK_K] float32 of one row of x, from column `start`; zero past its end."""
    columns = start + tl.arange(0, BLOCK_K)[None, :]
    if start + BLOCK_K <= K:
        values = tl.load(x + columns, eviction_policy="evict_last")
    else:
        values = tl.load(x + columns, columns < K, 0.0, eviction_policy="evict_last")
    return values.to(tl.float32)


@triton.jit
def _add_products(sums, tile, x, x_stride, start: tl.constexpr, K: tl.constexpr):
    """Every row of x times a tile [ROWS, BLOCK_K] at column `start`, added to that row's sums in the tuple."""
    weights = tile.to(tl.float32)
    added = ()  # type: tuple[object, ...]
    for row in tl.static_range(len(sums)):
        values = _load_x(x + row * x_stride, start, K, tile.shape[1])
        row_sums = tl.fma(weights, tl.broadcast_to(values, tile.shape), sums[row])
        added = added + (row_sums,)  # noqa: RUF005 # the compiler knows no unpacking
    return added


@triton.jit
def _zero_sums(N: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    sums = ()  # type: tuple[object, ...]
    for _ in tl.static_range(N):
        sums = sums + (tl.zeros((ROWS, BLOCK_K), tl.float32),)  # noqa: RUF005 # the compiler knows no unpacking
    return sums


@triton.jit
def _total(sums, BATCH: tl.constexpr):
    """Sums [ROWS, BLOCK_K] of every row of x, summed over columns in one pass: [ROWS, BATCH], BATCH a power of two."""
    for _ in tl.static_range(BATCH - len(sums)):
        sums = sums + (tl.zeros_like(sums[0]),)  # noqa: RUF005 # the compiler knows no unpacking
    if BATCH == 1:
        total = tl.sum(sums[0], 1)
    elif BATCH == 2:
        total = tl.sum(tl.join(sums[0], sums[1]), 1)
    elif BATCH == 4:
        evens, odds = tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3])
        total = tl.sum(tl.join(evens, odds), 1)
    else:
        evens = tl.join(tl.join(sums[0], sums[4]), tl.join(sums[2], sums[6]))
        odds = tl.join(tl.join(sums[1], sums[5]), tl.join(sums[3], sums[7]))
        total = tl.sum(tl.join(evens, odds), 1)
    return total.reshape(sums[0].shape[0], BATCH)


@triton.jit
def _store(out, values, first_row, num_out, N: tl.constexpr):
    """Write values [ROWS, BATCH] to the first N rows of out [N, num_out]."""
    rows = first_row + tl.arange(0, values.shape[0])[:, None]
    batch = tl.arange(0, values.shape[1])[None, :]
    tl.store(out + batch * num_out + rows, values.to(tl.bfloat16), (rows < num_out) & (batch < N))


@triton.jit
def _matvec_kernel(
    x,  # [N, K]
    weight,  # [M, K]
    out,  # [N, M]
    num_out,
    x_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,  # the power of two not below N
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    pdl: tl.constexpr,
):
    let_next_start(pdl)
    first_row = tl.program_id(0) * ROWS
    tiles = _load_rows(weight, first_row, num_out, K, ROWS, BLOCK_K)
    wait_for_previous(pdl)
    sums = _zero_sums(N, ROWS, BLOCK_K)
    for tile in tl.static_range(len(tiles)):
        sums = _add_products(sums, tiles[tile], x, x_stride, tile * BLOCK_K, K)
    _store(out, _total(sums, BATCH), first_row, num_out, N)


@triton.jit
def _gated_matvec_kernel(
    x,  # [N, K]
    weight,  # [2F, K]
    out,  # [N, F]
    num_out,  # F
    x_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,  # the power of two not below N
    ROWS: tl.constexpr,  # of the gate, and as many of up
    BLOCK_K: tl.constexpr,
    pdl: tl.constexpr,
):
    let_next_start(pdl)
    first_row = tl.program_id(0) * ROWS
    gates = _load_rows(weight, first_row, num_out, K, ROWS, BLOCK_K)
    ups = _load_rows(weight + num_out.to(tl.int64) * K, first_row, num_out, K, ROWS, BLOCK_K)
    wait_for_previous(pdl)
    gate_sums = _zero_sums(N, ROWS, BLOCK_K)
    up_sums = _zero_sums(N, ROWS, BLOCK_K)
    for tile in tl.static_range(len(gates)):
        gate_sums = _add_products(gate_sums, gates[tile], x, x_stride, tile * BLOCK_K, K)
        up_sums = _add_products(up_sums, ups[tile], x, x_stride, tile * BLOCK_K, K)
    products = gate_times_up(_total(gate_sums, BATCH), _total(up_sums, BATCH))
    _store(out, products, first_row, num_out, N)
