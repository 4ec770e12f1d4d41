"""Ouro: every layer is in the loop, each branch is normed before and after, and one final norm closes every loop.

Source: ByteDance Ouro-1.4B's public modelling code, at a fixed depth: the head reads the last loop's state,
whatever the exit gate says. Shape letters are those of `loopline.model.layers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import Ops
from loopline.model.dense import prompt_logits
from loopline.model.layers import Attention, ExitGate, FeedForward, RopeTable
from loopline.model_spec import ModelSpec

_NORMS = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")


@dataclass(frozen=True)
class OuroLayer:
    """Weights of one physical layer, q/k/v and gate/up fused."""

    attention_in: Tensor  # [E] norm before attention
    attention_out: Tensor  # [E] norm of its result
    mlp_in: Tensor  # [E]
    mlp_out: Tensor  # [E]
    qkv: Tensor  # [(H + 2C) * d, E]
    out: Tensor  # [E, H * d]
    mlp: FeedForward


@dataclass(frozen=True)
class OuroModel:
    """`LoopedModel` of the Ouro family."""

    spec: ModelSpec
    ops: Ops
    rope: RopeTable
    embedding: Tensor  # [V, E]
    layers: tuple[OuroLayer, ...]
    final_norm: Tensor  # [E]
    head_weight: Tensor  # [V, E]
    exit_gate: ExitGate

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def uses_initial_state(self) -> bool:
        return False

    def prelude(self, token_ids: Tensor, attention: Attention) -> Tensor:
        """The embeddings: [N, E]."""
        return functional.embedding(token_ids, self.embedding)

    def first_state(self, e: Tensor, noise: Tensor | None) -> Tensor:
        """The embeddings are the first state; there is no noise."""
        return e

    def core_step(self, loop: int, state: Tensor, e: Tensor, attention: Attention) -> Tensor:
        """All layers, then the final norm, whose result feeds the next loop; e is not used again: [N, E]."""
        ops, eps = self.ops, self.spec.norm_eps
        following = [layer.attention_in for layer in self.layers[1:]] + [self.final_norm]
        normed = ops.rms_norm(state, self.layers[0].attention_in, eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            mixed = attention.attend(loop, index, ops.linear(normed, layer.qkv), None)
            branch = ops.linear(mixed, layer.out)
            state, normed = ops.norm_add_norm(state, branch, layer.attention_out, layer.mlp_in, eps)
            state, normed = ops.norm_add_norm(state, layer.mlp(ops, normed), layer.mlp_out, next_norm, eps)
        return normed

    def coda(self, state: Tensor, attention: Attention) -> Tensor:
        """The last loop's state as it is: its norm has been applied."""
        return state

    def head(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V]."""
        return self.ops.linear(hidden, self.head_weight).float()

    def prompt_logits(
        self, token_ids: Sequence[int], *, loops: int | None = None, initial_state: Tensor | None = None
    ) -> Tensor:
        """See `LoopedModel.prompt_logits`."""
        return prompt_logits(self, token_ids, loops or self.spec.default_loops, None)


def ouro_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an Ouro checkpoint but the head, as the public code's state dict has them."""
    width, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    kv_heads, inner = spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    layer = {f"{name}.weight": (width,) for name in _NORMS} | {
        "self_attn.q_proj.weight": (heads, width),
        "self_attn.k_proj.weight": (kv_heads, width),
        "self_attn.v_proj.weight": (kv_heads, width),
        "self_attn.o_proj.weight": (width, heads),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    return {
        "model.embed_tokens.weight": (spec.vocab_size, width),
        **{f"model.layers.{i}.{name}": shape for i in range(spec.num_recurrent) for name, shape in layer.items()},
        "model.norm.weight": (width,),
        "model.early_exit_gate.weight": (1, width),
        "model.early_exit_gate.bias": (1,),
    }


def build_ouro(spec: ModelSpec, ops: Ops, rope: RopeTable, tensor: Callable[[str], Tensor]) -> OuroModel:
    """The model from `tensor`, which gives each public name's tensor in the model's dtype, on its device."""

    def layer(index: int) -> OuroLayer:
        def named(name: str) -> Tensor:
            return tensor(f"model.layers.{index}.{name}.weight")

        return OuroLayer(
            attention_in=named("input_layernorm"),
            attention_out=named("input_layernorm_2"),
            mlp_in=named("post_attention_layernorm"),
            mlp_out=named("post_attention_layernorm_2"),
            qkv=torch.cat([named(f"self_attn.{name}_proj") for name in "qkv"]),
            out=named("self_attn.o_proj"),
            mlp=FeedForward(
                gate_up=torch.cat([named("mlp.gate_proj"), named("mlp.up_proj")]), down=named("mlp.down_proj")
            ),
        )

    embedding = tensor("model.embed_tokens.weight")
    return OuroModel(
        spec=spec,
        ops=ops,
        rope=rope,
        embedding=embedding,
        layers=tuple(layer(index) for index in range(spec.num_recurrent)),
        final_norm=tensor("model.norm.weight"),
        head_weight=embedding if spec.tied_head else tensor("lm_head.weight"),
        exit_gate=ExitGate(
            tensor("model.early_exit_gate.weight").float().squeeze(0), tensor("model.early_exit_gate.bias").float()
        ),
    )
