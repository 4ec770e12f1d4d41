"""The seam through which models compute: what an implementation offers, and the records that its calls take.

`kernels.reference` implements it in plain torch for any device; models and the engine know only this module. Every call
writes a new tensor except `rope_write_kv`, which also writes the arena.

Shape letters: N rows of a batch, K/M in and out features, E width, F feed-forward width, H query heads, C key/value
heads, d head size, G query tiles, T rows a tile (`ROW_TILE`), B block-table entries. An arena is `[num_blocks, planes,
2, block_size, C, d]`; index 0 of its third axis is keys, 1 is values. A slot is `block * block_size + offset`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

ROW_TILE = 8
"""Rows of an attention tile; batches come padded to a multiple of it."""


class RopeStyle(Enum):
    """Which elements of a head turn together, and in which precision."""

    HALF_SPLIT = "half_split"
    """Ouro: element i with i + d/2; cos and sin are cast to the model's dtype and the rotation is done in it."""
    ADJACENT_PAIRS = "adjacent_pairs"
    """Huginn: element 2i with 2i + 1; rotated in float32, cast back."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which rows attend to which blocks; the same for every plane of a step.

    A tile's rows belong to one request and stand at consecutive positions, in order. A real row attends to every key at
    its own position or before. Padding entries repeat a valid row and block; what they compute is dropped.
    """

    tile_rows: Tensor  # [G, T] int64: index of the row
    tile_positions: Tensor  # [G, T] int64: absolute position, -1 for padding
    block_tables: Tensor  # [G, B] int64: block that holds positions [i * block_size, (i + 1) * block_size)


class Ops(Protocol):
    """What a device offers to a model. Arguments of one call share a device, and activations and weights a dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`weight * cast(x32 * rsqrt(mean(x32^2) + eps))` for x [N, E] and weight [E]: [N, E]."""
        ...

    def rms_norm_then_add(self, residual: Tensor, branch: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Ouro's residual, `residual + rms_norm(branch)`: [N, E]."""
        ...

    def add_then_rms_norm(self, branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Huginn's residual, `rms_norm(branch + residual)`: [N, E]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of [N, 2F], the gate in the first F columns: [N, F]."""
        ...

    def rope_write_kv(
        self,
        q: Tensor,  # [N, H, d]
        k: Tensor,  # [N, C, d]
        v: Tensor,  # [N, C, d]
        cos: Tensor,  # [N, d/2] float32, of each row's position
        sin: Tensor,  # [N, d/2] float32
        style: RopeStyle,
        arena: Tensor,
        plane: int,
        slots: Tensor,  # [N] int64
    ) -> Tensor:
        """Rotate q and k; write rotated k, and v, to each row's slot of `plane`. The rotated q: [N, H, d]."""
        ...

    def paged_attention(self, q: Tensor, arena: Tensor, plane: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Causal attention of rotated q [N, H, d] over `plane`, softmax in float32: [N, H, d]; zero for rows in no
        tile.
        """
        ...
