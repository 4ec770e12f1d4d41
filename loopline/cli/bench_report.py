"""What every command of `loopline bench` does around its measuring: say how far it is, and hand the report over."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from loopline.bench.plot import picture_endings
from loopline.errors import ConfigError


def say(part: str) -> None:
    """One line of progress, on standard error."""
    sys.stderr.write(f"{part}\n")
    sys.stderr.flush()


def command_line() -> str:
    """The command as it was given, for the report."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def check_targets(json_path: str | None, plot_path: Path | None = None) -> None:
    """To be asked before anything is measured. Raises BadParameter for a file that cannot be written and for a picture
    of a kind that cannot be drawn, OperatorError where nothing can be drawn."""
    if json_path not in (None, "-"):
        check_target("--json", Path(str(json_path)))
    if plot_path is None:
        return
    check_target("--plot", plot_path)
    endings = picture_endings()
    if plot_path.suffix[1:].lower() not in endings:
        allowed = ", ".join(f".{ending}" for ending in endings)
        raise typer.BadParameter(f"--plot is {str(plot_path)!r}; allowed: a name that ends in one of {allowed}")


def check_target(option: str, path: Path) -> None:
    """Raises BadParameter that names `option` where no file can be written at `path`."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{option} is {str(path)!r}; its folder does not exist")
    if path.is_dir():
        raise typer.BadParameter(f"{option} is {str(path)!r}; that is a folder, not a file")


def check_device(device: str) -> None:
    """Raises BadParameter where `--device` cannot be computed on here. It loads torch."""
    from loopline.engine.engine import require_device

    try:
        require_device(device)
    except ConfigError as error:
        raise typer.BadParameter(f"--{error}") from None


def hand_over(
    report: dict[str, Any],
    json_path: str | None,
    show: Callable[[dict[str, Any]], None],
    plot_path: Path | None = None,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Write it to `json_path` and `show` it to people; "-": print it alone, as JSON. The picture comes last: whatever
    becomes of it, the figures are kept."""
    if json_path == "-":
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    else:
        if json_path is not None:
            Path(json_path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        show(report)
    if draw is not None and plot_path is not None:
        draw(report, plot_path)
