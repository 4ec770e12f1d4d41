"""The forward pass of one whole prompt with nothing kept: the plain statement that the paged path is checked against.

Shape letters are those of `loopline.model.layers`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import RopeStyle
from kernels.reference import rotate
from loopline.model.layers import LoopedModel


@dataclass(frozen=True)
class DenseAttention:
    """Attention over one prompt whose N rows stand at positions 0 to N-1. No plane is kept: each call brings all of
    its.
    """

    num_kv_heads: int
    head_dim: int
    style: RopeStyle
    cos: Tensor  # [N, d/2] float32
    sin: Tensor  # [N, d/2] float32

    @classmethod
    def of(cls, model: LoopedModel, num_tokens: int) -> "DenseAttention":
        """For the first `num_tokens` positions of a prompt of this model."""
        spec, rope = model.spec, model.rope
        return cls(spec.num_kv_heads, spec.head_dim, rope.style, rope.cos[:num_tokens], rope.sin[:num_tokens])

    def attend(self, loop: int, layer: int, qkv: Tensor, qk_bias: Tensor | None) -> Tensor:
        """See `loopline.model.layers.Attention`; softmax in float32."""
        num_heads = qkv.shape[1] // self.head_dim - 2 * self.num_kv_heads
        heads = qkv.view(len(qkv), -1, self.head_dim)
        qk, v = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        qk = qk if qk_bias is None else qk + qk_bias
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        group = q.shape[1] // k.shape[1]
        q = rotate(q, self.cos, self.sin, self.style).float()
        k = rotate(k, self.cos, self.sin, self.style).float().repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(diagonal=1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hnm,mhd->nhd", weights, v.float().repeat_interleave(group, dim=1))
        return mixed.to(v.dtype).flatten(1)


@torch.inference_mode()
def prompt_logits(model: LoopedModel, token_ids: Sequence[int], loops: int, initial_state: Tensor | None) -> Tensor:
    """Float32 logits [tokens, V]; see `LoopedModel.prompt_logits`."""
    rows = torch.tensor(token_ids, dtype=torch.int64, device=model.device)
    attention = DenseAttention.of(model, len(rows))
    noise = None if initial_state is None else initial_state.to(model.device, model.dtype)
    e = model.prelude(rows, attention)
    state = model.first_state(e, noise)
    for loop in range(loops):
        state = model.core_step(loop, state, e, attention)
    return model.head(model.coda(state, attention))
