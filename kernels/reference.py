"""The plain torch twin of every kernel: the definition of what each computes, and what the CPU engine runs on.

Shape letters are those of `kernels.ops`.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from kernels.invariant import InvariantProducts, PlainProducts, Products
from kernels.ops import AttentionPlan, RopeStyle
from kernels.reference_attention import QueryGroups, attend, group_queries


@dataclass(frozen=True)
class ReferenceOps:
    """`kernels.ops.Ops` on the functions of this module.

    What attention needs of a plan is worked out once and kept while the plan lives, so a plan's tensors may not change.
    """

    products: Products
    prepared: WeakKeyDictionary[AttentionPlan, tuple[QueryGroups, ...]] = field(default_factory=WeakKeyDictionary)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        return self.products.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `rms_norm`."""
        return rms_norm(x, weight, eps)

    def rms_norm_then_add(self, residual: Tensor, branch: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `rms_norm_then_add`."""
        return rms_norm_then_add(residual, branch, weight, eps)

    def add_then_rms_norm(self, branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `add_then_rms_norm`."""
        return add_then_rms_norm(branch, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `silu_mul`."""
        return silu_mul(gate_up)

    def rope_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        style: RopeStyle,
        arena: Tensor,
        plane: int,
        slots: Tensor,
    ) -> Tensor:
        """See `rope_write_kv`."""
        return rope_write_kv(q, k, v, cos, sin, style, arena, plane, slots)

    def paged_attention(self, q: Tensor, arena: Tensor, plane: int, plan: AttentionPlan, scale: float) -> Tensor:
        """See `kernels.reference_attention.attend`."""
        if plan not in self.prepared:
            self.prepared[plan] = group_queries(plan, arena.shape[3])
        return attend(q, arena[:, plane, 0], arena[:, plane, 1], self.prepared[plan], scale, self.products)


def reference_ops(*, deterministic: bool) -> ReferenceOps:
    """The twins; `deterministic`: a row's bits depend on no other row (see `kernels.invariant`)."""
    return ReferenceOps(InvariantProducts() if deterministic else PlainProducts())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * cast(x32 * rsqrt(mean(x32^2) + eps))` for x [N, E] and weight [E]: [N, E]."""
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rms_norm_then_add(residual: Tensor, branch: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual + rms_norm(branch)`: [N, E]."""
    return residual + rms_norm(branch, weight, eps)


def add_then_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(branch + residual)`: [N, E]."""
    return rms_norm(branch + residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [N, 2F], the gate in the first F columns: [N, F].

    The gate stays a strided view: torch then vectorises within a row, so that which elements fall to its scalar tail
    (where exp has other bits) depends on the column alone.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: RopeStyle) -> Tensor:
    """Turn x [N, heads, d] by the angles whose float32 cos and sin are [N, d/2]: [N, heads, d] in x's dtype."""
    if style is RopeStyle.HALF_SPLIT:
        cos, sin = (table.to(x.dtype).unsqueeze(1) for table in (cos, sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rope_write_kv(
    q: Tensor,  # [N, H, d]
    k: Tensor,  # [N, C, d]
    v: Tensor,  # [N, C, d]
    cos: Tensor,  # [N, d/2] float32
    sin: Tensor,  # [N, d/2] float32
    style: RopeStyle,
    arena: Tensor,
    plane: int,
    slots: Tensor,  # [N] int64
) -> Tensor:
    """Write rotated k, and v, to each row's slot of `plane`; the rotated q [N, H, d]. Rows may share a slot nobody
    reads.
    """
    block_size = arena.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    arena[:, plane, 0][blocks, offsets] = rotate(k, cos, sin, style).to(arena.dtype)
    arena[:, plane, 1][blocks, offsets] = v.to(arena.dtype)
    return rotate(q, cos, sin, style)
