"""The plain torch twin of every kernel: the definition of what each computes, and what the CPU engine runs on.

Shape letters are those of `kernels.ops`.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from kernels.invariant import InvariantProducts, PlainProducts, Products
from kernels.ops import ROW_TILE, AttentionPlan, RopeStyle
from kernels.philox import Purpose, random_words
from kernels.reference_attention import QueryGroups, attend, group_queries

NOT_FINITE = -1
"""What `choose_tokens` gives for a row that holds an infinity or NaN."""
_COLUMN_TILE = 64
_TABLE_SHIFT = 16


@dataclass(frozen=True)
class ReferenceOps:
    """`kernels.ops.Ops` on the functions of this module.

    What attention needs of a plan is worked out once and kept while the plan lives, so here a plan's tensors may not
    change, not even a decode plan's.
    """

    products: Products
    prepared: WeakKeyDictionary[AttentionPlan, tuple[QueryGroups, ...]] = field(default_factory=WeakKeyDictionary)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `linear`."""
        return self.products.linear(x, weight)

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """See `gated_linear`."""
        return silu_mul(self.products.linear(x, gate_up))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `rms_norm`."""
        return rms_norm(x, weight, eps)

    def norm_add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `norm_add_norm`."""
        return norm_add_norm(residual, branch, weight, next_weight, eps)

    def add_norm_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `add_norm_norm`."""
        return add_norm_norm(residual, branch, weight, next_weight, eps)

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
        """See `rope_write_kv`."""
        return rope_write_kv(qkv, qk_bias, cos, sin, style, arena, planes, slots)

    def paged_attention(
        self,
        q: Tensor,
        arena: Tensor,
        planes: Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """See `kernels.reference_attention.attend`."""
        if plan not in self.prepared:
            self.prepared[plan] = group_queries(plan, arena)
        return attend(q, arena, planes, self.prepared[plan], scale, self.products)

    def tile_rows(self, dtype: torch.dtype) -> int:
        """As many as a tile of the attention here."""
        return ROW_TILE

    def initial_state(self, seeds: Tensor, positions: Tensor, zeros: Tensor, table: Tensor, like: Tensor) -> Tensor:
        """See `initial_state`."""
        return initial_state(seeds, positions, zeros, table, like)

    def choose_tokens(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See `choose_tokens`."""
        return choose_tokens(logits, temperature, seeds, positions)


def reference_ops(*, deterministic: bool) -> ReferenceOps:
    """The twins; `deterministic`: a row's bits depend on no other row (see `kernels.invariant`)."""
    return ReferenceOps(InvariantProducts() if deterministic else PlainProducts())


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """[N, K] by the rows of [M, K]: [N, M]."""
    return functional.linear(x, weight)


def gated_linear(x: Tensor, gate_up: Tensor) -> Tensor:
    """`silu_mul(linear(x, gate_up))`: [N, F]."""
    return silu_mul(linear(x, gate_up))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * cast(x32 * rsqrt(mean(x32^2) + eps))` for x [N, E] and weight [E]: [N, E]."""
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def norm_add_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`s = residual + rms_norm(branch, weight)` and `rms_norm(s, next_weight)`, each [N, E]."""
    state = residual + rms_norm(branch, weight, eps)
    return state, rms_norm(state, next_weight, eps)


def add_norm_norm(
    residual: Tensor,
    branch: Tensor,
    weight: Tensor,
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`s = rms_norm(branch + residual, weight)` and `rms_norm(s, next_weight)`, each [N, E]."""
    state = rms_norm(branch + residual, weight, eps)
    return state, rms_norm(state, next_weight, eps)


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
    qkv: Tensor,  # [N, H + 2C, d]
    qk_bias: Tensor | None,  # [H + C, d]
    cos: Tensor,  # [N, d/2] float32
    sin: Tensor,  # [N, d/2] float32
    style: RopeStyle,
    arena: Tensor,
    planes: Tensor,  # [N] int64
    slots: Tensor,  # [N] int64
) -> Tensor:
    """Write rotated keys, and values, to each row's slot of its plane; the rotated queries [N, H, d]."""
    block_size, num_kv_heads = arena.shape[3:5]
    num_rotated = qkv.shape[1] - num_kv_heads
    qk, values = qkv[:, :num_rotated], qkv[:, num_rotated:]
    qk = rotate(qk if qk_bias is None else qk + qk_bias, cos, sin, style)
    blocks, offsets = slots // block_size, slots % block_size
    arena[blocks, planes, 0, offsets] = qk[:, -num_kv_heads:].to(arena.dtype)
    arena[blocks, planes, 1, offsets] = values.to(arena.dtype)
    return qk[:, :-num_kv_heads]


def initial_state(seeds: Tensor, positions: Tensor, zeros: Tensor, table: Tensor, like: Tensor) -> Tensor:
    """Entries [N, E] of a table [65536], picked by the Philox words of (seed, position, channel), in the dtype of
    `like` [N, E].
    """
    words = random_words(seeds, positions, Purpose.INITIAL_STATE, like.shape[1])
    return table[words >> _TABLE_SHIFT].masked_fill_(zeros.unsqueeze(1), 0.0).to(like.dtype)


def choose_tokens(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The largest logit of each row of [N, V], or where temperature [N] is above 0 the largest of `(logit - peak) /
    temperature` plus Gumbel noise; NOT_FINITE for a row with an infinity or NaN. Ids [N] int64.
    """
    cold = temperature.unsqueeze(1)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(cold > 0, cold, 1.0)
    perturbed = (scaled.double() + gumbel(seeds, positions, logits.shape[1])).argmax(dim=1)
    chosen = torch.where(temperature > 0, perturbed, logits.argmax(dim=1))
    return torch.where(torch.isfinite(logits).all(dim=1), chosen, NOT_FINITE)


def gumbel(seeds: Tensor, positions: Tensor, num_columns: int) -> Tensor:
    """Standard Gumbel draws [N, num_columns] float64 of seeds and positions, both [N] int64."""
    width = -(-num_columns // _COLUMN_TILE) * _COLUMN_TILE  # vector loops over it have no scalar tail
    words = random_words(seeds, positions, Purpose.SAMPLING, width)
    uniform = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))[:, :num_columns]
