"""The report of `loopline.bench.engine` as one picture. Needs matplotlib, which the extra `bench` brings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopline.bench.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GROUP_WIDTH = 0.8


def plot_engine(report: dict[str, Any], path: Path) -> None:
    """Write the picture; the file's ending says which format. Raises OperatorError where matplotlib is missing."""
    figure = new_figure()
    parts = [("decode", "rows", "context"), ("prefill", "prompts", "tokens")]
    shown = [part for part in parts if any("arms" in one for one in report[part[0]])]
    for axes, (name, count, size) in zip(
        figure.subplots(len(shown), 1, squeeze=False).flat if shown else (), shown, strict=True
    ):
        _bars(axes, [one for one in report[name] if "arms" in one], count, size)
        axes.set_title(f"{name}: time over the floor of {count} x {size}", fontsize=10)
    machine, model = report["machine"], report["model"]
    title = f"{model['name']} ({model['dtype']}) on {machine['device']}, torch {machine['torch']}, {machine['date']}"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _bars(axes: "Axes", points: list[dict[str, Any]], count: str, size: str) -> None:
    """A group of bars for each point, a bar for each arm: its median over the floor, with its milliseconds above."""
    names = list(dict.fromkeys(name for point in points for name in point["arms"]))
    width = _GROUP_WIDTH / max(1, len(names))
    for index, name in enumerate(names):
        timed = [(at, point) for at, point in enumerate(points) if "median_ms" in point["arms"].get(name, {})]
        places = [at + (index - (len(names) - 1) / 2) * width for at, _ in timed]
        times = [point["arms"][name]["median_ms"] for _, point in timed]
        floors = [point["floor_ms"] for _, point in timed]
        bars = axes.bar(places, [time / floor for time, floor in zip(times, floors, strict=True)], width, label=name)
        axes.bar_label(bars, [f"{time:.3g} ms" for time in times], fontsize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("time / floor")
    axes.set_xticks(range(len(points)), [f"{one[count]}x{one[size]}" for one in points])
    axes.legend(fontsize=7)
