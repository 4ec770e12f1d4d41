"""The seam through which models and the engine compute: what an implementation offers, and the records its calls take.

`kernels.reference` implements it in plain torch for any device, `kernels.triton_ops` with kernels of our own; models
and the engine's device side compute through nothing else. Every call writes a new tensor except `rope_write_kv`, which
also writes the arena.

Shape letters: N rows of a batch, K/M in and out features, E width, F feed-forward width, H query heads, C key/value
heads, d head size, R runs of a packed batch, T tiles of it, B block-table entries, V vocabulary. An arena is
`[num_blocks, planes, 2, block_size, C, d]`; index 0 of its third axis is keys, 1 is values. A slot is
`block * block_size + offset`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

ROW_TILE = 8
"""Rows of a batch come padded to a multiple of it, where no captured graph has a padding of its own."""


class RopeStyle(Enum):
    """Which elements of a head turn together, and in which precision."""

    HALF_SPLIT = "half_split"
    """Ouro: element i with i + d/2; cos and sin are cast to the model's dtype and the rotation is done in it."""
    ADJACENT_PAIRS = "adjacent_pairs"
    """Huginn: element 2i with 2i + 1; rotated in float32, cast back."""


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Each row attends alone, to every key at its own position or before; the same for every plane of a step.

    The tensors may be filled anew between steps, as inputs of a captured graph are.
    """

    positions: Tensor  # [N] int64: of each row; -1: padding, which attends to nothing
    block_tables: Tensor  # [N, B] int64: block that holds positions [i * block_size, (i + 1) * block_size)


@dataclass(frozen=True)
class PackedRun:
    """Consecutive rows of a batch that are consecutive positions of one request."""

    first_row: int
    num_rows: int
    first_position: int


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """Runs of rows; a row attends to every key of its request at its own position or before.

    The same for every plane of a step. Rows in no run are padding. Never changed once made.
    """

    runs: tuple[PackedRun, ...]  # R, at least one
    block_tables: Tensor  # [R, B] int64; entries past a run's last position repeat a valid block


@dataclass(frozen=True, eq=False)
class TiledPlan:
    """A packed plan as a captured graph reads it: tiles of rows in place of runs.

    The tensors may be filled anew between steps.
    """

    tiles: Tensor  # [T, 4] int32: run, first row, rows (at most `Ops.tile_rows`; 0: no tile), position of the first row
    block_tables: Tensor  # [R, B] int64


AttentionPlan = DecodePlan | PackedPlan | TiledPlan


def tiles_of(runs: Sequence[PackedRun], tile_rows: int) -> list[tuple[int, int, int, int]]:
    """The runs cut into tiles of `tile_rows` rows, as `TiledPlan.tiles` holds them; those with most keys first, so that
    the last ones to run are short.
    """
    tiles = [
        (index, run.first_row + start, min(tile_rows, run.num_rows - start), run.first_position + start)
        for index, run in enumerate(runs)
        for start in range(0, run.num_rows, tile_rows)
    ]
    return sorted(tiles, key=lambda tile: tile[2] + tile[3], reverse=True)


class Ops(Protocol):
    """What a device offers to a model. Arguments of one call share a device, and activations and weights a dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """`silu_mul(linear(x, gate_up))` for x [N, K] and gate_up [2F, K], the gate in the first F rows: [N, F]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`weight * cast(x32 * rsqrt(mean(x32^2) + eps))` for x [N, E] and weight [E]: [N, E]."""
        ...

    def norm_add_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Ouro's residual and the norm that follows, each [N, E]: `s = residual + rms_norm(branch, weight)` and
        `rms_norm(s, next_weight)`.
        """
        ...

    def add_norm_norm(
        self,
        residual: Tensor,
        branch: Tensor,
        weight: Tensor,
        next_weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Huginn's residual and the norm that follows, each [N, E]: `s = rms_norm(branch + residual, weight)` and
        `rms_norm(s, next_weight)`.
        """
        ...

    def rope_write_kv(
        self,
        qkv: Tensor,  # [N, H + 2C, d] a row's queries, then keys, then values
        qk_bias: Tensor | None,  # [H + C, d], added to queries and keys first, in their dtype
        cos: Tensor,  # [N, d/2] float32, of each row's position
        sin: Tensor,  # [N, d/2] float32
        style: RopeStyle,
        arena: Tensor,
        planes: Tensor,  # [N] int64
        slots: Tensor,  # [N] int64
    ) -> Tensor:
        """Rotate queries and keys; write rotated keys, and values, to each row's slot of its plane. The rotated
        queries: [N, H, d]. Rows may share a slot that nobody reads.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        arena: Tensor,
        planes: Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """Causal attention of rotated q [N, H, d] over each row's plane [N] int64, softmax in float32: [N, H, d]; zero
        for padding rows. The rows of a packed run share their plane.
        """
        ...

    def tile_rows(self, dtype: torch.dtype) -> int:
        """Rows of a tile of a `TiledPlan`, where activations have this dtype."""
        ...

    def initial_state(self, seeds: Tensor, positions: Tensor, zeros: Tensor, table: Tensor, like: Tensor) -> Tensor:
        """Entry `word >> 16` of a quantile table [65536] float32, for the Philox words of (seed, position, channel): as
        `like` [N, E]. Seeds and positions [N] int64; rows where zeros [N] (bool) is true are all zero.
        """
        ...

    def choose_tokens(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """A token id [N] int64 from each row of logits [N, V] float32; -1 where a row is not finite.

        Temperature [N] float32: 0 takes the largest logit; above, Gumbel-max with the Philox words of (seed, position,
        token id), both [N] int64. Ties go to the lowest id.
        """
        ...
