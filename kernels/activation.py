"""The gated activation of a feed-forward block as a Triton kernel; `kernels.triton_ops` calls it where the product
before it does not already end with it.

On CUDA it gives the bits of the plain twin in `kernels.reference`.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from kernels.launch import INTERPRETED, launch_options, let_next_start, wait_for_previous

_BLOCK = 2048


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of contiguous [N, 2F], the gate in the first F columns: [N, F]."""
    assert gate_up.is_contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _silu_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, BLOCK=_BLOCK, INTERPRETED=INTERPRETED, **_precise(launch_options(gate_up.device))
    )
    return out


def _precise(options: dict[str, object]) -> dict[str, object]:
    """The exponential keeps subnormal numbers, as torch's does."""
    return options if INTERPRETED else options | {"enable_reflect_ftz": False}


@triton.jit
def silu(x, INTERPRETED: tl.constexpr):
    """x / (1 + exp(-x)) of float32, with the exponential and the division of torch's kernel."""
    if INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    return tl.div_rn(x, 1.0 + libdevice.exp(-x))


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [N, 2F]
    out_ptr,  # [N, F]
    F,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    pdl: tl.constexpr,
):
    """A program makes BLOCK columns of a row."""
    let_next_start(pdl)
    wait_for_previous(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * F + column, mask=column < F)
    up = tl.load(gate_up_ptr + row * 2 * F + F + column, mask=column < F)
    activated = silu(gate.to(tl.float32), INTERPRETED).to(gate.dtype)
    out = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * F + column, out.to(gate.dtype), mask=column < F)
