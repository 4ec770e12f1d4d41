"""`kernels.ops.Ops` on the Triton kernels of this package, for CUDA; nothing else imports those modules.

Matrix products go to whichever was measured to be faster at that number of rows: matrix-vector kernels for the smallest
batches, tensor-core kernels that stream weights for small ones, cuBLAS from there on and for float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import activation, decode_attention, matvec, norm, packed_attention, rope, skinny_linear, state_noise
from kernels import token_choice as choice
from kernels.ops import AttentionPlan, DecodePlan, RopeStyle

_MOST_MATVEC_ROWS = 2
_MOST_SKINNY_ROWS = 32
_MOST_SKINNY_WEIGHTS = 24_000_000
"""Elements of a weight matrix; for larger ones cuBLAS's own tiles keep the memory busy, if they give many features."""


@dataclass(frozen=True)
class ElementwiseOps:
    """The elementwise kernels and the choice of tokens; products are cuBLAS's, and attention is another class's."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.norm`."""
        return norm.rms_norm(x, weight, eps)

    def norm_add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.norm`."""
        return norm.norm_add_norm(residual, branch, weight, next_weight, eps)

    def add_norm_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.norm`."""
        return norm.add_norm_norm(residual, branch, weight, next_weight, eps)

    def rope_write_kv(
        self,
        qkv: Tensor,
        qk_bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        style: RopeStyle,
        arena: Tensor,
        planes: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See `kernels.rope`."""
        return rope.rope_write_kv(qkv, qk_bias, cos, sin, style, arena, planes, slots)

    def initial_state(self, seeds: Tensor, positions: Tensor, zeros: Tensor, table: Tensor, like: Tensor) -> Tensor:
        """See `kernels.state_noise`."""
        return state_noise.initial_state(seeds, positions, zeros, table, like)

    def choose_tokens(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See `kernels.token_choice`."""
        return choice.choose_tokens(logits, temperature, seeds, positions)

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """cuBLAS, then `kernels.activation`."""
        return activation.silu_mul(functional.linear(x, gate_up))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """cuBLAS."""
        return functional.linear(x, weight)

    def tile_rows(self, dtype: torch.dtype) -> int:
        """See `kernels.packed_attention`."""
        return packed_attention.tile_rows(dtype)


@dataclass(frozen=True)
class TritonOps(ElementwiseOps):
    """All of `Ops`."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `kernels.matvec` and `kernels.skinny_linear`."""
        if x.dtype is torch.bfloat16 and len(x) <= _MOST_MATVEC_ROWS:
            return matvec.matvec(x, weight)
        if _is_skinny(x, weight):
            return skinny_linear.skinny_linear(x, weight)
        return functional.linear(x, weight)

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """See `kernels.matvec` and `kernels.skinny_linear`."""
        if x.dtype is torch.bfloat16 and len(x) <= _MOST_MATVEC_ROWS:
            return matvec.gated_matvec(x, gate_up)
        if x.dtype is torch.bfloat16 and len(x) <= _MOST_SKINNY_ROWS:
            return skinny_linear.gated_skinny_linear(x, gate_up)
        return activation.silu_mul(functional.linear(x, gate_up))

    def paged_attention(
        self,
        q: Tensor,
        arena: Tensor,
        planes: Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """See `kernels.decode_attention` and `kernels.packed_attention`."""
        if isinstance(plan, DecodePlan):
            return decode_attention.decode_attention(q, arena, planes, plan, scale)
        return packed_attention.packed_attention(q, arena, planes, plan, scale)


def _is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether `kernels.skinny_linear` was the faster one: for small matrices, and of large ones for those that sum over
    more features than they give, where cuBLAS has few tiles."""
    num_out, num_in = weight.shape
    is_faster = weight.numel() <= _MOST_SKINNY_WEIGHTS or num_in > num_out
    return is_faster and len(x) <= _MOST_SKINNY_ROWS and x.dtype is torch.bfloat16
