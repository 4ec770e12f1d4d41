"""What an engine says of its KV: a setting that changes KV changes the field that names it, and no other setting
changes any."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopline.engine.engine import Engine
from loopline.identity import Fingerprint
from loopline.settings import EngineSettings, SchedulerSettings
from prefill_worker.policy import PrefillPolicy
from tests.support.checkpoints import with_other_weights
from tests.support.golden import GOLDEN

SETTINGS = EngineSettings(model_path=str(GOLDEN / "ouro_fp32"), block_size=4, num_blocks=8)
BY_POSITION = replace(SETTINGS, model_path=str(GOLDEN / "huginn_fp32"), noise_key="position", noise_seed=7)


@pytest.fixture(scope="module")
def plain() -> Fingerprint:
    return fingerprint(SETTINGS)


def fingerprint(settings: EngineSettings) -> Fingerprint:
    return Engine(settings, PrefillPolicy()).fingerprint()


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    mine, theirs = dict(one.fields), dict(other.fields)
    assert mine.keys() == theirs.keys()
    return {name for name in mine if mine[name] != theirs[name]}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"block_size": 8}, {"block_size"}),
        ({"dtype": "bf16"}, {"compute_dtype", "kv_dtype"}),
        ({"max_loops": 2}, {"max_loops", "planes"}),
        ({"deterministic": False}, {"deterministic"}),
        ({"load_format": "dummy"}, {"weights"}),
        ({"model_path": str(GOLDEN / "ouro_gqa_fp32")}, {"weights", "kv_heads"}),
    ],
    ids=lambda value: "-".join(sorted(value)),
)
def test_what_changes_kv_changes_its_field(plain: Fingerprint, change: dict[str, Any], fields: set[str]) -> None:
    assert differing(plain, fingerprint(replace(SETTINGS, **change))) == fields


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"noise_seed": 8}, {"noise_seed"}),
        ({"noise_key": "request"}, {"noise_key", "noise_seed"}),
        ({"noise_key": "request", "noise_seed": 8}, {"noise_key", "noise_seed"}),
    ],
    ids=lambda value: "-".join(sorted(value)),
)
def test_how_noise_is_keyed_is_said(change: dict[str, Any], fields: set[str]) -> None:
    assert differing(fingerprint(BY_POSITION), fingerprint(replace(BY_POSITION, **change))) == fields


def test_workers_with_other_seeds_are_told_so() -> None:
    other = fingerprint(replace(BY_POSITION, noise_seed=8))
    assert fingerprint(BY_POSITION).first_difference(other) == "noise_seed: 7 here, 8 there"


def test_a_seed_that_no_noise_depends_on_keeps_nobody_apart(plain: Fingerprint) -> None:
    assert fingerprint(replace(SETTINGS, noise_key="position", noise_seed=7)) == plain
    by_request = replace(BY_POSITION, noise_key="request")
    assert fingerprint(by_request) == fingerprint(replace(by_request, noise_seed=8))


def test_one_number_of_the_weights_is_another_fingerprint(plain: Fingerprint, tmp_path: Path) -> None:
    folder = with_other_weights(GOLDEN / "ouro_fp32", tmp_path / "other")
    assert differing(plain, fingerprint(replace(SETTINGS, model_path=str(folder)))) == {"weights"}


def test_what_leaves_kv_alone_changes_nothing(plain: Fingerprint) -> None:
    """Workers of one cluster may differ in size, steps and caching, and in where their copy of the checkpoint lies."""
    scheduler = SchedulerSettings(max_running=3, chunk_tokens=4, steps_ahead=1)
    path = str(GOLDEN.parent / "golden" / "ouro_fp32")
    other = replace(
        SETTINGS, num_blocks=16, prefix_cache="off", prefill="per_row", scheduler=scheduler, model_path=path
    )
    assert fingerprint(other) == plain
