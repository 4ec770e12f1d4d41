"""The planner beside this machine's own CPU, measured in the same run by `loopline bench engine`: fitted to some
points, right within a quarter at others.

Figures are processor time, and of each point the least of several turns that are spread over the run: other work on the
machine empties caches and takes half of a core, and so adds to single turns and never takes away."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loopline.capacity.geometry import Geometry
from loopline.capacity.profiles import PROFILES, read_profile
from loopline.capacity.times import decode_time, prefill_time
from loopline.cli.main import app
from loopline.model_spec import load_model_spec

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
MODELS = Path(__file__).parents[3] / "configs/models"
FITTED = ("1x64,8x64,8x512,16x256", "1x64,1x256")
OTHERS = ("4x256,12x128", "2x192")
WITHIN = 0.25
PASSES = 5


def _bench(model: Path, decode: str, prefill: str, path: Path) -> dict[str, Any]:
    arguments = ["bench", "engine", str(model), "--device", "cpu", "--dtype", "fp32", "--arms", "engine"]
    arguments += ["--decode", decode, "--prefill", prefill, "--rounds", "2", "--steps", "2", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _least(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report with the best rate and the least time of all."""
    least = copy.deepcopy(reports[0])
    least["rates"] = {key: max(one["rates"][key] for one in reports) for key in least["rates"]}
    for part, arm in (("decode", "engine"), ("prefill", "packed")):
        for number, point in enumerate(least[part]):
            times = [one[part][number]["arms"][arm]["min_ms"] for one in reports]
            point["arms"] = {arm: {"median_ms": min(times), "of": times}}
    return least


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn"])
def test_points_that_the_fit_has_not_seen_are_predicted(name: str, tmp_path: Path) -> None:
    decode, prefill = ",".join((FITTED[0], OTHERS[0])), ",".join((FITTED[1], OTHERS[1]))
    passes = [_bench(MODELS / name, decode, prefill, tmp_path / f"{number}.json") for number in range(PASSES)]
    everything = _least(passes)
    seen = {**everything, "decode": everything["decode"][:4], "prefill": everything["prefill"][:2]}
    (tmp_path / "seen.json").write_text(json.dumps(seen), encoding="utf-8")
    profile = read_profile(str(tmp_path / "seen.json"), PROFILES["cpu"], load_model_spec)
    spec = load_model_spec(MODELS / name)
    geometry = Geometry.of(spec, spec.default_loops, "fp32")
    found = []
    for one in everything["decode"]:
        expected_s = decode_time(profile, geometry, one["rows"], one["context"]).expected_s
        found.append((f"decode {one['rows']}x{one['context']}", expected_s, one["arms"]["engine"]["median_ms"] / 1e3))
    for one in everything["prefill"]:
        expected_s = prefill_time(profile, geometry, one["prompts"], one["tokens"], one["tokens"]).expected_s
        found.append(
            (f"prefill {one['prompts']}x{one['tokens']}", expected_s, one["arms"]["packed"]["median_ms"] / 1e3)
        )
    for point, expected_s, measured_s in found:
        logger.info("%s %s: expected %.0f ms, measured %.0f", name, point, expected_s * 1e3, measured_s * 1e3)
    unseen = [one for one in found if one[0].split()[1] in (*OTHERS[0].split(","), OTHERS[1])]
    assert len(unseen) == 3
    for point, expected_s, measured_s in unseen:
        assert expected_s == pytest.approx(measured_s, rel=WITHIN), point
