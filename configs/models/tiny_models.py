"""The two tiny looped models that `train_tiny.py` trains: geometry, public config keys, weights and forward.

Training forms, in float32 with the matrices in `dtype`: whole sequences, no cache. Shape letters: B windows of a batch,
L tokens of a window, D depths at which logits are wanted.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN, HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT, EPS = 256, 4, 64, 704, 320, 2048, 1e-6
LAYERS, LOOPS, OURO_THETA, ENTROPY_WEIGHT = 6, 4, 10000.0, 0.1
PRELUDE, CORE, CODA, RECURRENCE, MAX_RECURRENCE, BACKPROP, HUGINN_THETA = 2, 4, 2, 8, 16, 8, 50000
STD, EXPECTED_DEPTH = math.sqrt(2 / (5 * HIDDEN)), PRELUDE + CORE * RECURRENCE + CODA
BEGIN, END, IM_END, PAD = 256, 257, 259, 260
OUT_STD = STD / math.sqrt(2 * EXPECTED_DEPTH)  # of Huginn's output matrices

Weights = dict[str, Tensor]  # by public tensor name
Outputs = tuple[list[Tensor], list[Tensor]]  # logits per depth, exit gate logits per loop (Ouro)
Layer = tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, Tensor | None]  # four norms, qkv, out, fc, down, q/k bias


class Block(Protocol):
    """`block`, or its compiled form."""

    def __call__(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, drop: float) -> Tensor: ...


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float32."""
    return F.rms_norm(x.float(), (HIDDEN,), weight, EPS)


