"""Shapes of models that `loopline bench engine` knows by name, and how much work each is. No torch.

Sources of the two public shapes: config.json of ByteDance/Ouro-1.4B and of tomg-group-umd/huginn-0125.
"""

from collections.abc import Mapping
from typing import Any

from loopline.capacity.geometry import Geometry
from loopline.model_spec import Family, ModelSpec

_OURO = ModelSpec(
    family=Family.OURO,
    hidden_size=2048,
    intermediate_size=5632,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    vocab_size=49152,
    num_prelude=0,
    num_recurrent=24,
    num_coda=0,
    default_loops=4,
    context_tokens=65536,
    rope_base=1_000_000.0,
    norm_eps=1e-6,
    tied_head=False,
    checkpoint_dtype="bf16",
    bos_id=0,
    stop_ids=(0,),
)
_HUGINN = ModelSpec(
    family=Family.HUGINN,
    hidden_size=5280,
    intermediate_size=17920,
    num_heads=55,
    num_kv_heads=55,
    head_dim=96,
    vocab_size=65536,
    num_prelude=2,
    num_recurrent=4,
    num_coda=2,
    default_loops=32,
    context_tokens=4096,
    rope_base=50_000.0,
    norm_eps=1e-6,
    tied_head=True,
    checkpoint_dtype="bf16",
    bos_id=65504,
    stop_ids=(65505,),
)
_TINY = ModelSpec(
    family=Family.OURO,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    num_prelude=0,
    num_recurrent=2,
    num_coda=0,
    default_loops=2,
    context_tokens=1024,
    rope_base=10_000.0,
    norm_eps=1e-6,
    tied_head=False,
    checkpoint_dtype="fp32",
    bos_id=0,
    stop_ids=(0,),
)
SHAPES: Mapping[str, ModelSpec] = {"ouro-1.4b": _OURO, "huginn-0125": _HUGINN, "tiny": _TINY}
"""`tiny` has no public model: it is there to see whether a benchmark runs."""

_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16"}


def config_json(spec: ModelSpec) -> dict[str, Any]:
    """The config.json that `load_model_spec` reads this shape from."""
    shared = {
        "intermediate_size": spec.intermediate_size,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "torch_dtype": _TORCH_NAMES[spec.checkpoint_dtype],
        "bos_token_id": spec.bos_id,
        "eos_token_id": list(spec.stop_ids),
    }
    if spec.family is Family.OURO:
        return shared | {
            "architectures": ["OuroForCausalLM"],
            "hidden_size": spec.hidden_size,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "num_hidden_layers": spec.num_recurrent,
            "total_ut_steps": spec.default_loops,
            "max_position_embeddings": spec.context_tokens,
            "rope_theta": spec.rope_base,
            "rms_norm_eps": spec.norm_eps,
            "tie_word_embeddings": spec.tied_head,
        }
    return shared | {
        "architectures": ["RavenForCausalLM"],
        "n_embd": spec.hidden_size,
        "n_heads": spec.num_heads,
        "n_layers_in_prelude": spec.num_prelude,
        "n_layers_in_recurrent_block": spec.num_recurrent,
        "n_layers_in_coda": spec.num_coda,
        "mean_recurrence": spec.default_loops,
        "block_size": spec.context_tokens,
        "rope_base": spec.rope_base,
        "norm_eps": spec.norm_eps,
        "tie_embeddings": spec.tied_head,
    }


def body_weights(spec: ModelSpec) -> int:
    """Weights of matrices that one token goes through, head and embedding not counted; the loop's count every loop."""
    return _at_full_depth(spec).body_weights


def head_weights(spec: ModelSpec) -> int:
    """Weights of the head."""
    return _at_full_depth(spec).head_weights


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of weights that one pass reads: those of the loop again in every loop, rows of the embedding left out."""
    return _at_full_depth(spec, dtype).pass_weight_bytes


def prompt_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Floating-point operations of one prompt at full depth, with the head at its last position."""
    return _at_full_depth(spec).prefill_work(1, num_tokens).flops


def _at_full_depth(spec: ModelSpec, dtype: str = "bf16") -> Geometry:
    return Geometry.of(spec, spec.default_loops, dtype)
