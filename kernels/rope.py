"""Rotation of queries and keys, and the write of keys and values to the arena, as one Triton kernel;
`kernels.triton_ops` calls it.

On CUDA it gives the bits of the plain twin in `kernels.reference`: each product and sum is rounded where torch's own
kernels round it.

Shape letters are those of `kernels.ops`; P pairs of elements that turn together, d/2 of each head.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch_options, let_next_start, wait_for_previous
from kernels.ops import RopeStyle

_PAIRS = 1024
"""Of a program: 8 of each thread, so that a thread loads 16 bytes of bfloat16 at a time."""


def rope_write_kv(
    qkv: Tensor,  # [N, H + 2C, d] contiguous: a row's queries, then keys, then values
    qk_bias: Tensor | None,  # [H + C, d] contiguous, added to queries and keys first
    cos: Tensor,  # [N, d/2] float32, contiguous as sin is
    sin: Tensor,  # [N, d/2] float32
    style: RopeStyle,
    arena: Tensor,  # [num_blocks, planes, 2, block_size, C, d] contiguous
    planes: Tensor,  # [N] int64
    slots: Tensor,  # [N] int64
) -> Tensor:
    """Write rotated keys, and values, to each row's slot of its plane; the rotated queries [N, H, d]. Rows may share a
    slot that nobody reads.
    """
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin, arena, planes, slots))
    assert qk_bias is None or qk_bias.is_contiguous()
    num_rows, num_heads, head_size = qkv.shape
    _, num_planes, _, block_size, num_kv_heads, _ = arena.shape
    q = qkv.new_empty(num_rows, num_heads - 2 * num_kv_heads, head_size)
    _rope_write_kv_kernel[(num_rows, triton.cdiv(num_heads * (head_size // 2), _PAIRS))](
        qkv,
        qk_bias,
        cos,
        sin,
        q,
        arena,
        planes,
        slots,
        PLANES=num_planes,
        BLOCK_SIZE=block_size,
        H=q.shape[1],
        C=num_kv_heads,
        D=head_size,
        PAIRS=_PAIRS,
        HALF_SPLIT=style is RopeStyle.HALF_SPLIT,
        HAS_BIAS=qk_bias is not None,
        **launch_options(qkv.device),
    )
    return q


@triton.jit
def _rope_write_kv_kernel(
    qkv_ptr,  # [N, H + 2C, d]
    bias_ptr,  # [H + C, d]
    cos_ptr,  # [N, d/2]
    sin_ptr,  # [N, d/2]
    q_ptr,  # [N, H, d]
    arena_ptr,  # [num_blocks, planes, 2, block_size, C, d]
    planes_ptr,  # [N]
    slots_ptr,  # [N]
    PLANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program moves PAIRS pairs of a row, whichever of queries, keys and values they belong to.

    A row of qkv, of q and of a slot's keys or values is flat here: only the place of a pair in its head matters.
    """
    let_next_start(pdl)
    HALF: tl.constexpr = D // 2
    HEADS: tl.constexpr = H + 2 * C
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    if HALF_SPLIT:
        first_at = pair // HALF * D + pair % HALF
        second_at = first_at + HALF
        if HAS_BIAS:
            first_bias = tl.load(bias_ptr + first_at, mask=pair < (H + C) * HALF)
            second_bias = tl.load(bias_ptr + second_at, mask=pair < (H + C) * HALF)
    else:
        at = 2 * tl.program_id(1) * PAIRS + tl.arange(0, 2 * PAIRS)
        if HAS_BIAS:
            first_bias, second_bias = _unzip(tl.load(bias_ptr + at, mask=at < (H + C) * D), PAIRS)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    plane = tl.load(planes_ptr + row)
    cos = tl.load(cos_ptr + row * HALF + pair % HALF)
    sin = tl.load(sin_ptr + row * HALF + pair % HALF)
    wait_for_previous(pdl)

    qkv_row = qkv_ptr + row * HEADS * D
    if HALF_SPLIT:
        first = tl.load(qkv_row + first_at, mask=pair < HEADS * HALF)
        second = tl.load(qkv_row + second_at, mask=pair < HEADS * HALF)
    else:
        first, second = _unzip(tl.load(qkv_row + at, mask=at < HEADS * D), PAIRS)

    new_first, new_second = first, second
    if HAS_BIAS:
        new_first = (first.to(tl.float32) + first_bias.to(tl.float32)).to(first.dtype)
        new_second = (second.to(tl.float32) + second_bias.to(tl.float32)).to(first.dtype)
    new_first, new_second = _turned(new_first, new_second, cos, sin, HALF_SPLIT)
    is_value = pair >= (H + C) * HALF
    new_first = tl.where(is_value, first, new_first)
    new_second = tl.where(is_value, second, new_second)

    keys = ((slot // BLOCK_SIZE * PLANES + plane) * 2 * BLOCK_SIZE + slot % BLOCK_SIZE) * C * D  # int64
    KEYS_TO_VALUES: tl.constexpr = BLOCK_SIZE * C * D
    q_row = q_ptr + row * H * D
    if HALF_SPLIT:
        _store_q_or_kv(new_first, first_at, q_row, arena_ptr + keys, KEYS_TO_VALUES, H, C, D)
        _store_q_or_kv(new_second, second_at, q_row, arena_ptr + keys, KEYS_TO_VALUES, H, C, D)
    else:
        both = tl.reshape(tl.join(new_first, new_second), [2 * PAIRS])
        _store_q_or_kv(both, at, q_row, arena_ptr + keys, KEYS_TO_VALUES, H, C, D)


@triton.jit
def _unzip(values, PAIRS: tl.constexpr):
    """The even and the odd elements."""
    return tl.split(tl.reshape(values, [PAIRS, 2]))


@triton.jit
def _turned(first, second, cos, sin, HALF_SPLIT: tl.constexpr):
    """Every product and sum made in float32 and rounded to the dtype of the elements, or only the last sum rounded."""
    if HALF_SPLIT:
        cos = cos.to(first.dtype).to(tl.float32)
        sin = sin.to(first.dtype).to(tl.float32)
        new_first = _rounded(first.to(tl.float32) * cos, first) - _rounded(second.to(tl.float32) * sin, first)
        new_second = _rounded(second.to(tl.float32) * cos, first) + _rounded(first.to(tl.float32) * sin, first)
    else:
        new_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
        new_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
    return new_first.to(first.dtype), new_second.to(first.dtype)


@triton.jit
def _rounded(value, like):
    return value.to(like.dtype).to(tl.float32)


@triton.jit
def _store_q_or_kv(
    values, at, q_row, keys_row, KEYS_TO_VALUES: tl.constexpr, H: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):
    """Elements `at` of a row of qkv go to the row of q, or to the slot's keys or values."""
    tl.store(q_row + at, values, mask=at < H * D)
    kv_at = at - H * D + tl.where(at < (H + C) * D, 0, KEYS_TO_VALUES - C * D)
    is_kv = (at >= H * D) & (at < (H + 2 * C) * D)
    tl.store(keys_row + kv_at, values.to(keys_row.dtype.element_ty), mask=is_kv)
