"""The report of sessions or a burst as one picture. Needs matplotlib, which the extra `bench` brings."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopline.bench.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOWS = 40  # points of a curve over time
_PALE = 0.35
_Turns = Sequence[dict[str, Any]]


def plot_load(report: dict[str, Any], path: Path) -> None:
    """Write the picture: distributions over all runs of an arm, and curves over the time of its first run that has an
    answer. An arm has one color everywhere. The file's ending says which format. Raises OperatorError where matplotlib
    is missing."""
    figure = new_figure()
    axes = figure.subplot_mosaic([["ttft", "tpot"], ["rate", "hits"], ["good", "turns"]])
    for number, arm in enumerate(report["arms"]):
        runs = [[one for one in turns if not one["error"]] for turns in arm["turns"]]
        if not any(runs):
            continue
        first = next(index for index, one in enumerate(runs) if one)
        color, label = f"C{number % 10}", arm["name"]
        everything = [one for turns in runs for one in turns]
        _shares(axes["ttft"], [1e3 * (one["first_s"] - one["due_s"]) for one in everything], color, label)
        _shares(
            axes["tpot"], [1e3 * each for one in everything if (each := _per_token_s(one)) is not None], color, label
        )
        _over_time(axes["rate"], runs[first], _tokens_per_s, color, label)
        _over_time(axes["hits"], runs[first], _cached_percent, color, label)
        by_turn = arm["runs"][first]["by_turn"]
        line = {"color": color, "marker": "o", "label": label}
        axes["turns"].plot([one["turn"] for one in by_turn], [one["ttft_p50_ms"] for one in by_turn], **line)
    _bars(axes["good"], report["arms"])
    for name, x, y in (
        ("ttft", "time to first token, ms", "share of turns"),
        ("tpot", "time per token, ms", "share of turns"),
        ("rate", "seconds", "answer tokens/s"),
        ("hits", "seconds", "prompt tokens found cached, %"),
        ("turns", "turn of the session", "median time to first token, ms"),
    ):
        axes[name].set_xlabel(x)
        axes[name].set_ylabel(y)
    axes["turns"].locator_params(axis="x", integer=True)
    axes["ttft"].set_xscale("log")
    axes["ttft"].legend(fontsize=7)
    axes["rate"].set_ylim(bottom=0)
    axes["hits"].set_ylim(0, 100)
    where = report["machine"]
    model = report.get("model", {}).get("name", "clusters")
    figure.suptitle(f"{model} on {where.get('device') or where['cpu']}, {where['date']}", fontsize=10)
    figure.savefig(path, dpi=150)


def _shares(axes: "Axes", values: Sequence[float], color: str, label: str) -> None:
    ordered = sorted(values)
    axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], color=color, label=label)


def _over_time(
    axes: "Axes", turns: _Turns, of: Callable[[_Turns, float, float], float | None], color: str, label: str
) -> None:
    """What `of` gives for windows of the run's time; where it gives None there is no point."""
    end_s = max(one["end_s"] for one in turns)
    edges = [end_s * index / _WINDOWS for index in range(_WINDOWS + 1)]
    points = [((a + b) / 2, of(turns, a, b)) for a, b in pairwise(edges)]
    known = [(at, value) for at, value in points if value is not None]
    axes.plot([at for at, _ in known], [value for _, value in known], color=color, label=label)


def _tokens_per_s(turns: _Turns, start_s: float, end_s: float) -> float:
    """Answer tokens of a window; a turn's are spread evenly from its first to its last."""
    tokens = 0.0
    for one in turns:
        took_s = one["end_s"] - one["first_s"]
        inside_s = min(end_s, one["end_s"]) - max(start_s, one["first_s"])
        if took_s > 0 and inside_s > 0:
            tokens += one["answer_tokens"] * inside_s / took_s
        elif not took_s and start_s < one["end_s"] <= end_s:
            tokens += one["answer_tokens"]
    return tokens / (end_s - start_s)


def _cached_percent(turns: _Turns, start_s: float, end_s: float) -> float | None:
    """Of the prompts whose first token came in a window."""
    some = [one for one in turns if start_s < one["first_s"] <= end_s]
    prompt = sum(one["prompt_tokens"] for one in some)
    return 100 * sum(one["cached_tokens"] for one in some) / prompt if prompt else None


def _per_token_s(one: dict[str, Any]) -> float | None:
    count = one["answer_tokens"] - 1
    return (one["end_s"] - one["first_s"]) / count if count > 0 else None


def _bars(axes: "Axes", arms: Sequence[dict[str, Any]]) -> None:
    """Turns a second within the limits, full, beside all turns a second, pale; in the arms' colors."""
    shown = [(f"C{number % 10}", arm) for number, arm in enumerate(arms) if "goodput_per_s" in arm["median"]]
    places, colors = range(len(shown)), [color for color, _ in shown]
    for shift, name, alpha in ((-0.2, "turns_per_s", _PALE), (0.2, "goodput_per_s", 1.0)):
        rates = [arm["median"][name] for _, arm in shown]
        axes.bar([at + shift for at in places], rates, 0.4, color=colors, alpha=alpha)
    axes.set_xticks(list(places), [arm["name"].replace(", ", "\n") for _, arm in shown], fontsize=7)
    axes.set_ylabel("turns/s")
    axes.set_title("pale: all turns, full: those within the limits", fontsize=8)
