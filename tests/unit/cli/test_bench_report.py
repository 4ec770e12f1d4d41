"""Where the figures of `loopline bench` go: files that cannot be written are found first, and a picture comes last."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loopline.cli.bench_report import check_targets, hand_over
from loopline.cli.main import app

PICTURES = ("host", "engine", "transfer", "burst", "session")


@pytest.mark.parametrize(
    ("json_name", "plot_name", "named"),
    [
        ("none/report.json", None, "--json is .*its folder does not exist"),
        (".", None, "--json is .*that is a folder"),
        (None, "none/picture.png", "--plot is .*its folder does not exist"),
        (None, "picture.txt", r"--plot is .*picture\.txt'; allowed: .*\.png"),
        (None, "picture", r"--plot is .*allowed: .*\.pdf"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, json_name: str | None, plot_name: str | None, named: str
) -> None:
    json_path = None if json_name is None else str(tmp_path / json_name)
    with pytest.raises(typer.BadParameter, match=named):
        check_targets(json_path, None if plot_name is None else tmp_path / plot_name)


@pytest.mark.parametrize("name", ["picture.png", "picture.PDF", "a.b.svg"])
def test_pictures_of_several_kinds_are_allowed(tmp_path: Path, name: str) -> None:
    check_targets("-", tmp_path / name)
    check_targets(str(tmp_path / "report.json"), None)


@pytest.mark.parametrize("command", PICTURES)
def test_every_command_refuses_a_kind_of_picture_before_it_measures(tmp_path: Path, command: str) -> None:
    model = ["--engine", "tiny"] if command in ("burst", "session") else ["tiny"] if command != "host" else []
    result = CliRunner().invoke(app, ["bench", command, *model, "--plot", str(tmp_path / "picture.txt")])
    assert result.exit_code == 2 and "--plot" in result.output, result.output


@pytest.mark.parametrize("json_name", ["report.json", "-"])
def test_figures_are_kept_where_drawing_fails(
    tmp_path: Path, json_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(report: dict[str, Any], path: Path) -> None:
        raise OSError("no room")

    shown: list[dict[str, Any]] = []
    path = json_name if json_name == "-" else str(tmp_path / json_name)
    with pytest.raises(OSError, match="no room"):
        hand_over({"figure": 1}, path, shown.append, tmp_path / "picture.png", draw)
    kept = capsys.readouterr().out if path == "-" else Path(path).read_text(encoding="utf-8")
    assert json.loads(kept) == {"figure": 1} and len(shown) == (path != "-")
