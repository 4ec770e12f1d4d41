"""Huginn (Raven): prelude blocks, a recurrent block fed with the prelude's output in every loop, coda blocks.

Source: seal-rg/recurrent-pretraining's public modelling code. Shape letters are those of `loopline.model.layers`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import Ops
from loopline.model.dense import prompt_logits
from loopline.model.layers import Attention, FeedForward, RopeTable
from loopline.model_spec import ModelSpec


@dataclass(frozen=True)
class HuginnLayer:
    """Weights of one physical block."""

    attention_in: Tensor  # [E] norm before attention
    attention_sum: Tensor  # [E] norm of its result plus the residual
    mlp_in: Tensor  # [E]
    mlp_sum: Tensor  # [E]
    qkv: Tensor  # [3E, E]
    qk_bias: Tensor  # [2H, d], queries' first
    out: Tensor  # [E, E]
    mlp: FeedForward


@dataclass(frozen=True)
class HuginnModel:
    """`LoopedModel` of the Huginn family. `layers` holds the prelude's, the recurrent block's, then the coda's."""

    spec: ModelSpec
    ops: Ops
    rope: RopeTable
    embedding: Tensor  # [V, E]
    layers: tuple[HuginnLayer, ...]
    adapter: Tensor  # [E, 2E], columns: state first, then e
    final_norm: Tensor  # [E]
    head_weight: Tensor  # [V, E]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def exit_gate(self) -> None:
        return None

    @property
    def uses_initial_state(self) -> bool:
        return True

    def prelude(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """Scaled embeddings through the prelude's blocks: [N, E]."""
        x = functional.embedding(token_ids, self.embedding) * math.sqrt(self.spec.hidden_size)
        return self._blocks(0, 0, self.spec.num_prelude, x, None, attention)[0]

    def first_state(self, e: Tensor, noise: Tensor | None) -> Tensor:
        """The noise itself, or zeros: [N, E]."""
        return torch.zeros_like(e) if noise is None else noise

    def core_step(self, loop: int, state: Tensor, e: Tensor, attention: Attention) -> Tensor:
        """The adapter joins state and e, then the recurrent blocks; only their own norms close a loop: [N, E]."""
        joined = self.ops.linear(torch.cat((state, e), dim=-1), self.adapter)
        return self._blocks(loop, self.spec.num_prelude, self.spec.num_recurrent, joined, None, attention)[0]

    def coda(self, state: Tensor, attention: Attention) -> Tensor:
        """The final norm, the coda's blocks, the final norm again: [N, E]."""
        x = self.ops.rms_norm(state, self.final_norm, self.spec.norm_eps)
        first, count = self.spec.num_prelude + self.spec.num_recurrent, self.spec.num_coda
        return self._blocks(0, first, count, x, self.final_norm, attention)[1]

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V]."""
        return self.ops.linear(hidden, self.head_weight).float()

    def prompt_logits(
        self, token_ids: Sequence[int], *, loops: int | None = None, initial_state: Tensor | None = None
    ) -> Tensor:
        """See `LoopedModel.prompt_logits`."""
        return prompt_logits(self, token_ids, loops or self.spec.default_loops, initial_state)

    def _blocks(
        self, loop: int, first: int, count: int, x: Tensor, last_norm: Tensor | None, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """x [N, E] through physical layers first to first + count - 1, and that normed by `last_norm`: each [N, E].

        Without `last_norm` the second is of no use.
        """
        ops, eps, layers = self.ops, self.spec.norm_eps, self.layers[first : first + count]
        last = layers[-1].mlp_sum if last_norm is None else last_norm
        following = [layer.attention_in for layer in layers[1:]] + [last]
        normed = ops.rms_norm(x, layers[0].attention_in, eps)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True), start=first):
            mixed = attention.attend(loop, index, ops.linear(normed, layer.qkv), layer.qk_bias)
            x, normed = ops.add_norm_norm(x, ops.linear(mixed, layer.out), layer.attention_sum, layer.mlp_in, eps)
            x, normed = ops.add_norm_norm(x, layer.mlp(ops, normed), layer.mlp_sum, next_norm, eps)
        return x, normed


def huginn_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Huginn checkpoint but the head, as the public code's state dict has them."""
    width, heads, inner = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    layer: dict[str, tuple[int, ...]] = {f"norm_{number}.weight": (width,) for number in (1, 2, 3, 4)}
    layer |= {
        "attn.Wqkv.weight": (3 * heads, width),
        "attn.qk_bias": (2, 1, spec.num_heads, spec.head_dim),
        "attn.proj.weight": (width, heads),
        "mlp.fc.weight": (2 * inner, width),
        "mlp.proj.weight": (width, inner),
    }
    return {
        "transformer.wte.weight": (spec.vocab_size, width),
        **{f"{prefix}.{name}": shape for prefix in _layer_prefixes(spec) for name, shape in layer.items()},
        "transformer.adapter.weight": (width, 2 * width),
        "transformer.ln_f.weight": (width,),
    }


def build_huginn(spec: ModelSpec, ops: Ops, rope: RopeTable, tensor: Callable[[str], Tensor]) -> HuginnModel:
    """The model from `tensor`, which gives each public name's tensor in the model's dtype, on its device."""

    def layer(prefix: str) -> HuginnLayer:
        return HuginnLayer(
            attention_in=tensor(f"{prefix}.norm_1.weight"),
            attention_sum=tensor(f"{prefix}.norm_2.weight"),
            mlp_in=tensor(f"{prefix}.norm_3.weight"),
            mlp_sum=tensor(f"{prefix}.norm_4.weight"),
            qkv=tensor(f"{prefix}.attn.Wqkv.weight"),
            qk_bias=tensor(f"{prefix}.attn.qk_bias").flatten(0, 2),
            out=tensor(f"{prefix}.attn.proj.weight"),
            mlp=FeedForward(gate_up=tensor(f"{prefix}.mlp.fc.weight"), down=tensor(f"{prefix}.mlp.proj.weight")),
        )

    embedding = tensor("transformer.wte.weight")
    return HuginnModel(
        spec=spec,
        ops=ops,
        rope=rope,
        embedding=embedding,
        layers=tuple(layer(prefix) for prefix in _layer_prefixes(spec)),
        adapter=tensor("transformer.adapter.weight"),
        final_norm=tensor("transformer.ln_f.weight"),
        head_weight=embedding if spec.tied_head else tensor("lm_head.weight"),
    )


def _layer_prefixes(spec: ModelSpec) -> list[str]:
    """Where the public names of each physical layer begin, in this project's order of layers."""
    groups = {"prelude": spec.num_prelude, "core_block": spec.num_recurrent, "coda": spec.num_coda}
    return [f"transformer.{group}.{index}" for group, count in groups.items() for index in range(count)]