def rope_table(length: int, theta: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Float32 cos and sin, each [L, 1, 1, head_dim / 2]."""
    inverse = theta ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angles = torch.outer(torch.arange(length, device=device).float(), inverse)[:, None, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate x [B, L, 2, heads, dim]: adjacent pairs (Huginn) or the two halves of the head (Ouro)."""
    x = x.float()
    a, b = (x[..., ::2], x[..., 1::2]) if adjacent else x.chunk(2, -1)
    y = a * cos - b * sin, b * cos + a * sin
    return torch.stack(y, -1).flatten(-2) if adjacent else torch.cat(y, -1)


def block(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, drop: float) -> Tensor:
    """One block on float32 x [B, L, HIDDEN]: Ouro norms each branch, Huginn (it has a q/k bias) the residual sum."""
    norms, qkv, out, fc, down, bias = layer
    heads = F.linear(rms(x, norms[0]).to(qkv.dtype), qkv).view(*x.shape[:2], 3, HEADS, HEAD_DIM)
    qk, value = heads[:, :, :2], heads[:, :, 2]
    qk = rotate(qk if bias is None else qk + bias.squeeze(1), cos, sin, bias is not None).to(value.dtype)
    q, k, v = (t.transpose(1, 2) for t in (*qk.unbind(2), value))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    y = F.dropout(F.linear(y.flatten(2), out).float(), drop, drop > 0)
    x = x + rms(y, norms[1]) if bias is None else rms(x + y, norms[1])
    gate, up = F.linear(rms(x, norms[2]).to(fc.dtype), fc).chunk(2, -1)
    y = F.dropout(F.linear(F.silu(gate) * up, down).float(), drop, drop > 0)
    return x + rms(y, norms[3]) if bias is None else rms(x + y, norms[3])


class Ouro:
    """The same layers run several times; each loop ends with one shared norm and an exit gate."""

    name, depths, default = "tiny-ouro", tuple(range(1, LOOPS + 1)), LOOPS
    norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    matrices: ClassVar[Mapping[str, tuple[int, int]]] = {
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    config: ClassVar[Mapping[str, Any]] = {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": FFN,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": LAYERS,
        "model_type": "ouro",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": OURO_THETA,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "total_ut_steps": LOOPS,
        "early_exit_threshold": 1.0,
        "transformers_version": "4.55.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }

    def __init__(self, dtype: torch.dtype = torch.float32, drop: float = 0.0) -> None:
        self.dtype, self.drop, self.block = dtype, drop, block

    def init(self) -> Weights:
        """Random weights; branches start small, the gate starts near an even exit distribution."""
        w = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
            "model.norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN) * 0.02,
            "model.early_exit_gate.bias": torch.full((1,), -1.0),
            "model.early_exit_gate.weight": torch.zeros(1, HIDDEN),
        }
        for at in (f"model.layers.{i}." for i in range(LAYERS)):
            w |= {f"{at}{n}.weight": torch.full((HIDDEN,), 0.3 if n[-1] == "2" else 1.0) for n in self.norms}
            w |= {f"{at}{n}.weight": torch.randn(s) * s[1] ** -0.5 for n, s in self.matrices.items()}
        return w

    def layer(self, w: Weights, index: int) -> Layer:
        """One layer's weights, fused, the matrices in `dtype`."""
        norms, m = ([w[f"model.layers.{index}.{n}.weight"] for n in names] for names in (self.norms, self.matrices))
        qkv, out, fc, down = (torch.cat(parts).to(self.dtype) for parts in (m[:3], m[3:4], m[4:6], m[6:]))
        return norms, qkv, out, fc, down, None

    def forward(self, w: Weights, ids: Tensor, depths: tuple[int, ...], s0: Tensor | None = None) -> Outputs:
        """Float32 logits [B, L, VOCAB] after each loop in `depths`, and the exit gate's logit after every loop."""
        drop = self.drop * torch.is_grad_enabled()
        layers = [self.layer(w, index) for index in range(LAYERS)]
        x = F.embedding(ids, w["model.embed_tokens.weight"])
        logits, gates = [], []
        cos, sin = rope_table(ids.shape[1], OURO_THETA, ids.device)
        for t in range(1, max(depths) + 1):
            for layer in layers:
                x = self.block(x, layer, cos, sin, drop)
            x = rms(x, w["model.norm.weight"])
            gate = F.linear(x, w["model.early_exit_gate.weight"], w["model.early_exit_gate.bias"])
            gates.append(gate[..., 0])
            if t in depths:
                logits.append(F.linear(x, w["lm_head.weight"]))
        return logits, gates

    def objective(self, w: Weights, ids: Tensor, targets: Tensor, rng: np.random.Generator) -> Tensor:
        """Expected loss under the exit distribution minus ENTROPY_WEIGHT times that distribution's entropy."""
        logits, gates = self.forward(w, ids, self.depths)
        log_p = exit_log_probs(gates)
        return (log_p.exp() * (nll(logits, targets) + ENTROPY_WEIGHT * log_p)).sum(0).mean()


class Huginn:
    """Prelude, a core of blocks iterated from a random state with the prelude's output injected, and coda."""

    name, depths, default = "tiny-huginn", (1, 2, 4, 8, 16), RECURRENCE
    groups: ClassVar[Mapping[str, int]] = {"prelude": PRELUDE, "core_block": CORE, "coda": CODA}
    matrices: ClassVar[Mapping[str, tuple[int, int]]] = {
        "attn.Wqkv": (3 * HIDDEN, HIDDEN),
        "attn.proj": (HIDDEN, HIDDEN),
        "mlp.fc": (2 * FFN, HIDDEN),
        "mlp.proj": (HIDDEN, FFN),
    }
    config: ClassVar[Mapping[str, Any]] = {
        "activation_checkpoint_impl": "per-iteration",
        "architecture_class_name": "RecurrentGPT",
        "architectures": ["RavenForCausalLM"],
        "bias": False,
        "block_class_name": "SandwichBlock",
        "block_size": CONTEXT,
        "effective_expected_depth": EXPECTED_DEPTH,
        "head_dim": HEAD_DIM,
        "init_orthogonal": False,
        "init_strategy": "takase",
        "init_values": {"embed_scale": HIDDEN**0.5, "embedding": STD, "out_proj": OUT_STD, "std": STD},
        "injection_type": "linear",
        "intermediate_size": FFN,
        "mean_backprop_depth": BACKPROP,
        "mean_recurrence": RECURRENCE,
        "mlp_class_name": "GatedMLP",
        "model_type": "huginn_raven",
        "n_embd": HIDDEN,
        "n_heads": HEADS,
        "n_layers": PRELUDE + CORE + CODA,
        "n_layers_in_coda": CODA,
        "n_layers_in_prelude": PRELUDE,
        "n_layers_in_recurrent_block": CORE,
        "nonlin_name": "SiLU",
        "norm_eps": EPS,
        "norm_class_name": "RMSNorm_llama",
        "num_key_value_heads": HEADS,
        "padded_vocab_size": VOCAB,
        "padding_multiple": 64,
        "pad_token_id": PAD,
        "qk_bias": True,
        "rope_base": HUGINN_THETA,
        "sampling_scheme": "poisson-lognormal-filling",
        "state_init": "like-init",
        "tie_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.2",
        "vocab_size": VOCAB,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }

    def __init__(self, dtype: torch.dtype = torch.float32, drop: float = 0.0) -> None:
        self.dtype, self.drop, self.block = dtype, drop, block

    def init(self) -> Weights:
        """Random weights, output matrices smaller. The head is tied; the rope table is a stored constant."""
        w = {
            "transformer.wte.weight": torch.randn(VOCAB, HIDDEN) * STD,
            "transformer.ln_f.weight": torch.ones(HIDDEN),
            "transformer.adapter.weight": torch.randn(HIDDEN, 2 * HIDDEN) * STD,
            "freqs_cis": torch.stack(rope_table(CONTEXT, HUGINN_THETA), -1)[None, :, 0],
        }
        for at in (f"transformer.{group}.{i}." for group, count in self.groups.items() for i in range(count)):
            w |= {f"{at}norm_{j}.weight": torch.ones(HIDDEN) for j in (1, 2, 3, 4)}
            for name, shape in self.matrices.items():
                w[f"{at}{name}.weight"] = torch.randn(shape) * (OUT_STD if ".proj" in name else STD)
            w[f"{at}attn.qk_bias"] = torch.zeros(2, 1, HEADS, HEAD_DIM)
        return w

    def layer(self, w: Weights, prefix: str) -> Layer:
        """One block's weights, the matrices in `dtype`."""
        norms = [w[f"{prefix}.norm_{j}.weight"] for j in (1, 2, 3, 4)]
        qkv, out, fc, down = (w[f"{prefix}.{name}.weight"].to(self.dtype) for name in self.matrices)
        return norms, qkv, out, fc, down, w[f"{prefix}.attn.qk_bias"]

    def forward(self, w: Weights, ids: Tensor, depths: tuple[int, ...], s0: Tensor | None = None) -> Outputs:
        """Float32 logits [B, L, VOCAB] after each loop in `depths`; only the last BACKPROP loops get gradients."""
        grad = torch.is_grad_enabled()
        cos, sin = rope_table(ids.shape[1], HUGINN_THETA, ids.device)
        layers = {
            group: [self.layer(w, f"transformer.{group}.{i}") for i in range(count)]
            for group, count in self.groups.items()
        }
        wte, adapter, ln_f = (w[f"transformer.{name}.weight"] for name in ("wte", "adapter", "ln_f"))
        adapter = adapter.to(self.dtype)

        def group(name: str, x: Tensor) -> Tensor:
            for layer in layers[name]:
                x = self.block(x, layer, cos, sin, self.drop * grad)
            return x

        e = group("prelude", F.embedding(ids, wte) * HIDDEN**0.5)
        s = initial_state(tuple(e.shape), ids.device) if s0 is None else s0
        logits = []
        for t in range(1, max(depths) + 1):
            with torch.set_grad_enabled(grad and t > max(depths) - BACKPROP):
                s = group("core_block", F.linear(torch.cat((s, e), -1).to(self.dtype), adapter).float())
            if t in depths:
                logits.append(F.linear(rms(group("coda", rms(s, ln_f)), ln_f), wte))
        return logits, []

    def objective(self, w: Weights, ids: Tensor, targets: Tensor, rng: np.random.Generator) -> Tensor:
        """Mean loss after a random number of loops: 1 + Poisson with a log-normal rate, mean about 8, at most 16."""
        loops = 1 + rng.poisson((RECURRENCE - 1) * math.exp(0.5 * rng.standard_normal() - 0.125))
        return nll(self.forward(w, ids, (min(int(loops), MAX_RECURRENCE),))[0], targets).mean()


def initial_state(shape: tuple[int, ...], device: torch.device | str, seed: int | None = None) -> Tensor:
    """Draw Huginn's s0: a normal cut at three deviations of sqrt(2 / 5E), times sqrt(E)."""
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    cut = math.erf(3 / math.sqrt(2))
    uniform = torch.empty(shape, device=device).uniform_(-cut, cut, generator=generator)
    return uniform.erfinv() * (math.sqrt(2 * HIDDEN) * STD)


def nll(logits: list[Tensor], targets: Tensor) -> Tensor:
    """Per-token cross entropy in nats: [D, B, L]."""
    flat = targets.flatten()
    return torch.stack([F.cross_entropy(x.flatten(0, 1), flat, reduction="none").view_as(targets) for x in logits])


def exit_log_probs(gates: list[Tensor]) -> Tensor:
    """Log probability of leaving after each loop, [loops, B, L]; the last loop takes what remains."""
    g = torch.stack(gates)
    stay = torch.cat((torch.zeros_like(g[:1]), F.logsigmoid(-g[:-1]).cumsum(0)))
    return torch.cat((stay[:-1] + F.logsigmoid(g[:-1]), stay[-1:]))
