"""The paged path of a model without an engine: batches of pieces of prompts, cut and mixed as a test likes.

Shape letters are those of `kernels.ops`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ROW_TILE, AttentionPlan, PackedPlan, PackedRun
from loopline.model import LoopedModel


@dataclass(frozen=True)
class Piece:
    """`count` consecutive positions of one prompt, from `start`."""

    prompt: int
    start: int
    count: int


@dataclass(frozen=True)
class PagedAttention:
    """`loopline.model.Attention` over an arena whose planes are numbered prelude, coda, then loop by loop."""

    model: LoopedModel
    arena: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    plan: AttentionPlan

    def attend(self, loop: int, layer: int, qkv: Tensor, qk_bias: Tensor | None) -> Tensor:
        spec = self.model.spec
        core = layer - spec.num_prelude
        if core < 0:
            plane = layer
        elif core >= spec.num_recurrent:
            plane = layer - spec.num_recurrent
        else:
            plane = spec.num_prelude + spec.num_coda + loop * spec.num_recurrent + core
        ops, style = self.model.ops, self.model.rope.style
        heads, planes = qkv.view(len(qkv), -1, spec.head_dim), torch.full((len(qkv),), plane)
        q = ops.rope_write_kv(heads, qk_bias, self.cos, self.sin, style, self.arena, planes, self.slots)
        return ops.paged_attention(q, self.arena, planes, self.plan, 1 / math.sqrt(spec.head_dim)).flatten(1)


class PagedPrompts:
    """Prompts whose KV is built up batch by batch, in shuffled blocks of one arena that starts out full of NaN."""

    def __init__(
        self, model: LoopedModel, prompts: Sequence[Sequence[int]], loops: int, block_size: int = 16, seed: int = 0
    ) -> None:
        spec = model.spec
        self.model, self.prompts, self.loops, self.block_size = model, prompts, loops, block_size
        counts = [-(-len(prompt) // block_size) for prompt in prompts]
        generator = torch.Generator().manual_seed(seed)
        blocks = torch.randperm(sum(counts), generator=generator) + 1  # block 0 is the null block
        self.tables = blocks.split(counts)
        planes = spec.num_prelude + spec.num_coda + loops * spec.num_recurrent
        shape = (sum(counts) + 1, planes, 2, block_size, spec.num_kv_heads, spec.head_dim)
        self.arena = torch.full(shape, torch.nan, dtype=model.dtype)
        self.noise = [torch.zeros(len(prompt), spec.hidden_size, dtype=model.dtype) for prompt in prompts]

    def run(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """One batch, in the order given; logits [count, V] of each piece."""
        model, num_rows = self.model, sum(piece.count for piece in pieces)
        padding = [0] * (-num_rows % ROW_TILE)
        positions = [p for piece in pieces for p in range(piece.start, piece.start + piece.count)] + padding
        tokens = [self.prompts[piece.prompt][piece.start + i] for piece in pieces for i in range(piece.count)] + padding
        slots = torch.cat([self._slots(piece) for piece in pieces] + [torch.tensor(padding, dtype=torch.int64)])
        noise = torch.cat([self.noise[p.prompt][p.start : p.start + p.count] for p in pieces])
        noise = torch.cat((noise, noise.new_zeros(len(padding), noise.shape[1])))
        cos, sin = model.rope.rows(torch.tensor(positions))
        attention = PagedAttention(model, self.arena, cos, sin, slots, self._plan(pieces))
        with torch.inference_mode():
            e = model.prelude(torch.tensor(tokens), attention)
            state = model.first_state(e, noise)
            for loop in range(self.loops):
                state = model.core_step(loop, state, e, attention)
            logits = model.head(model.coda(state, attention))
        return list(logits[:num_rows].split([piece.count for piece in pieces]))

    def _slots(self, piece: Piece) -> Tensor:
        positions = torch.arange(piece.start, piece.start + piece.count)
        return self.tables[piece.prompt][positions // self.block_size] * self.block_size + positions % self.block_size

    def _plan(self, pieces: Sequence[Piece]) -> AttentionPlan:
        longest = max(len(self.tables[piece.prompt]) for piece in pieces)
        tables = [torch.nn.functional.pad(table, (0, longest - len(table))) for table in self.tables]
        return plan_of([(p.start, p.count) for p in pieces], [tables[p.prompt] for p in pieces])


def plan_of(spans: Sequence[tuple[int, int]], tables: Sequence[Tensor]) -> AttentionPlan:
    """The plan of a batch whose rows are the spans (first position, count) one after the other, each with its table."""
    runs, first_row = [], 0
    for start, count in spans:
        runs.append(PackedRun(first_row, count, start))
        first_row += count
    return PackedPlan(tuple(runs), torch.stack(list(tables)))
