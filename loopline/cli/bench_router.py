"""`loopline bench router`: what a routing decision costs, and what a policy is worth."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loopline.bench import router_prefixes
from loopline.bench.router import QUICK, Sizes, measure
from loopline.cli.bench_report import check_targets, hand_over, say


def router(
    *,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="Policies on requests with shared prefixes, in virtual time.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds behind each median.", show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds and small sizes: does it run at all?")] = False,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
    ] = None,
) -> None:
    """Time decisions at up to 1,000 scripted workers and 10,000 queued requests; or compare policies on a trace."""
    check_targets(json_path)
    if prefixes:
        scenario = router_prefixes.QUICK if quick else router_prefixes.Scenario()
        report, show = router_prefixes.compare(scenario, say=say), _show_prefixes
    else:
        sizes = QUICK if quick else Sizes()
        sizes = sizes if rounds is None else Sizes(**{**vars(sizes), "rounds": rounds})
        report, show = measure(sizes, say), _show
    hand_over(report, json_path, show)


def _show(report: dict[str, Any]) -> None:
    table = Table("workers", "queued", "policy", "first decision, ms", "a further one, µs", "decisions/s")
    last = None
    for one in report["points"]:
        if last not in (None, (one["workers"], one["queued"])):
            table.add_section()
        last = (one["workers"], one["queued"])
        figures = [f"{one['wake_us'] / 1e3:,.2f}", f"{one['decision_us']:,.1f}", f"{one['decisions_per_s']:,.0f}"]
        table.add_row(f"{one['workers']:,}", f"{one['queued']:,}", one["arm"], *figures)
    _print(report, table)


def _show_prefixes(report: dict[str, Any]) -> None:
    table = Table("policy", "of all tokens cached", "of shared tokens", "first token: mean", "p50", "p99, ms")
    for one in report["arms"]:
        times = [f"{one[key] * 1e3:,.0f}" for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")]
        table.add_row(one["policy"], f"{one['hit_rate']:.1%}", f"{one['shared_hit_rate']:.1%}", *times)
    _print(report, table)


def _print(report: dict[str, Any], table: Table) -> None:
    console = Console(highlight=False)
    machine = report["machine"]
    load = ", ".join(f"{one:.1f}" for one in machine["load"] or ()) or "unknown"
    console.print(f"{machine['cpu']} ({machine['num_cpus']} CPUs, load {load}), Python {machine['python']}")
    console.print(f"{machine['date']}")
    console.print(table)
