"""`loopline bench engine`: what the engine's steps cost on a device, beside plainer ways and a floor."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.bench.engine_plot import plot_engine
from loopline.cli.bench_report import check_device, check_targets, command_line, hand_over, say

_ELEMENTWISE = "plain-graph / elementwise-graph"  # a ratio of the report

_Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Checkpoint folder, or ouro-1.4b, huginn-0125, tiny.", show_default=False),
]
_Random = Annotated[bool, typer.Option("--random-weights", help="Of the folder use config.json alone.")]
_Device = Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to compute.")]
_Dtype = Annotated[str, typer.Option(metavar="bf16|fp32|auto", help="auto: the checkpoint's own.")]
_Decode = Annotated[str, typer.Option(metavar="ROWSxCONTEXT,...", help="Decode points; may be empty.")]
_Prefill = Annotated[str, typer.Option(metavar="PROMPTSxTOKENS,...", help="Prefill points; may be empty.")]
_Arms = Annotated[str | None, typer.Option(metavar="NAME,...", help="Decode arms; the device's own if not given.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Turns of every arm.")]
_Steps = Annotated[int, typer.Option(min=1, help="Most steps of a turn.")]
_Chunk = Annotated[int, typer.Option(min=1, help="Most tokens of one packed pass.")]
_PerRowRows = Annotated[int, typer.Option(min=1, help="Rows of a step that computes prompts as decode rows.")]
_PerRowAll = Annotated[bool, typer.Option("--per-row-all", help="Prompts as decode rows at every point.")]
_Idle = Annotated[bool, typer.Option("--idle", help="Also trace a whole engine: where is the device idle?")]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="PATH.png", help="Draw it (needs the extra bench).")]


def engine(
    model: _Model,
    *,
    random_weights: _Random = False,
    device: _Device = "cuda",
    dtype: _Dtype = "bf16",
    decode: _Decode = "1x512,32x512",
    prefill: _Prefill = "1x2048,8x2048",
    arms: _Arms = None,
    rounds: _Rounds = 5,
    steps: _Steps = 20,
    prefill_chunk: _Chunk = 16384,
    per_row_rows: _PerRowRows = 256,
    per_row_all: _PerRowAll = False,
    idle: _Idle = False,
    json_path: _Json = None,
    plot_path: _Plot = None,
) -> None:
    """Time decode steps and prompts on a device, in turns with plainer ways to compute the same."""
    from loopline.bench.engine import EngineBench, measure  # it loads torch, and other commands do without
    from loopline.bench.engine_idle import IdleSizes

    check_targets(json_path, plot_path)
    check_device(device)
    bench = EngineBench(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        decode=_points("--decode", decode),
        prefill=_points("--prefill", prefill),
        arms=None if arms is None else tuple(arms.split(",")),
        rounds=rounds,
        steps=steps,
        prefill_chunk=prefill_chunk,
        per_row_rows=per_row_rows,
        per_row_all=per_row_all,
        idle=IdleSizes() if idle else None,
    )
    report = measure(bench, command_line(), say)
    hand_over(report, json_path, _show, plot_path, plot_engine)


def _points(option: str, text: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(a), int(b)) for a, b in (part.split("x") for part in text.split(",") if part.strip()))
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; allowed: pairs such as 1x512,32x512") from None


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    machine, rates, model = report["machine"], report["rates"], report["model"]
    console.print(f"{machine['device']}, torch {machine['torch']}, triton {machine['triton']}, {machine['date']}")
    console.print(
        f"{model['name']}, {model['dtype']}, {model['loops']} loops; copy {rates['copy_bytes_per_s'] / 1e12:.3g} TB/s, "
        f"matmul {rates['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s; medians"
    )
    table = Table("point", "arm", "ms", "least", "most", "/ floor", "/ ours", box=SIMPLE, padding=(0, 1))
    for part, count, size in (("decode", "rows", "context"), ("prefill", "prompts", "tokens")):
        for point in report[part]:
            table.add_section()
            name = f"{part} {point[count]}x{point[size]}"
            table.add_row(name, *(["floor", _ms(point["floor_ms"])] if "floor_ms" in point else [point["error"]]))
            for arm, figures in point.get("arms", {}).items():
                table.add_row("", arm, *_cells(arm, figures, point["ratios"]))
    console.print(table)
    console.print("ours: the arm engine, or packed")
    for point in report["decode"]:
        if (ratio := point.get("ratios", {}).get(_ELEMENTWISE)) is not None:
            console.print(f"decode {point['rows']}x{point['context']}: {_ELEMENTWISE} {ratio:.2f}")
    if report["idle"] is not None:
        _show_idle(console, report["idle"])


def _cells(arm: str, figures: dict[str, Any], ratios: dict[str, float]) -> list[str]:
    if "median_ms" not in figures:
        return [figures.get("error", "not run")]
    best = ratios.get(f"{arm} / engine") or ratios.get(f"{arm} / packed")
    times = [_ms(figures[name]) for name in ("median_ms", "min_ms", "max_ms")]
    return [*times, f"{ratios[f'{arm} / floor']:.2f}", "" if best is None else f"{best:.2f}"]


def _show_idle(console: Console, idle: dict[str, Any]) -> None:
    if "error" in idle:
        console.print(f"whole engine: {idle['error']}")
        return
    console.print(
        f"whole engine: ready after {idle['start_to_engine_s']:.2f} s, first token after "
        f"{idle['start_to_first_token_s']:.2f} s, {idle['step_ms']:.3f} ms a step of {idle['requests']} rows"
    )
    trace = idle["trace"]
    if trace is None:
        return
    large = trace["large_gaps"]
    console.print(
        f"traced {trace['steps']} steps, {trace['window_ms']:.1f} ms: idle {trace['idle_share']:.2%}, of it "
        f"{large['share']:.2%} in {large['count']} gaps above {large['above_us']:.0f} us ({large['total_ms']:.2f} ms, "
        f"longest {large['longest_us']:.0f} us)"
    )


def _ms(value: float) -> str:
    return f"{value:,.3f}"
