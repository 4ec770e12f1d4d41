"""The share benchmark: every arm computes the same requests in its own shares, and the report says so. No times."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loopline.bench.share import ARMS, ShareBench, measure
from loopline.cli.main import app
from loopline.errors import ConfigError

TINY = ShareBench(
    model="tiny", device="cpu", dtype="fp32", rows=3, context=20, prompt=90, most_share=32, before=4, rounds=2
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return measure(replace(TINY, bound_s=60.0), "a test")


def test_every_arm_has_its_share(report: dict[str, Any]) -> None:
    assert tuple(report["arms"]) == ARMS
    shares = {name: one["share_tokens"] for name, one in report["arms"].items()}
    assert shares["whole"] == {"least": 90, "median": 90, "most": 90}
    assert shares["fixed"] == {"least": 26, "median": 32, "most": 32}
    assert shares["bound"]["most"] == 32, "a bound that is far away leaves the fixed share"
    assert [report["arms"][name]["steps_a_prompt"] for name in ("fixed", "whole")] == [3, 1]


def test_every_token_is_timed(report: dict[str, Any]) -> None:
    for one in report["arms"].values():
        assert one["before"]["tokens"] == 2 * 3 * TINY.before
        assert one["during"]["tokens"] == 2 * 3 * one["steps_a_prompt"]
        assert 0 < one["during"]["p50_ms"] <= one["during"]["p99_ms"] <= one["during"]["max_ms"]
        assert one["within_bound"] == 1.0 and one["p99_within_bound"] and one["least_shares"] == 0
    assert report["clock"] == "wall" and report["bound_ms"] == 60_000
    assert json.loads(json.dumps(report)) == report


def test_a_bound_that_nothing_fits_into_leaves_the_least_share() -> None:
    figures = measure(replace(TINY, bound_s=1e-9, rounds=1, cpu_time=True, steps_ahead=1), "a test")["arms"]["bound"]
    assert figures["share_tokens"]["most"] == 8 and figures["within_bound"] == 0.0
    assert figures["least_shares"] > 0 and not figures["p99_within_bound"]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompt is 1024; with one new token allowed: at most 1024"):
        measure(replace(TINY, prompt=1024), "a test")
    with pytest.raises(ConfigError, match="context is 900, so requests may grow to 1059 tokens"):
        measure(replace(TINY, context=900), "a test")


def test_the_command_prints_its_report_alone() -> None:
    arguments = "bench share tiny --device cpu --dtype fp32 --rows 2 --context 9 --prompt 40 --before 2 --rounds 1"
    result = CliRunner().invoke(app, [*arguments.split(), "--json", "-"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["arms"].keys() == set(ARMS)


def test_it_needs_none_of_the_clusters_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'grpc', 'tokenizers', 'jinja2', 'nixl'): sys.modules[name] = None\n"
        "import loopline.cli.bench, loopline.bench.share"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, timeout=110)
