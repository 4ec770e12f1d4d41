"""The random initial state of a recurrence as a Triton kernel, and the Philox words that it and `kernels.token_choice`
draw; `kernels.triton_ops` calls it.

Words are those of `kernels.philox.random_words`, bit for bit.

Shape letters: N rows, E channels; G groups of 4 channels that one Philox block serves.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch_options, let_next_start, wait_for_previous
from kernels.philox import Purpose

_GROUPS = 256


def initial_state(seeds: Tensor, positions: Tensor, zeros: Tensor, table: Tensor, like: Tensor) -> Tensor:
    """Entry `word >> 16` of a table [65536] float32, for the Philox words of (seed, position, channel): contiguous, in
    shape and dtype as `like` [N, E]. Seeds and positions [N] int64; rows where zeros [N] (bool) is true are all zero.
    """
    num_rows, width = like.shape
    out = like.new_empty(num_rows, width)
    _initial_state_kernel[(num_rows, triton.cdiv(width, 4 * _GROUPS))](
        seeds,
        positions,
        zeros,
        table,
        out,
        E=width,
        GROUPS=_GROUPS,
        PURPOSE=int(Purpose.INITIAL_STATE),
        **launch_options(like.device),
    )
    return out


@triton.jit
def philox_words(seed, position, group, PURPOSE: tl.constexpr):
    """Words (uint32) of the 4 columns of each group: key (seed low, seed high), counter (group, position low, position
    high, purpose). Seed and position are int64 scalars, group an int32 block.
    """
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, group.to(tl.uint32), low, high, tl.full([], PURPOSE, tl.uint32))


@triton.jit
def _initial_state_kernel(
    seeds_ptr,  # [N]
    positions_ptr,  # [N]
    zeros_ptr,  # [N]
    table_ptr,  # [65536]
    out_ptr,  # [N, E]
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    PURPOSE: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program makes GROUPS groups of a row."""
    let_next_start(pdl)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    words = philox_words(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), group, PURPOSE)
    # Interleaved again: [G, 2, 2], of which element [g, a, b] is word 2a + b of group g.
    word = tl.reshape(tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])), [4 * GROUPS])
    state = tl.load(table_ptr + (word >> 16).to(tl.int32))
    state = tl.where(tl.load(zeros_ptr + row) != 0, 0.0, state)
    channel = 4 * tl.program_id(1) * GROUPS + tl.arange(0, 4 * GROUPS)
    tl.store(out_ptr + row * E + channel, state.to(out_ptr.dtype.element_ty), mask=channel < E)
