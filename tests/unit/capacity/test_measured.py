"""Predictions beside what one H200 was measured to do: within a quarter at every point, also of points that the fit has
not seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from loopline.bench.shapes import SHAPES
from loopline.capacity.fit import Point, fit_efficiencies, fit_engine, fit_link, report_points
from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.profiles import PROFILES
from loopline.capacity.reports import EngineReport, TransferReport
from loopline.capacity.times import decode_time, prefill_time
from loopline.errors import ConfigError

DATA = Path(__file__).parents[2] / "data/capacity"
H200 = PROFILES["h200"]
MODELS = ("ouro-1.4b", "huginn-0125")
WITHIN = 0.25


def _report(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"h200-{name}.json").read_text(encoding="utf-8"))
    return content


def _predicted(profile: Profile, model: str) -> dict[str, tuple[float, float, float]]:
    """(floor, expected, measured) seconds of every point of that model's report, by the planner's own functions."""
    report, geometry = _report(model), Geometry.of(SHAPES[model], SHAPES[model].default_loops, "bf16")
    found = {}
    for one in report["decode"]:
        time = decode_time(profile, geometry, one["rows"], one["context"])
        measured_s = one["arms"]["engine"]["median_ms"] / 1e3
        found[f"decode {one['rows']}x{one['context']}"] = (time.floor_s, time.expected_s, measured_s)
    for one in report["prefill"]:
        time = prefill_time(profile, geometry, one["prompts"], one["tokens"], one["tokens"])
        measured_s = one["arms"]["packed"]["median_ms"] / 1e3
        found[f"prefill {one['prompts']}x{one['tokens']}"] = (time.floor_s, time.expected_s, measured_s)
    return found


def _worst(profile: Profile, model: str) -> float:
    return max(abs(expected / measured - 1) for _, expected, measured in _predicted(profile, model).values())


@pytest.mark.parametrize("model", MODELS)
def test_the_profile_that_comes_along_is_near_every_measured_point(model: str) -> None:
    for name, (floor, expected, measured) in _predicted(H200, model).items():
        assert expected == pytest.approx(measured, rel=WITHIN), name
        assert floor < measured, name


@pytest.mark.parametrize("model", MODELS)
def test_work_is_counted_as_the_benchmark_counts_it(model: str) -> None:
    report, geometry = _report(model), Geometry.of(SHAPES[model], SHAPES[model].default_loops, "bf16")
    for one in report["decode"]:
        work = geometry.decode_work(one["rows"], one["context"])
        assert (work.weight_bytes, work.kv_bytes) == (one["weight_bytes"], one["kv_bytes"])
    for one in report["prefill"]:
        work = geometry.prefill_work(one["prompts"], one["tokens"])
        assert (work.flops, work.num_bytes) == (one["flops"], one["bytes"])


@pytest.mark.parametrize(
    ("model", "rows", "token_ms"),
    [("ouro-1.4b", 1, 4.62), ("ouro-1.4b", 8, 7.93), ("huginn-0125", 1, 29.2), ("huginn-0125", 8, 42.3)],
)
def test_a_token_of_a_whole_cluster_takes_what_is_planned(model: str, rows: int, token_ms: float) -> None:
    """A prefill and a decode worker with a GPU each, prompts of 2,048 and answers of 64 tokens: docs/performance.md."""
    geometry = Geometry.of(SHAPES[model], SHAPES[model].default_loops, "bf16")
    assert decode_time(H200, geometry, rows, 2048 + 32).expected_s == pytest.approx(token_ms / 1e3, rel=WITHIN)


@pytest.mark.parametrize(("model", "first_ms"), [("ouro-1.4b", 59.5), ("huginn-0125", 408.5)])
def test_a_first_token_of_an_engine_takes_what_is_planned(model: str, first_ms: float) -> None:
    """A prompt of 2,048 tokens in chunks of 512, in one process."""
    geometry = Geometry.of(SHAPES[model], SHAPES[model].default_loops, "bf16")
    assert prefill_time(H200, geometry, 1, 2048, 512).expected_s == pytest.approx(first_ms / 1e3, rel=WITHIN)


def test_three_points_of_one_model_predict_all_others_and_the_other_model() -> None:
    report = _report("ouro-1.4b")
    report["decode"] = [one for one in report["decode"] if (one["rows"], one["context"]) in ((1, 512), (32, 2048))]
    report["prefill"] = report["prefill"][:1]
    profile = fit_engine(EngineReport.model_validate(report), SHAPES["ouro-1.4b"], H200)
    assert len(report_points(EngineReport.model_validate(report), SHAPES["ouro-1.4b"], H200)) == 3
    assert len(_predicted(profile, "ouro-1.4b")) == 7 and len(_predicted(profile, "huginn-0125")) == 3
    assert max(_worst(profile, model) for model in MODELS) < WITHIN


def test_a_fit_starts_well_from_a_base_that_is_wrong() -> None:
    base = H200.model_copy(update={"flops_efficiency": 0.3, "kv_efficiency": 0.4, "layer_pass_s": 1e-3})
    assert (
        _worst(fit_engine(EngineReport.model_validate(_report("ouro-1.4b")), SHAPES["ouro-1.4b"], base), "ouro-1.4b")
        < WITHIN
    )


def test_a_fit_finds_what_made_the_points() -> None:
    made = {"weights_efficiency": 0.7, "flops_efficiency": 0.4, "kv_efficiency": 0.5, "layer_pass_s": 2e-5}
    points = []
    for number, (weights_s, kv_s, flops_s, layers) in enumerate(
        [
            (2e-3, 1e-4, 1e-5, 96),
            (2e-3, 2e-3, 1e-5, 96),
            (2e-2, 3e-4, 1e-4, 132),
            (2e-3, 1e-4, 3e-2, 96),
            (1e-3, 0, 1e-5, 200),
        ]
    ):
        best = max(weights_s / made["weights_efficiency"], flops_s / made["flops_efficiency"])
        time = best + kv_s / made["kv_efficiency"] + layers * made["layer_pass_s"]
        points.append(
            Point(
                name=str(number), weights_s=weights_s, kv_s=kv_s, flops_s=flops_s, layer_passes=layers, measured_s=time
            )
        )
    assert fit_efficiencies(points, H200) == pytest.approx(made, rel=0.1)
    with pytest.raises(ConfigError, match="says nothing"):
        fit_efficiencies([], H200)


def test_a_point_that_failed_is_left_out() -> None:
    report = _report("huginn-0125")
    report["decode"][0] = {"rows": 1, "context": 512, "error": "OutOfMemoryError"}
    report["prefill"][0]["arms"]["packed"] = {"rounds": 0, "error": "no figures"}
    points = report_points(EngineReport.model_validate(report), SHAPES["huginn-0125"], H200)
    assert [one.name for one in points] == ["decode 32x512"]


@pytest.mark.parametrize("name", ["same-gpu", "nvlink"])
def test_a_link_fitted_to_two_transfers_predicts_the_others(name: str) -> None:
    """Fitted: one flat range and one chunk alone. Not seen: a fresh and a fragmented pool, and what is left to
    wait for where chunks were pushed while the next one was computed."""
    report = _report(name)
    arms, overlap = report["arms"], report["overlap"]
    for link in (fit_link(TransferReport.model_validate(report)), H200.links[name]):
        for arm in ("fresh", "fragmented"):
            assert link.expected_s(arms[arm]["bytes"], 1) == pytest.approx(arms[arm]["total_ms"] / 1e3, rel=WITHIN)
        last_s = overlap["pushed_while_computing"]["ms"] / 1e3
        assert link.expected_s(overlap["chunk_bytes"], 1) == pytest.approx(last_s, rel=WITHIN)
        assert link.floor_s(arms["flat"]["bytes"]) <= arms["flat"]["total_ms"] / 1e3


def test_a_transfer_without_overlap_is_all_rate() -> None:
    report = _report("nvlink") | {"overlap": None}
    link = fit_link(TransferReport.model_validate(report))
    assert link.push_s == 0 and link.bytes_per_s == pytest.approx(360e9, rel=0.01)
    with pytest.raises(ConfigError, match="arm flat"):
        fit_link(TransferReport.model_validate({"link": {}, "arms": {}}))
