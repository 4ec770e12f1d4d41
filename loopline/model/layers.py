"""What both model families share: the model and attention seams, the rope table and the feed-forward record.

The loop stands outside the model. A caller runs one batch as

    e = model.prelude(token_ids, attention)
    s = model.first_state(e, noise)
    for loop in range(depth):
        s = model.core_step(loop, s, e, attention)
    logits = model.head(model.coda(s, attention)[rows])

Shape letters: N rows of a batch, R rows that need logits, E width, F feed-forward width, H query heads, C key/value
heads, d head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import Ops, RopeStyle
from loopline.model_spec import Family, ModelSpec


class Attention(Protocol):
    """Where a batch's rows stand and where their keys and values live; made anew for every batch."""

    def attend(self, loop: int, layer: int, qkv: Tensor, qk_bias: Tensor | None) -> Tensor:
        """Queries, keys and values of qkv [N, (H + 2C) * d]: add qk_bias [H + C, d] to the first two, rotate them by
        each row's position, keep keys and values, attend causally: [N, H * d].

        Keys and values are those of the plane of (loop, layer). `layer` is physical (prelude, recurrent, coda); `loop`
        is 0 in the prelude and the coda.
        """
        ...


class LoopedModel(Protocol):
    """One checkpoint on one device. Immutable: a forward pass changes nothing but what `attention` keeps."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def rope(self) -> "RopeTable": ...

    @property
    def uses_initial_state(self) -> bool:
        """Whether `first_state` reads its noise."""
        ...

    @property
    def exit_gate(self) -> "ExitGate | None":
        """None for a family that has none."""
        ...

    def prelude(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """What every loop is given of the tokens [N] int64: e [N, E]."""
        ...

    def first_state(self, e: Tensor, noise: Tensor | None) -> Tensor:
        """The state before loop 0 from e [N, E] and noise [N, E] (None: zeros): [N, E]."""
        ...

    def core_step(self, loop: int, state: Tensor, e: Tensor, attention: Attention) -> Tensor:
        """One pass of the recurrent block over state and e, both [N, E]: the next state [N, E]."""
        ...

    def coda(self, state: Tensor, attention: Attention) -> Tensor:
        """What the head reads, from the last state [N, E]: [N, E]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V] of hidden [R, E]."""
        ...

    def prompt_logits(
        self, token_ids: Sequence[int], *, loops: int | None = None, initial_state: Tensor | None = None
    ) -> Tensor:
        """Float32 logits [tokens, V] of one whole prompt, without a cache: what the paged path is checked against.

        `loops`: the model's default if None. `initial_state` [tokens, E]: zeros if None; Ouro has none and ignores it.
        """
        ...


@dataclass(frozen=True)
class RopeTable:
    """Float32 cos and sin of every position's angles; computed, never loaded."""

    style: RopeStyle
    cos: Tensor  # [context, d/2] float32
    sin: Tensor  # [context, d/2] float32

    @classmethod
    def build(cls, spec: ModelSpec, device: torch.device) -> "RopeTable":
        """Angles `position * base^(-2j/d)`, all in float32 (RoFormer, arXiv 2104.09864)."""
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
        frequencies = 1.0 / spec.rope_base**exponents
        angles = torch.outer(torch.arange(spec.context_tokens, dtype=torch.float32), frequencies)
        style = RopeStyle.HALF_SPLIT if spec.family is Family.OURO else RopeStyle.ADJACENT_PAIRS
        return cls(style, angles.cos().to(device), angles.sin().to(device))

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, each [N, d/2], of positions [N] int64."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


@dataclass(frozen=True)
class ExitGate:
    """Reads the state after a loop; the sigmoid of what it says is the probability to stop there."""

    weight: Tensor  # [E] float32
    bias: Tensor  # [1] float32

    def logits(self, state: Tensor) -> Tensor:
        """Float32 [N] of states [N, E]. A row's bits depend on no other row on a CPU."""
        return (state.float() * self.weight).sum(dim=-1) + self.bias


@dataclass(frozen=True)
class FeedForward:
    """A gated feed-forward branch."""

    gate_up: Tensor  # [2F, E], gate first
    down: Tensor  # [E, F]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """`down(silu(gate(x)) * up(x))` for x [N, E]: [N, E]."""
        return ops.linear(ops.gated_linear(x, self.gate_up), self.down)
