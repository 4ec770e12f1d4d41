"""The report of `loopline.bench.host` as one picture. Needs matplotlib, which the extra `bench` brings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopline.errors import OperatorError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def picture_endings() -> tuple[str, ...]:
    """How a picture's name may end, such as "png". Raises OperatorError that names the extra where matplotlib is
    missing."""
    return tuple(sorted(new_figure().canvas.get_supported_filetypes()))


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the picture; the file's ending says which format. Raises OperatorError as `picture_endings` does."""
    figure = new_figure()
    axes: dict[str, Axes] = figure.subplot_mosaic([["rows", "arms"], ["pools", "arms"], ["queues", "arms"]])
    _curve(axes["rows"], report["steps"], "rows", "decode rows")
    _curve(axes["pools"], report["pools"], "blocks", "blocks in the arena")
    _curve(axes["queues"], report["queues"], "waiting", "waiting requests")
    _ratios(axes["arms"], report["arms"])
    machine = report["machine"]
    figure.suptitle(f"plan + commit on {machine['cpu']}, Python {machine['python']}, {machine['date']}", fontsize=10)
    figure.savefig(path, dpi=150)


def new_figure() -> "Figure":
    """An empty figure. Raises OperatorError as `picture_endings` does."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OperatorError("--plot needs matplotlib: pip install 'loopline[bench]'") from error
    return Figure(figsize=(13, 9), layout="constrained")


def _curve(axes: "Axes", figures: list[dict[str, Any]], key: str, label: str) -> None:
    """Time and calls of a step over one size; both from 0, so that flat looks flat."""
    sizes = [one[key] for one in figures]
    times, calls = [one["step_us"] for one in figures], [one["python_calls"] for one in figures]
    axes.plot(sizes, times, marker="o", color="tab:blue")
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("µs per step (median)", color="tab:blue")
    axes.set_ylim(0, 1.15 * max(times))
    other = axes.twinx()
    other.plot(sizes, calls, marker="s", linestyle="--", color="tab:orange")
    other.set_ylabel("Python calls per step", color="tab:orange")
    other.set_ylim(0, 1.3 * max(calls))


def _ratios(axes: "Axes", arms: list[dict[str, Any]]) -> None:
    """Each comparison's ratio as a bar from 1; to the right ours is faster, to the left slower."""
    arms = arms[::-1]
    names = [f"{one['arm']}: {one['size']}" for one in arms]
    ratios = [one["ratio"] for one in arms]
    colors = ["tab:green" if ratio >= 1 else "tab:red" for ratio in ratios]
    axes.barh(names, [ratio - 1 for ratio in ratios], left=1, color=colors)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(min(1, *ratios) / 1.5, max(1, *ratios) * 1.5)
    axes.set_xlabel("naive time / ours")
    axes.tick_params(axis="y", labelsize=7)
