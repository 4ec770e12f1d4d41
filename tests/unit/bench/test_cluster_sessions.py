"""Clusters as arms, without one: which arms share a cluster, and what becomes of one that nobody can reach."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loopline.bench.cluster_sessions import ClusterArm, ClusterLoad, measure, shared_clusters
from loopline.bench.load_report import Watcher
from loopline.bench.sessions import draw_burst
from loopline.bench.turn_figures import Limits
from loopline.cli.main import app, main
from loopline.errors import OperatorError

SMALL = ["--sessions", "1", "--turns", "1", "--first", "4", "--answer", "2"]


def test_arms_with_a_worker_in_common_have_one_cluster() -> None:
    a, b = frozenset({"p", "d"}), frozenset({"q", "e"})
    assert shared_clusters({}) == {}
    assert shared_clusters({"one": a, "two": b}) == {}
    assert shared_clusters({"one": a, "two": a | {"late"}, "three": frozenset({"late", "d"})}) == {
        "two": "one",
        "three": "one",
    }
    assert shared_clusters({"other": b, "one": a, "two": a, "again": b}) == {"two": "one", "again": "other"}
    assert shared_clusters({"empty": frozenset(), "void": frozenset()}) == {}


def test_an_arm_that_cannot_be_reached_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopline.bench.cluster_sessions._ANSWER_S", 0.2)
    seen: list[str] = []
    load = ClusterLoad(arms=(ClusterArm("gone", address="127.0.0.1:1"),), rounds=50)
    report = asyncio.run(measure(load, draw_burst(1, 4, 2), Limits(), "a test", Watcher(say=seen.append)))
    assert not [part for part in seen if part.startswith("round")]
    (arm,) = report["arms"]
    assert arm["runs"] == [] and arm["error"].startswith("CoordinatorUnreachable: ")


def test_arms_that_cannot_be_reached_are_a_failure_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopline.bench.cluster_sessions._ANSWER_S", 0.2)
    arms = ["--arm", "a=127.0.0.1:1", "--arm", "b=127.0.0.1:2"]
    files = ["--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "picture.png")]
    result = CliRunner().invoke(app, ["bench", "session", *arms, *SMALL, "--rounds", "50", *files])
    assert isinstance(result.exception, OperatorError)  # which is exit status 1 of the program
    assert "arm a: no turn was answered: CoordinatorUnreachable: " in str(result.exception)
    assert "arm b: no turn was answered: " in str(result.exception) and "\n" not in str(result.exception)
    assert "prompt" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(one["runs"], one["error"].split(":")[0]) for one in report["arms"]] == [([], "CoordinatorUnreachable")] * 2
    assert not (tmp_path / "picture.png").exists()


def test_the_program_says_so_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopline.bench.cluster_sessions._ANSWER_S", 0.2)
    monkeypatch.setattr("sys.argv", ["loopline", "bench", "burst", "--address", "127.0.0.1:1", "--requests", "1"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("error: arm 127.0.0.1:1: no turn was answered: ")


def test_no_name_and_no_figure_of_the_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopline.bench.cluster_sessions._ANSWER_S", 0.2)
    monkeypatch.setenv("COLUMNS", "60")
    names = ["a-cluster-with-a-name-that-is-longer-than-all-others", "short"]
    arms = [part for name in names for part in ("--arm", f"{name}=127.0.0.1:1")]
    result = CliRunner().invoke(app, ["bench", "burst", *arms, "--requests", "1"])
    assert all(name in result.stdout for name in names) and "…" not in result.stdout
