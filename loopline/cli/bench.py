"""`loopline bench`: what Loopline itself costs on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loopline.bench.host import QUICK, Sizes, measure
from loopline.bench.plot import plot
from loopline.cli.bench_engine import engine
from loopline.cli.bench_load import burst, session
from loopline.cli.bench_overload import overload
from loopline.cli.bench_report import check_targets, hand_over, say
from loopline.cli.bench_router import router
from loopline.cli.bench_share import share
from loopline.cli.bench_transfer import transfer

app = typer.Typer(help="Measure what Loopline itself costs on this machine.", no_args_is_help=True)
app.command("engine")(engine)
app.command("share")(share)
app.command("router")(router)
app.command("transfer")(transfer)
app.command("overload")(overload)
app.command("burst")(burst)
app.command("session")(session)


@app.command("host")
def host(
    *,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps behind each median; 1000 if not given.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few steps and small sizes: does it run at all?")] = False,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH.png", help="Draw it (needs the extra bench).")
    ] = None,
) -> None:
    """Time planning and committing on the CPU, without a model, against plainer ways to do the same."""
    check_targets(json_path, plot_path)
    sizes = QUICK if quick else Sizes()
    report = measure(sizes if steps is None else replace(sizes, steps=steps), say)
    hand_over(report, json_path, _show, plot_path, plot)


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    machine = report["machine"]
    load = ", ".join(f"{one:.1f}" for one in machine["load"] or ()) or "unknown"
    console.print(f"{machine['cpu']} ({machine['num_cpus']} CPUs, load {load}), Python {machine['python']}")
    console.print(f"{machine['date']}; times are medians")
    steps = Table("plan + commit over", "", "µs a step", "Python calls", "built-in calls")
    for key, name, title in (
        ("steps", "rows", "decode rows"),
        ("pools", "blocks", "blocks in the arena"),
        ("queues", "waiting", "waiting requests"),
    ):
        for one in report[key]:
            steps.add_row(title, f"{one[name]:,}", *_step_cells(one))
        steps.add_section()
    chunk = report["chunk"]
    steps.add_row("tokens of a chunk", f"{chunk['tokens']:,}", *_step_cells(chunk))
    console.print(steps)
    calls = chunk["ledger_calls"]
    console.print(f"ledger calls for {chunk['tokens']:,} tokens: {calls['begin']} to begin, {calls['mark']} to mark")
    arms = Table("naive / ours", "size", "pairs", "naive µs", "ours µs", "ratio")
    shown = ""
    for one in report["arms"]:
        figures = [f"{one['naive_us']:,.2f}", f"{one['ours_us']:,.2f}", f"{one['ratio']:,.1f}"]
        if one["arm"] != shown:
            arms.add_section()
        arms.add_row("" if one["arm"] == shown else one["arm"], one["size"], str(one["pairs"]), *figures)
        shown = one["arm"]
    console.print(arms)


def _step_cells(figures: dict[str, Any]) -> list[str]:
    return [f"{figures['step_us']:,.1f}", f"{figures['python_calls']:,.1f}", f"{figures['built_in_calls']:,.1f}"]


if __name__ == "__main__":  # without the other commands, and so without what only they need
    app()
