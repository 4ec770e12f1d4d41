"""One forward pass of a batch over the arena: prelude, the loops, coda. The loop stands here, outside the model.

Eager runs and captured graphs call the same function, so a row's arithmetic is the same in both.

Shape letters: N rows, E width, H query heads, C key/value heads, d head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import AttentionPlan
from loopline.kv.arena import Arena
from loopline.model import LoopedModel
from loopline.model.layers import ExitGate
from loopline.model.noise import initial_state


class StateSource(Protocol):
    """Where Huginn's initial states come from, if they are given and not keyed by seed and position."""

    def __call__(self, seeds: Tensor, positions: Tensor, zeros: Tensor, like: Tensor) -> Tensor:
        """States, as `like` [N, E], of rows with seeds, positions and zeros (bool), each [N]."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one pass; int64 [N] unless said."""

    token_ids: Tensor
    positions: Tensor  # never negative
    slots: Tensor
    seeds: Tensor
    zeros: Tensor  # bool
    plan: AttentionPlan


class PlaneTable:
    """For every plane a column of its number: what kernels take, who want a plane for each row."""

    def __init__(self, num_planes: int, device: torch.device) -> None:
        self._planes = torch.arange(num_planes, device=device).unsqueeze(1)
        self._table = self._planes
        self._outgrown: list[Tensor] = []  # captured graphs read them on, and hold nothing that keeps them alive

    def of(self, plane: int, num_rows: int) -> Tensor:
        """[num_rows] int64, all `plane`."""
        if num_rows > self._table.shape[1]:
            self.reserve(num_rows)
        return self._table[plane, :num_rows]

    def reserve(self, num_rows: int) -> None:
        """Make room; what was handed out before stays where it is."""
        if num_rows > self._table.shape[1]:
            self._outgrown.append(self._table)
            self._table = self._planes.expand(-1, 1 << (num_rows - 1).bit_length()).contiguous()


class PagedAttention:
    """Attention of one batch over the arena: the `Attention` that a model is given by the engine."""

    def __init__(self, model: LoopedModel, arena: Arena, planes: PlaneTable, rows: Rows) -> None:
        self._ops = model.ops
        self._arena = arena
        self._planes = planes
        self._rows = rows
        self._style = model.rope.style
        self._cos, self._sin = model.rope.rows(rows.positions)  # [N, d/2] each
        self._head_dim = model.spec.head_dim

    def attend(self, loop: int, layer: int, qkv: Tensor, qk_bias: Tensor | None) -> Tensor:
        """See `loopline.model.layers.Attention`."""
        num_rows = qkv.shape[0]
        planes = self._planes.of(self._arena.layout.plane(loop, layer), num_rows)
        heads = qkv.view(num_rows, -1, self._head_dim)
        arena = self._arena.tensor
        q = self._ops.rope_write_kv(heads, qk_bias, self._cos, self._sin, self._style, arena, planes, self._rows.slots)
        return self._ops.paged_attention(q, arena, planes, self._rows.plan, self._head_dim**-0.5).flatten(1)


@dataclass(frozen=True, eq=False)
class Passed:
    """What a pass through T loops leaves of every row."""

    hidden: Tensor  # [N, E] what the head reads
    gates: Tensor | None  # [N, T] float32 logits of the exit gate after each loop; None: not evaluated


@dataclass(frozen=True, eq=False)
class Forward:
    """A model over an arena."""

    model: LoopedModel
    arena: Arena
    planes: PlaneTable
    states: StateSource | None = None
    exit_gate: ExitGate | None = None  # evaluated after each loop of every row
    noise_seed: int | None = None  # keys the noise of all rows, as an int64; None: each row's seed does

    def run(self, rows: Rows, depth: int) -> Passed:
        """Take rows through `depth` loops; their KV lands in the arena."""
        model, gate = self.model, self.exit_gate
        gates: list[Tensor] = []
        attention = PagedAttention(model, self.arena, self.planes, rows)
        embedded = model.prelude(rows.token_ids, attention)
        state = model.first_state(embedded, self._noise(rows, embedded))
        for loop in range(depth):
            state = model.core_step(loop, state, embedded, attention)
            if gate is not None:
                gates.append(gate.logits(state))
        return Passed(model.coda(state, attention), torch.stack(gates, dim=1) if gates else None)

    def _noise(self, rows: Rows, like: Tensor) -> Tensor | None:
        if not self.model.uses_initial_state:
            return None
        if self.states is not None:
            return self.states(rows.seeds, rows.positions, rows.zeros, like)
        seeds = rows.seeds if self.noise_seed is None else torch.full_like(rows.seeds, self.noise_seed)
        return initial_state(self.model.ops, seeds, rows.positions, rows.zeros, like)
