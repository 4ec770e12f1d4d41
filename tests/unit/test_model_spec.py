"""Geometry read from config.json: both families, what may be absent, what is refused and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from loopline.errors import CheckpointError, UnsupportedArchitecture
from loopline.model_spec import Family, ModelSpec, load_model_spec

# The values of the public checkpoints, in the keys that those files use.
OURO: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 49152,
    "max_position_embeddings": 65536,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "layer_types": ["full_attention"] * 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
HUGINN: dict[str, Any] = {
    "architectures": ["RavenForCausalLM"],
    "n_embd": 5280,
    "n_heads": 55,
    "num_key_value_heads": 55,
    "intermediate_size": 17920,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "mean_recurrence": 32,
    "block_size": 4096,
    "vocab_size": 65536,
    "padded_vocab_size": 65536,
    "injection_type": "linear",
    "qk_bias": True,
    "bias": False,
    "tie_embeddings": True,
    "bos_token_id": 65504,
    "eos_token_id": 65505,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: dict[str, Any], **files: Any) -> Path:
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_ouro(tmp_path: Path) -> None:
    assert load_model_spec(write(tmp_path, OURO)) == ModelSpec(
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
        rope_base=1e6,
        norm_eps=1e-6,
        tied_head=False,
        checkpoint_dtype="bf16",
        bos_id=0,
        stop_ids=(0,),
    )


def test_huginn(tmp_path: Path) -> None:
    spec = load_model_spec(write(tmp_path, HUGINN))
    assert spec.family is Family.HUGINN
    assert (spec.num_prelude, spec.num_recurrent, spec.num_coda, spec.num_layers) == (2, 4, 2, 8)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (55, 55, 96)
    assert (spec.rope_base, spec.norm_eps, spec.default_loops) == (50_000.0, 1e-6, 32)
    assert spec.tied_head
    assert spec.initial_state_std == pytest.approx(0.632, abs=1e-3)


def test_huginn_heads_under_their_other_name(tmp_path: Path) -> None:
    config = without(HUGINN, "n_heads") | {"num_attention_heads": 55}
    assert load_model_spec(write(tmp_path, config)).num_heads == 55


def test_rope_parameters_of_newer_files(tmp_path: Path) -> None:
    config = without(OURO, "rope_theta") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert load_model_spec(write(tmp_path, config)).rope_base == 5e5


def test_what_ouro_may_leave_out(tmp_path: Path) -> None:
    config = without(OURO, "total_ut_steps", "num_key_value_heads", "head_dim", "layer_types", "torch_dtype")
    spec = load_model_spec(write(tmp_path, config))
    assert (spec.default_loops, spec.num_kv_heads, spec.head_dim, spec.checkpoint_dtype) == (4, 16, 128, "fp32")


def test_stop_ids_are_gathered_from_three_files(tmp_path: Path) -> None:
    added = [{"id": 2, "content": "<|im_end|>"}, {"id": 1, "content": "<|im_start|>"}]
    folder = write(tmp_path, OURO, generation_config={"eos_token_id": [7, 0]}, tokenizer={"added_tokens": added})
    assert load_model_spec(folder).stop_ids == (0, 2, 7)


def test_huginn_stops_at_a_begin_token_too(tmp_path: Path) -> None:
    added = [{"id": 65504, "content": "<|begin_text|>"}, {"id": 65508, "content": "<|end_turn|>"}]
    spec = load_model_spec(write(tmp_path, HUGINN, tokenizer={"added_tokens": added}))
    assert spec.stop_ids == (65504, 65505, 65508)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (OURO, {"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        (OURO, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type default"),
        (OURO, {"layer_types": ["sliding_attention"]}, "full_attention only"),
        (OURO, {"use_sliding_window": True}, "use_sliding_window is True"),
        (OURO, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (OURO, {"rope_theta": None}, "rope_theta is None"),
        (OURO, {"num_hidden_layers": 0}, "num_hidden_layers is 0; allowed: 1 and above"),
        (OURO, {"hidden_size": "2048"}, "hidden_size is '2048'"),
        (OURO, {"num_key_value_heads": 5}, "num_key_value_heads is 5; allowed: a divisor of 16"),
        (OURO, {"head_dim": 127}, "head_dim is 127; allowed: an even number"),
        (OURO, {"torch_dtype": "float16"}, "torch_dtype is 'float16'"),
        (HUGINN, {"injection_type": "add"}, "injection_type is 'add'"),
        (HUGINN, {"qk_bias": False}, "qk_bias is False"),
        (HUGINN, {"n_layers_in_prelude": -1}, "n_layers_in_prelude is -1"),
    ],
)
def test_what_is_refused(tmp_path: Path, base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model_spec(write(tmp_path, base | change))
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("names", [[], ["LlamaForCausalLM"], None])
def test_other_architectures(tmp_path: Path, names: list[str] | None) -> None:
    with pytest.raises(UnsupportedArchitecture, match="served: OuroForCausalLM, RavenForCausalLM"):
        load_model_spec(write(tmp_path, OURO | {"architectures": names}))


@pytest.mark.parametrize("text", ["{", "[1]", "\x80"])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_spec(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_model_spec(tmp_path)
