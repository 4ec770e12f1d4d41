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

    style: RopeStyle
    cos: Tensor  # [N, d/2] float32
    sin: Tensor  # [N, d/2] float32

    def attend(self, loop: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of q [N, H, d] over k and v [N, C, d], softmax in float32: [N, H * d]."""
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
    attention = DenseAttention(model.rope.style, model.rope.cos[: len(rows)], model.rope.sin[: len(rows)])
    noise = None if initial_state is None else initial_state.to(model.device, model.dtype)
    e = model.prelude(rows, attention)
    state = model.first_state(e, noise)
    for loop in range(loops):
        state = model.core_step(loop, state, e, attention)
    return model.head(model.coda(state, attention))
