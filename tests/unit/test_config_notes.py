"""Settings without effect: which are said, and that the configurations which ship have none."""

import logging
from pathlib import Path

import pytest

from coordinator.launcher import Launcher
from loopline.bench.shapes import SHAPES
from loopline.config import load_config
from loopline.config_notes import LEAST_PACKED_SHARE_TOKENS, LEAST_SHARE_TOKENS, notes
from loopline.engine.packed_loop import GraphPacked
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.sched.share import TILES
from tests.support.golden import MODELS

OURO, HUGINN = load_model_spec(MODELS / "tiny-ouro"), load_model_spec(MODELS / "tiny-huginn")
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
NOTHING_CACHED = (
    "kv.prefix_cache is auto, and nothing is cached of requests that start from noise: model.noise_key is request"
)
OF_EACH = "model.noise_key is request, so nothing is cached"
OFF = "kv.prefix_cache is false, so nothing is cached"
WHOLE = "there are unified workers only, and such a worker computes every prompt itself"


def _notes(folder: Path, text: str, spec: ModelSpec | None = OURO) -> list[str]:
    file = folder / "cluster.yaml"
    file.write_text(text if "model:" in text else f"model: {{path: m}}\n{text}", encoding="utf-8")
    return notes(load_config(file), spec)


@pytest.mark.parametrize(
    ("text", "spec", "words"),
    [
        ("", OURO, []),
        ("", None, []),
        (
            "model: {path: m, noise_key: position}",
            OURO,
            ["model.noise_key is position, which has no effect: Ouro starts"],
        ),
        (
            "model: {path: m, noise_seed: 7, initial_state: zeros}",
            OURO,
            ["model.initial_state is", "model.noise_seed is"],
        ),
        ("model: {path: m, noise_key: position}", None, []),
        ("", HUGINN, [NOTHING_CACHED]),
        ("model: {path: m, noise_seed: 7}", HUGINN, ["model.noise_seed is 7, which has no effect: ", NOTHING_CACHED]),
        ("model: {path: m, noise_key: position, noise_seed: 7}", HUGINN, []),
        ("model: {path: m, initial_state: zeros}\nrouting: {policy: prefix_aware}", HUGINN, []),
        ("kv: {prefix_cache: false}", HUGINN, []),
        (
            "kv: {prefix_cache: false}\nrouting: {policy: prefix_aware, prefix_source: fetch}",
            OURO,
            [
                f"routing.policy is prefix_aware and goes by work alone: {OFF}",
                "routing.prefix_source is fetch, and there is nothing",
            ],
        ),
        (
            "routing: {policy: prefix_aware, prefix_source: fetch}",
            HUGINN,
            [
                NOTHING_CACHED,
                f"routing.policy is prefix_aware and goes by work alone: {OF_EACH}",
                "routing.prefix_source is",
            ],
        ),
        ("routing: {policy: prefix_aware, prefix_source: fetch, load_weight: 2}", OURO, []),
        (
            "routing: {load_weight: 2}",
            OURO,
            ["routing.load_weight is 2, which has no effect: routing.policy is least_work"],
        ),
        ("routing: {local_prefill_below_tokens: 64}", OURO, []),
        (
            "routing: {local_prefill_below_tokens: 64, prefix_source: recompute}",
            OURO,
            ["routing.local_prefill_below_tokens is 64, which has no effect: routing.prefix_source is recompute"],
        ),
        (
            "unified: {replicas: 1}\nrouting: {local_prefill_below_tokens: 64, prefix_source: fetch}",
            OURO,
            [
                f"routing.prefix_source is fetch, which has no effect: {WHOLE}",
                f"routing.local_prefill_below_tokens is 64, which has no effect: {WHOLE}",
            ],
        ),
        ("unified: {replicas: 1}\nrouting: {prefix_source: local}", OURO, []),
        ("unified: {replicas: 1}\nprefill: {}\nrouting: {prefix_source: fetch}", OURO, []),
        ("decode: {max_time_per_token_s: 0.1}", OURO, []),
        (
            "decode: {max_time_per_token_s: 0.1, prefill_share_tokens: 8}",
            OURO,
            ["decode.max_time_per_token_s is 0.1, which makes no step's share of prompts smaller"],
        ),
        ("decode: {max_time_per_token_s: 0.1, prefill_share_tokens: 9}", OURO, []),
        (
            "decode: {max_time_per_token_s: 0.1, device: cuda}",
            OURO,
            ["decode.max_time_per_token_s is 0.1, which makes"],
        ),
        ("decode: {max_time_per_token_s: 0.1, device: cuda, cuda_graphs: false}", OURO, []),
        ("model: {path: m, prefill: per_row}\ndecode: {max_time_per_token_s: 0.1, device: cuda}", OURO, []),
        (
            "unified: {replicas: 1, max_time_per_token_s: 0.1, prefill_share_tokens: 4}",
            OURO,
            ["unified.max_time_per_token_s is 0.1, which makes no step's share of prompts smaller"],
        ),
        (
            "unified: {replicas: 1}\nprefill: {replicas: 0}\n"
            "decode: {replicas: 0, max_time_per_token_s: 1, prefill_share_tokens: 1}",
            OURO,
            [],
        ),
    ],
)
def test_what_has_no_effect_is_said(tmp_path: Path, text: str, spec: ModelSpec | None, words: list[str]) -> None:
    found = _notes(tmp_path, text, spec)
    assert len(found) == len(words), found
    for note, expected in zip(found, words, strict=True):
        assert note.startswith(expected)


def test_the_smallest_shares_are_the_schedulers() -> None:
    assert TILES.padded(1) == LEAST_SHARE_TOKENS
    assert GraphPacked.buckets_up_to(4096)[0] == LEAST_PACKED_SHARE_TOKENS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_ships_sets_nothing_without_effect(path: Path) -> None:
    """A public checkpoint is not shipped: the folder's name is the shape's. Huginn's noise may be by request."""
    config = load_config(path)
    folder = Path(config.model.path)
    spec = load_model_spec(folder) if folder.is_dir() else SHAPES[folder.name]
    found = notes(config, spec)
    assert all(note.startswith(NOTHING_CACHED) for note in found)
    assert not found or (spec.uses_initial_state and config.model.noise_key == "request")


def test_a_launch_logs_each_note_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "talk.yaml"
    file.write_text(f"model: {{path: {MODELS / 'tiny-huginn'}}}\nrouting: {{load_weight: 2}}\n", encoding="utf-8")
    Launcher(file, run_dir=tmp_path)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.startswith("talk: ") for line in said] == [True, True]
    assert said[0].startswith(f"talk: {NOTHING_CACHED}")


def test_a_checkpoint_that_is_not_there_is_not_the_notes_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "talk.yaml"
    file.write_text("model: {path: nowhere, noise_key: position}\n", encoding="utf-8")
    Launcher(file, run_dir=tmp_path)
    assert not caplog.records
