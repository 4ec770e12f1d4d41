"""A looped model's geometry, read from a checkpoint folder's config.json. No torch: the coordinator uses it too.

Physical layers are numbered prelude, recurrent block, coda. Sources: the two public modelling files,
`modeling_ouro.py` of ByteDance/Ouro-1.4B, `raven_modeling_minimal.py` of seal-rg/recurrent-pretraining, and their
config classes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from loopline.errors import CheckpointError, UnsupportedArchitecture

ARCHITECTURES = {"OuroForCausalLM": "ouro", "RavenForCausalLM": "huginn"}
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_TORCH_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
# Ids that end a chat turn although config.json does not list them (the tokenizers' own special tokens).
_CHAT_END_TOKENS = ("<|im_end|>", "<|end_turn|>")
_HUGINN_BEGIN_TOKEN = "<|begin_text|>"  # the public generate() stops at it


class Family(StrEnum):
    """Which of the two public model families a checkpoint belongs to."""

    OURO = "ouro"
    HUGINN = "huginn"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Frozen geometry; widths are element counts, not bytes."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_prelude: int
    num_recurrent: int
    num_coda: int
    default_loops: int
    context_tokens: int
    rope_base: float
    norm_eps: float
    tied_head: bool
    checkpoint_dtype: str  # "fp32" | "bf16"
    bos_id: int | None
    stop_ids: tuple[int, ...]  # ascending

    @property
    def num_layers(self) -> int:
        """Physical layers: each has weights once, whatever the loops."""
        return self.num_prelude + self.num_recurrent + self.num_coda

    @property
    def has_exit_gate(self) -> bool:
        """Whether checkpoints have a gate that says after each loop how likely it is to be the last."""
        return self.family is Family.OURO

    @property
    def uses_initial_state(self) -> bool:
        """Whether the loop starts from a state of its own, noise or zeros, and not from the embeddings."""
        return self.family is Family.HUGINN

    @property
    def initial_state_std(self) -> float:
        """Standard deviation of Huginn's initial state, times sqrt(width), before the cut at three deviations."""
        return math.sqrt(2.0 / 5.0)


def load_model_spec(folder: str | Path) -> ModelSpec:
    """Read config.json (and generation_config.json, tokenizer.json for stop ids) of a checkpoint folder.

    Raises CheckpointError that names the file or key, UnsupportedArchitecture that names the architecture.
    """
    path = Path(folder)
    config = _read_json(path / "config.json")
    names = config.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise UnsupportedArchitecture(
            f"{path / 'config.json'}: architectures is {names!r}; served: {', '.join(sorted(ARCHITECTURES))}"
        )
    reader = _Keys(path / "config.json", config)
    family = Family(ARCHITECTURES[known[0]])
    stop_ids = _stop_ids(path, config, family)
    spec = _ouro_spec(reader, stop_ids) if family is Family.OURO else _huginn_spec(reader, stop_ids)
    _check(reader, spec)
    return spec


def _ouro_spec(keys: "_Keys", stop_ids: tuple[int, ...]) -> ModelSpec:
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    rope = keys.config.get("rope_parameters") or {}
    keys.require("rope_scaling", (None,))
    keys.require("hidden_act", (None, "silu"))
    keys.require("use_sliding_window", (None, False))
    if any(kind != "full_attention" for kind in keys.config.get("layer_types") or []):
        raise keys.error("layer_types", keys.config["layer_types"], "full_attention only")
    if rope.get("rope_type", "default") != "default":
        raise keys.error("rope_parameters", rope, "rope_type default")
    base = rope.get("rope_theta", keys.config.get("rope_theta"))
    if base is None:
        raise keys.error("rope_theta", None, "a number")
    return ModelSpec(
        family=Family.OURO,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", hidden // heads),
        vocab_size=keys.integer("vocab_size"),
        num_prelude=0,
        num_recurrent=keys.integer("num_hidden_layers"),
        num_coda=0,
        default_loops=keys.integer("total_ut_steps", 4),
        context_tokens=keys.integer("max_position_embeddings"),
        rope_base=float(base),
        norm_eps=float(keys.config.get("rms_norm_eps", 1e-6)),
        tied_head=bool(keys.config.get("tie_word_embeddings", False)),
        checkpoint_dtype=keys.dtype(),
        bos_id=keys.config.get("bos_token_id"),
        stop_ids=stop_ids,
    )


def _huginn_spec(keys: "_Keys", stop_ids: tuple[int, ...]) -> ModelSpec:
    heads = keys.integer("n_heads", keys.config.get("num_attention_heads"))
    hidden = keys.integer("n_embd")
    keys.require("injection_type", (None, "linear"))
    keys.require("state_init", (None, "like-init"))
    keys.require("qk_bias", (None, True))
    keys.require("bias", (None, False))
    keys.require("mlp_class_name", (None, "GatedMLP"))
    keys.require("nonlin_name", (None, "SiLU"))
    keys.require("block_class_name", (None, "SandwichBlock"))
    keys.require("norm_class_name", (None, "RMSNorm_llama"))
    return ModelSpec(
        family=Family.HUGINN,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=keys.integer("head_dim", hidden // heads),
        vocab_size=keys.integer("padded_vocab_size", keys.config.get("vocab_size")),
        num_prelude=keys.integer("n_layers_in_prelude"),
        num_recurrent=keys.integer("n_layers_in_recurrent_block"),
        num_coda=keys.integer("n_layers_in_coda"),
        default_loops=keys.integer("mean_recurrence"),
        context_tokens=keys.integer("block_size"),
        rope_base=float(keys.config.get("rope_base", 50_000)),
        norm_eps=float(keys.config.get("norm_eps", 1e-6)),
        tied_head=bool(keys.config.get("tie_embeddings", True)),
        checkpoint_dtype=keys.dtype(),
        bos_id=keys.config.get("bos_token_id"),
        stop_ids=stop_ids,
    )


def _check(keys: "_Keys", spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise keys.error("num_key_value_heads", spec.num_kv_heads, f"a divisor of {spec.num_heads}")
    if spec.head_dim % 2:
        raise keys.error("head_dim", spec.head_dim, "an even number")


def _stop_ids(folder: Path, config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Ids that end an answer: config's, generation config's, and the turn ends that the tokenizer knows."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    for source in (config, _read_json(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        wanted = _CHAT_END_TOKENS + ((_HUGINN_BEGIN_TOKEN,) if family is Family.HUGINN else ())
        for token in _read_json(tokenizer).get("added_tokens") or []:
            if token.get("content") in wanted:
                found.add(token["id"])
    return tuple(sorted(found))


@dataclass(frozen=True)
class _Keys:
    """Typed reads of one config.json; every failure names the file, the key, the value and what is allowed."""

    path: Path
    config: Mapping[str, Any]

    def error(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {value!r}; allowed: {allowed}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key, default)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(key, value, "a whole number, 0 or above")
        if value == 0 and not key.startswith("n_layers_in_"):
            raise self.error(key, value, "1 and above")
        return value

    def require(self, key: str, allowed: tuple[object, ...]) -> None:
        if self.config.get(key) not in allowed:
            names = " or ".join("absent" if value is None else repr(value) for value in allowed)
            raise self.error(key, self.config.get(key), names)

    def dtype(self) -> str:
        value = self.config.get("torch_dtype", self.config.get("dtype", "float32"))
        if value not in _TORCH_NAMES:
            raise self.error("torch_dtype", value, " or ".join(_TORCH_NAMES))
        return _TORCH_NAMES[value]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
