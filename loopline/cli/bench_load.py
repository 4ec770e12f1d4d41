"""`loopline bench session` and `loopline bench burst`: the same requests to several arms, in turns."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from loopline.bench.load_plot import plot_load
from loopline.bench.load_report import Watcher, failed_arms
from loopline.bench.named_model import spec_of
from loopline.bench.session_arms import EngineLoad, check_prefixes
from loopline.bench.sessions import SessionShape, Trace, draw_burst, draw_sessions, read_trace, write_trace
from loopline.bench.turn_figures import Limits
from loopline.cli.bench_report import check_device, check_target, command_line, hand_over
from loopline.cli.load_options import LoadOptions, load_options, refuse_together
from loopline.cli.options import with_credential_files, with_options_of
from loopline.errors import ConfigError, OperatorError
from loopline.security import Credentials

_MOST_WIDTH = 1000  # of a table, whatever the terminal's: no name and no figure is cut
_DRAWN = ("sessions", "turns", "first", "tool", "answer", "system", "think", "gap", "sigma", "drawn_times", "seed")


_COLUMNS = (
    "arm",
    "answer\ntok/s",
    "prompt\ntok/s",
    "first token\np50",
    "\np99",
    "per token\np50",
    "\np99",
    "\ncached",
    "\ngood/s",
    "\nruns",
    "failed\nturns",
)


def _with_load(command: Callable[..., None]) -> Callable[..., None]:
    return with_credential_files(with_options_of(load_options, command, "load"))


@_with_load
def burst(
    *,
    load: LoadOptions,
    credentials: Credentials,
    requests: Annotated[int, typer.Option(min=1, help="All at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of every request, random ones.")] = 512,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of every request.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the tokens.")] = 0,
) -> None:
    """Ask for many answers at once, of one arm after the other, in turns."""
    _run(load, draw_burst(requests, prompt_tokens, answer_tokens, seed), credentials)


@_with_load
def session(
    *,
    load: LoadOptions,
    credentials: Credentials,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 32,
    turns: Annotated[int, typer.Option(min=1, help="Of each.")] = 6,
    first: Annotated[int, typer.Option(min=1, help="Tokens of a first prompt.")] = 256,
    tool: Annotated[int, typer.Option(min=1, help="Tokens that each further turn adds.")] = 64,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    system: Annotated[int, typer.Option(min=0, help="Tokens that all sessions begin with.")] = 0,
    think: Annotated[float, typer.Option(metavar="S", min=0, help="Between an answer and the next turn.")] = 0.0,
    gap: Annotated[float, typer.Option(metavar="S", min=0, help="Between two sessions' starts.")] = 0.0,
    sigma: Annotated[float, typer.Option(min=0, help="Lengths are log-normal, of this deviation; 0: fixed.")] = 0.0,
    drawn_times: Annotated[bool, typer.Option("--drawn-times", help="Times are exponential; else fixed.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay this, and draw nothing.")] = None,
    write_to: Annotated[Path | None, typer.Option("--write-trace", metavar="FILE", help="Keep what was drawn.")] = None,
) -> None:
    """Hold conversations that are sent again at every turn, with one arm after the other, in turns."""
    shape = SessionShape(
        sessions=sessions,
        turns=turns,
        first=first,
        tool=tool,
        answer=answer,
        system=system,
        think_s=think,
        gap_s=gap,
        sigma=sigma,
        drawn_times=drawn_times,
        seed=seed,
    )
    if trace is not None:
        refuse_together("--trace", _DRAWN, load.given)
    if write_to is not None:
        check_target("--write-trace", write_to)
    made = draw_sessions(shape) if trace is None else read_trace(trace)
    if write_to is not None:
        write_trace(made, write_to)
    _run(load, made, credentials)


def _run(load: LoadOptions, trace: Trace, credentials: Credentials) -> None:
    limits = Limits(ttft_s=load.ttft_limit_s, tpot_s=load.tpot_limit_s)
    with _watched() as watch:
        if load.engine is not None:
            report = _with_engines(load, load.engine, trace, limits, watch)
        else:
            report = _with_clusters(load, trace, limits, watch, credentials)
    failed = failed_arms(report)
    can_draw = len(failed) < len(report["arms"])  # an empty picture would look like figures
    hand_over(report, load.json_path, _show, load.plot_path if can_draw else None, plot_load)
    if failed:
        parts = [f"arm {name}: no turn was answered: {' '.join(cause.split())}" for name, cause in failed.items()]
        raise OperatorError("; ".join(parts) + ("" if can_draw or load.plot_path is None else "; no picture is drawn"))


def _with_engines(load: LoadOptions, model: str, trace: Trace, limits: Limits, watch: Watcher) -> dict[str, Any]:
    engines = EngineLoad(
        model=model,
        random_weights=load.random_weights,
        device=load.device,
        dtype=load.dtype,
        prefix_cache=load.prefix_cache,
        working_sets=load.working_sets,
        prefill=load.prefill,
        host=load.host,
        rounds=load.rounds,
        chunk_tokens=load.chunk_tokens,
        step_tokens=load.step_tokens,
        max_running=load.max_running,
        counts_calls=load.counts_calls,
        settings=load.settings,
    )
    try:
        check_prefixes(engines, spec_of(model))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    from loopline.bench.engine_sessions import measure  # it loads torch, and clusters do without

    check_device(load.device)
    return measure(engines, trace, limits, command_line(), watch)


def _with_clusters(
    load: LoadOptions, trace: Trace, limits: Limits, watch: Watcher, credentials: Credentials
) -> dict[str, Any]:
    from loopline.bench.cluster_sessions import ClusterArm, ClusterLoad, measure  # it loads gRPC, engines do without

    arms = tuple(ClusterArm(one.name, one.address, one.config) for one in load.targets)
    clusters = ClusterLoad(arms=arms, rounds=load.rounds, deadline_s=load.deadline_s)
    return asyncio.run(measure(clusters, trace, limits, command_line(), watch, credentials))


@contextmanager
def _watched() -> Iterator[Watcher]:
    """A bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("turns", total=None)
        yield Watcher(
            total=lambda count: progress.update(task, total=count),
            say=lambda part: progress.update(task, description=part),
            turn_done=lambda: progress.advance(task),
        )


