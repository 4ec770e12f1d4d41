"""Computes a plan: every segment through prelude, its loops, coda and head, then one pass of sampling.

The loop stands here, outside the model. Decides nothing: what to compute is the scheduler's plan, what a result means
is the scheduler's commit.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import ROW_TILE
from loopline.engine.batch import Batch, build_batch
from loopline.engine.sampler import Sampler
from loopline.kv.arena import Arena
from loopline.kv.ledger import Ledger
from loopline.model import LoopedModel
from loopline.sched.plan import StepPlan, StepResult


class PagedAttention:
    """Attention of one batch over the arena: the `Attention` that a model is given by the engine."""

    def __init__(self, model: LoopedModel, arena: Arena, batch: Batch) -> None:
        self._ops = model.ops
        self._arena = arena
        self._batch = batch
        self._style = model.rope.style
        self._cos, self._sin = model.rope.rows(batch.positions)  # [N, d/2] each
        self._scale = model.spec.head_dim**-0.5

    def attend(self, loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate q [N, H, d] and k [N, C, d], store k and v [N, C, d] in (loop, layer)'s plane, attend: [N, H * d]."""
        plane = self._arena.layout.plane(loop, layer)
        arena, batch = self._arena.tensor, self._batch
        q = self._ops.rope_write_kv(q, k, v, self._cos, self._sin, self._style, arena, plane, batch.slots)
        return self._ops.paged_attention(q, arena, plane, batch.attention, self._scale).flatten(1)


class StateSource(Protocol):
    """Where Huginn's initial states come from; `loopline.model.noise.initial_state` unless states are given."""

    def __call__(self, seeds: Tensor, positions: Tensor, zeros: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """States [N, width] of rows with seeds, positions and zeros (bool), each [N]."""
        ...


class Runner:
    """Holds the model and the arena; one thread at a time."""

    def __init__(
        self,
        model: LoopedModel,
        arena: Arena,
        ledger: Ledger,
        device: str,
        states: StateSource,
    ) -> None:
        self._model = model
        self._states = states
        self._arena = arena
        self._ledger = ledger
        self._device = device
        self._sampler = Sampler(model.spec.vocab_size, device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute every segment and choose the tokens. Blocks until the result is on the host."""
        logits = []
        for segment in plan.segments:
            batch = build_batch(segment, self._ledger, self._arena.null_block, self._device)
            logits.append(self._forward(batch))
        return self._sampler.sample(torch.cat(logits), plan)

    def _forward(self, batch: Batch) -> Tensor:
        """Logits [S, V] float32 of the batch's sampled rows; KV of every row lands in the arena."""
        model = self._model
        attention = PagedAttention(model, self._arena, batch)
        embedded = model.prelude(batch.token_ids, attention)
        noise = None
        if model.uses_initial_state:
            noise = self._states(batch.seeds, batch.positions, batch.zeros, embedded.shape[1], embedded.dtype)
        state = model.first_state(embedded, noise)
        for loop in range(batch.depth):
            state = model.core_step(loop, state, embedded, attention)
        hidden = model.coda(state, attention)
        num_sampled = len(batch.sampled_rows)
        if not num_sampled:
            return hidden.new_zeros((0, model.spec.vocab_size), dtype=torch.float32)
        padding = batch.sampled_rows.new_zeros(-num_sampled % ROW_TILE)
        return model.head(hidden[torch.cat([batch.sampled_rows, padding])])[:num_sampled]
