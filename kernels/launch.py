"""How Triton kernels are launched, compiled or interpreted.

Programmatic dependent launch (PDL): on compute capability 9.0 and above a kernel may start while the one before it
still runs. Every kernel of this package keeps four rules. It calls `let_next_start` first of all. Before
`wait_for_previous` it reads nothing but weights and a step's inputs (positions, slots, planes, block tables, rope
rows). No kernel of this package writes those; copies and torch's own kernels do, and one of torch's, which starts only
when all before it have ended, stands between them and a step's first kernel of ours: the embedding. It stores
nothing before `wait_for_previous`. And at least one of its programs waits, so that a kernel's end means that all before
it have ended. So what a kernel sees is what all earlier kernels wrote, and what it overwrites nobody still reads; only
the latency of its first loads hides behind the kernel before.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1 before this package is imported)."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def let_next_start(pdl: tl.constexpr):
    """The next kernel may start as soon as this one leaves it room."""
    if pdl:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(pdl: tl.constexpr):
    """Everything that earlier kernels wrote is visible from here on."""
    if pdl:
        gdc_wait()


@triton.jit
def loop_bound(value):
    """A bound of `tl.range`. The interpreter keeps scalars in arrays of one element, which numpy calls no integer."""
    if _INTERPRETED:
        return value.handle.data.item()
    return value


def launch_options(device: torch.device, num_warps: int = 4, num_stages: int = 1) -> dict[str, object]:
    """Keyword arguments of every launch on `device`: `pdl` (the kernel's constexpr) and the compiler's.

    `enable_fp_fusion` is off: torch's own kernels round between a product and a sum that are two operations.
    """
    if INTERPRETED:
        return {"pdl": False, "num_warps": num_warps, "num_stages": num_stages}
    pdl = _has_pdl(device)
    options: dict[str, object] = {"pdl": pdl, "num_warps": num_warps, "num_stages": num_stages}
    return options | {"launch_pdl": pdl, "enable_fp_fusion": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
