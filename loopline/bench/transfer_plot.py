"""The report of `loopline.bench.transfer` as one picture. Needs matplotlib, which the extra `bench` brings."""

from pathlib import Path
from typing import Any

from loopline.bench.plot import new_figure


def plot_transfer(report: dict[str, Any], path: Path) -> None:
    """Write the picture: each arm's rate as a bar, its time and descriptors above; the overlap's times beside. The
    file's ending says which format. Raises OperatorError where matplotlib is missing."""
    figure, overlap = new_figure(), report["overlap"]
    parts = [("arms", "GB/s"), ("overlap", "ms after the last chunk was computed")]
    shown = parts if overlap is not None and "error" not in overlap else parts[:1]
    rates, *rest = figure.subplots(1, len(shown), squeeze=False)[0]
    timed = {name: one for name, one in report["arms"].items() if "gb_per_s" in one}
    bars = rates.bar(list(timed), [one["gb_per_s"] for one in timed.values()])
    rates.bar_label(bars, [f"{one['total_ms']:.3g} ms\n{one['descriptors']:,} desc." for one in timed.values()])
    rates.margins(y=0.1)
    rates.set_ylabel(shown[0][1])
    for axes in rest:
        names = [name for name, one in overlap.items() if isinstance(one, dict)]
        axes.bar_label(axes.bar([name.replace("_", "\n") for name in names], [overlap[name]["ms"] for name in names]))
        axes.set_ylabel(shown[1][1])
    model, link, machine = report["model"], report["link"], report["machine"]
    title = f"{model['tokens']} tokens' KV of {model['name']}, {model['planes']} of {model['model_planes']} planes"
    figure.suptitle(f"{title}, {link['transport']}, {machine['source']} to {machine['target']}, {machine['date']}")
    figure.savefig(path, dpi=150)
