"""What every command of `loopline bench` does around its measuring: say how far it is, and hand the report over."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from loopline.bench.plot import check_can_plot


def say(part: str) -> None:
    """One line of progress, on standard error."""
    sys.stderr.write(f"{part}\n")
    sys.stderr.flush()


def command_line() -> str:
    """The command as it was given, for the report."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def check_targets(json_path: str | None, plot_path: Path | None = None) -> None:
    """To be asked before anything is measured. Raises BadParameter where a folder is missing, OperatorError where
    nothing can be drawn."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path not in (None, "-") and not Path(str(path)).parent.is_dir():
            raise typer.BadParameter(f"{option} is {str(path)!r}; its folder does not exist")
    if plot_path is not None:
        check_can_plot()


def hand_over(report: dict[str, Any], json_path: str | None, show: Callable[[dict[str, Any]], None]) -> None:
    """`show` it to people and write it to `json_path`; "-": print it alone, as JSON."""
    if json_path == "-":
        sys.stdout.write(json.dumps(report) + "\n")
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    show(report)
