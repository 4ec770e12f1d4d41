"""Checkpoint folders that are wrong, and that each error names the file and the tensor."""

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopline.errors import CheckpointError, UnsupportedArchitecture
from loopline.model import load_model, weights, weights_digest
from loopline.model.weights import files_digest
from tests.support.golden import GOLDEN

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GATE = "model.early_exit_gate.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPLINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def ouro(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "ouro_fp32", tmp_path / "ouro"))


@pytest.fixture
def huginn(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "huginn_fp32", tmp_path / "huginn"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "ouro_sharded_fp32", tmp_path / "sharded"))


def edit(folder: Path, changes: dict[str, Tensor | None], file: str = SINGLE) -> None:
    """Put tensors into a file of a checkpoint, or (None) take them out."""
    tensors = load_file(folder / file) | {name: value for name, value in changes.items() if value is not None}
    removed = [name for name, value in changes.items() if value is None]
    save_file({name: value for name, value in tensors.items() if name not in removed}, folder / file)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    return str(caught.value)


def test_a_missing_tensor_is_named_with_its_shape(ouro: Path) -> None:
    edit(ouro, {GATE: None})
    assert error_of(ouro) == f"{ouro}: tensor {GATE} (1, 64) is missing"


def test_an_extra_tensor_is_named(ouro: Path) -> None:
    edit(ouro, {"model.layers.9.surprise": torch.zeros(2, 3)})
    text = error_of(ouro)
    assert text.startswith(f"{ouro / SINGLE}: ")
    assert "model.layers.9.surprise (2, 3)" in text


def test_a_misshaped_tensor_is_named_with_both_shapes(ouro: Path) -> None:
    edit(ouro, {GATE: torch.zeros(1, 63)})
    assert error_of(ouro) == f"{ouro / SINGLE}: tensor {GATE} has shape (1, 63); config.json asks for (1, 64)"


def test_a_tensor_of_another_type_is_named(ouro: Path) -> None:
    edit(ouro, {GATE: torch.zeros(1, 64, dtype=torch.int8)})
    assert f"tensor {GATE} has type I8" in error_of(ouro)


def test_an_untied_head_is_needed(ouro: Path) -> None:
    edit(ouro, {"lm_head.weight": None})
    assert "lm_head.weight (256, 64) is missing" in error_of(ouro)


def test_rope_tables_are_ignored_and_a_tied_head_may_be_absent(huginn: Path) -> None:
    prompt = [3, 1, 4, 1, 5]
    expected = load_model(huginn).prompt_logits(prompt)
    edit(huginn, {"freqs_cis": torch.zeros(7), "lm_head.weight": None, "a.rotary_emb.inv_freq": torch.zeros(2)})
    assert torch.equal(load_model(huginn).prompt_logits(prompt), expected)


def test_a_stored_tied_head_must_have_its_shape(huginn: Path) -> None:
    edit(huginn, {"lm_head.weight": torch.zeros(8, 64)})
    assert "lm_head.weight has shape (8, 64)" in error_of(huginn)


def test_unsupported_architecture(ouro: Path) -> None:
    config = json.loads((ouro / "config.json").read_text())
    (ouro / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedArchitecture, match="LlamaForCausalLM"):
        load_model(ouro)


def test_no_weights(ouro: Path) -> None:
    (ouro / SINGLE).unlink()
    assert error_of(ouro) == f"{ouro}: neither {SINGLE} nor {INDEX} is there"


def test_a_broken_file(ouro: Path) -> None:
    (ouro / SINGLE).write_bytes(b"not a safetensors file")
    assert error_of(ouro).startswith(f"{ouro / SINGLE}: ")


def test_an_index_that_names_a_missing_file(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert error_of(sharded) == (
        f"{sharded / INDEX}: names model-00002-of-00002.safetensors, and there is no such file"
    )


def test_an_index_that_misplaces_a_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    shards = [load_file(path) for path in sorted(sharded.glob("model-*.safetensors"))]
    assert "model.norm.weight" not in shards[0]
    assert re.search(r"places tensor model\.norm\.weight in model-00001-of-00002", error_of(sharded))


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    norm = load_file(sharded / "model-00002-of-00002.safetensors")["model.norm.weight"]
    edit(sharded, {"model.norm.weight": norm}, "model-00001-of-00002.safetensors")
    assert "model.norm.weight is in model-00001-of-00002.safetensors too" in error_of(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_an_unreadable_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert error_of(sharded).startswith(f"{sharded / INDEX}: no readable weight_map")


def test_the_digest_changes_with_any_file_it_covers(sharded: Path) -> None:
    first = weights_digest(sharded)
    assert re.fullmatch(r"[0-9a-f]{32}", first)
    assert weights_digest(GOLDEN / "ouro_sharded_fp32") == first
    edit(sharded, {"model.norm.weight": torch.ones(64)}, "model-00002-of-00002.safetensors")
    second = weights_digest(sharded)
    with (sharded / "config.json").open("a") as file:
        file.write("\n")
    assert len({first, second, weights_digest(sharded)}) == 3


def test_a_renamed_shard_is_another_digest(sharded: Path) -> None:
    first = weights_digest(sharded)
    (sharded / "model-00002-of-00002.safetensors").rename(sharded / "model-00002-of-00003.safetensors")
    index = sharded / INDEX
    index.write_text(index.read_text().replace("00002-of-00002", "00002-of-00003"))
    assert weights_digest(sharded) != first


def test_a_second_start_takes_the_cached_digest(ouro: Path, tmp_path: Path) -> None:
    first = weights_digest(ouro, lambda: time.time_ns() + 10**10)
    assert first == weights_digest(GOLDEN / "ouro_fp32")
    (record,) = (path for path in (tmp_path / "cache").rglob("*.json") if str(ouro) in path.read_text())
    record.write_text(record.read_text().replace(first, "5" * 32))
    assert weights_digest(ouro) == "5" * 32


def test_the_digest_does_not_depend_on_threads_and_covers_every_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(weights, "_READ_BYTES", 300)
    content = random.Random(0).randbytes(3500)
    paths = [tmp_path / name for name in ("empty", "one", "even", "odd")]
    for path, size in zip(paths, (0, 1, 3000, 3500), strict=True):
        path.write_bytes(content[:size])
    first = files_digest(paths, 1)
    assert {files_digest(paths, num_threads) for num_threads in (None, 2, 7, 64)} == {first}
    seen = {first, files_digest(paths[:3]), files_digest([paths[0], paths[1], paths[3], paths[2]])}
    for place in (0, 299, 300, 999, 1000, 2500, 3499):
        paths[3].write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        seen.add(files_digest(paths))
    assert len(seen) == 10


def test_the_digest_is_the_same_on_every_machine(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"loop" * 1000)
    assert files_digest([tmp_path / "a"]) == "c63c883c93dde17770ac84d769d3426e"


def test_the_digest_of_a_folder_without_config(ouro: Path) -> None:
    (ouro / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        weights_digest(ouro)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        files_digest([ouro / "config.json"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "child").touch()
    with pytest.raises(CheckpointError, match="folder"):
        files_digest([tmp_path / "folder"])
