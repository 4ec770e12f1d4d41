"""`loopline bench overload`: what a cluster does with more requests than it can take."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.cli.bench_report import check_targets, command_line, hand_over, say
from loopline.cli.options import maybe_host_and_port, with_credential_files
from loopline.security import Credentials

_Config = Annotated[
    Path | None, typer.Option("--config", metavar="CONFIG", help="Launch this cluster, not scripted workers.")
]
_Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ask a cluster that runs; its queue is its own.",
        callback=maybe_host_and_port,
    ),
]
_Model = Annotated[
    Path | None, typer.Option("--model", metavar="FOLDER", help="For scripted workers: config.json and tokenizer.")
]
_Times = Annotated[str, typer.Option(metavar="X,X", help="Arms: times of what the cluster can take.")]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
]


@with_credential_files
def overload(
    *,
    credentials: Credentials,
    config: _Config = None,
    address: _Address = None,
    model: _Model = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of each turn of an arm.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every arm.")] = 1,
    times: _Times = "1,10",
    queue: Annotated[int, typer.Option(min=1, help="coordinator.queue_limit of what is launched.")] = 64,
    deadline: Annotated[float, typer.Option(metavar="S", min=0.1, help="Of every request.")] = 10.0,
    slots: Annotated[int, typer.Option(min=1, help="Requests at once on the scripted decode worker.")] = 16,
    step_ms: Annotated[float, typer.Option(min=1, help="A step of a scripted worker.")] = 50.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 8,
    readers: Annotated[
        int, typer.Option(min=0, help="Also: so many streams, of which one stops reading in every other turn.")
    ] = 0,
    pause: Annotated[float, typer.Option(metavar="S", min=1, help="How long it stops.")] = 30.0,
    json_path: _Json = None,
) -> None:
    """Offer a cluster as much as it can take, and several times as much, in turns."""
    from loopline.bench.overload import OverloadBench, measure  # it loads a launcher, and other commands do without

    check_targets(json_path)
    if sum(one is not None for one in (config, address, model)) != 1:
        raise typer.BadParameter("give one of --config, --address and --model")
    bench = OverloadBench(
        config=config,
        address=address,
        model=model,
        seconds=seconds,
        rounds=rounds,
        times=_numbers(times),
        queue=queue,
        deadline_s=deadline,
        slots=slots,
        step_s=step_ms / 1000,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        readers=readers,
        pause_s=pause,
    )
    report = asyncio.run(measure(bench, command_line(), say, credentials))
    hand_over(report, json_path, _show)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise typer.BadParameter(f"--times is {text!r}; allowed: numbers above 0 with commas between")
    return numbers


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    host = report["machine"]
    load = ", ".join(f"{one:.1f}" for one in host["load"] or ()) or "unknown"
    console.print(f"{host['cpu']} ({host['num_cpus']} CPUs, load {load}), {host['date']}")
    console.print(f"the cluster takes {report['capacity_per_s']:.3g} requests/s")
    table = Table("times that", *(f"{one['times']:g}" for one in report["arms"]), box=SIMPLE, padding=(0, 1))
    for title in _cells(report["arms"][0]):
        table.add_row(title, *(_cells(one)[title] for one in report["arms"]))
    console.print(table)
    if report["readers"] is not None:
        readers = report["readers"]
        for name in ("all_read", "one_stops"):
            spread = readers[f"{name}_ms"] or {}
            figures = ", ".join(f"{key} {value:.1f}" for key, value in spread.items())
            console.print(f"{readers['readers']} readers, {name.replace('_', ' ')}: ms between tokens: {figures}")


def _cells(one: dict[str, Any]) -> dict[str, str]:
    """A column of the table: its rows by title."""
    counts = ("offered", "accepted", "refused", "finished_in_time", "missed", "failed")
    share, rss = one["coordinator_cpu"], one["rss_mib"]
    return {
        **{name.replace("_", " "): f"{one[name]:,}" for name in counts},
        "finished/s": f"{one['throughput_per_s']:.1f}",
        "answers, ms: p50 / p99": _spread(one["answer_ms"]),
        "refusals, ms: p50 / p99": _spread(one["refusal_ms"]),
        "the same since sent, ms: p50 / p99": _spread(one["refusal_since_sent_ms"]),
        "asked too late, ms: p50 / p99": _spread(one["late_ms"]),
        "of a CPU: generator / coordinator": f"{one['generator_cpu']:.2f} / "
        + ("" if share is None else f"{share:.2f}"),
        "coordinator's MiB: before / most / after": "" if rss is None else " / ".join(f"{mib:.1f}" for mib in rss),
    }


def _spread(spread: dict[str, float] | None) -> str:
    return "" if spread is None else f"{spread['p50']:,.1f} / {spread['p99']:,.1f}"