# ---- what is shown


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    where = report["machine"]
    name = where.get("device") or f"{where['cpu']} ({where['num_cpus']} CPUs)"
    console.print(f"{name}, {where['date']}; medians over each arm's runs, times in ms")
    table = Table(*(Column(title, no_wrap=True) for title in _COLUMNS), box=SIMPLE, padding=(0, 1))
    for arm in report["arms"]:
        table.add_row(arm["name"], *_cells(arm))
    needed = console.measure(table, options=console.options.update(max_width=_MOST_WIDTH)).maximum
    console.width = max(console.width, needed)
    console.print(table)
    for arm in report["arms"]:
        if line := _sources(arm["runs"]):
            console.print(f"{arm['name']}: {line}")
    for one in report["ratios"]:
        console.print(f"{one['of']} / {one['to']}: {_ratios(one)}")
    for arm_name, calls in report.get("calls", {}).items():
        console.print(
            f"{arm_name}: {calls['python_calls_per_step']:,.0f} Python calls a step, "
            f"{calls['python_calls_per_token']:,.1f} a token of {calls['answer_tokens']:,}"
        )
    for note in report.get("notes", ()):
        console.print(f"note: {note}")
    for arm in report["arms"]:
        for error in [
            *([arm["error"]] if "error" in arm else []),
            *(one for run in arm["runs"] for one in run["errors"]),
        ]:
            console.print(f"{arm['name']}: {error}")


def _cells(arm: dict[str, Any]) -> list[str]:
    median = arm["median"]
    names = (
        ("answer_tokens_per_s", ",.1f"),
        ("prompt_tokens_per_s", ",.0f"),
        ("ttft_p50_ms", ",.0f"),
        ("ttft_p99_ms", ",.0f"),
        ("tpot_p50_ms", ",.1f"),
        ("tpot_p99_ms", ",.1f"),
        ("cached_share", ".1%"),
        ("goodput_per_s", ",.2f"),
    )
    cells = [format(median[name], form) if name in median else "" for name, form in names]
    return [*cells, str(len(arm["runs"])), str(sum(run["failed"] for run in arm["runs"]))]


def _sources(runs: list[dict[str, Any]]) -> str:
    """Turns of all runs by where their KV came from, and what was moved for it; "" of engines."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run["prefix_sources"])
    if not counts:
        return ""
    moved = [f"{sum(run[f'{name}_bytes'] for run in runs) / 2**20:,.2f} MiB" for name in ("handoff", "fetched")]
    sources = ", ".join(f"{source} {count:,}" for source, count in sorted(counts.items()))
    return f"prefix source of turns: {sources}; handed over {moved[0]}, fetched {moved[1]}"


def _ratios(one: dict[str, Any]) -> str:
    titles = {
        "answer_tokens_per_s": "throughput",
        "goodput_per_s": "goodput",
        "ttft_p50_ms": "first token p50",
        "tpot_p50_ms": "per token p50",
    }
    parts = [f"{title} {one[name]:.2f}" for name, title in titles.items() if name in one]
    same = one["same_answers"]
    return ", ".join([*parts, *([] if same is None else [f"same answers {same:.1%}"])])
