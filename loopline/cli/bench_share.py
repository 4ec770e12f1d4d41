"""`loopline bench share`: what a long prompt does to requests that decode beside it."""

from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.cli.bench_report import check_device, check_targets, command_line, hand_over, say

_Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Checkpoint folder, or ouro-1.4b, huginn-0125, tiny.", show_default=False),
]
_Random = Annotated[bool, typer.Option("--random-weights", help="Of the folder use config.json alone.")]
_Device = Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to compute.")]
_Dtype = Annotated[str, typer.Option(metavar="bf16|fp32|auto", help="auto: the checkpoint's own.")]
_Rows = Annotated[int, typer.Option(min=1, help="Requests that decode.")]
_Context = Annotated[int, typer.Option(min=1, help="Tokens of their prompts.")]
_Prompt = Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")]
_Bound = Annotated[float | None, typer.Option("--bound-ms", min=0.001, help="On time per token.", show_default=False)]
_Times = Annotated[float, typer.Option(min=1, help="Without --bound-ms: times what a step without prompts takes.")]
_Share = Annotated[int, typer.Option(min=1, help="Prompt tokens of a step: the most with a bound, else always.")]
_Before = Annotated[int, typer.Option(min=1, help="Tokens of each request that are timed before the prompt comes.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Turns of every arm that count.")]
_CpuTime = Annotated[bool, typer.Option("--cpu-time", help="Count this process's CPU time, not the clock's.")]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
]


def share(
    model: _Model,
    *,
    random_weights: _Random = False,
    device: _Device = "cuda",
    dtype: _Dtype = "bf16",
    rows: _Rows = 8,
    context: _Context = 64,
    prompt: _Prompt = 1024,
    bound_ms: _Bound = None,
    bound_times: _Times = 3.0,
    share_tokens: _Share = 256,
    before: _Before = 50,
    rounds: _Rounds = 3,
    cpu_time: _CpuTime = False,
    json_path: _Json = None,
) -> None:
    """Time per token of requests while a long prompt is computed beside them: with a bound, with a fixed share of
    each step, and with none."""
    from loopline.bench.share import ShareBench, measure  # it loads torch, and other commands do without

    check_targets(json_path)
    check_device(device)
    bench = ShareBench(
        model=model,
        random_weights=random_weights,
        device=device,
        dtype=dtype,
        rows=rows,
        context=context,
        prompt=prompt,
        bound_s=None if bound_ms is None else bound_ms / 1e3,
        bound_times=bound_times,
        most_share=share_tokens,
        before=before,
        rounds=rounds,
        cpu_time=cpu_time,
    )
    hand_over(measure(bench, command_line(), say), json_path, _show)


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    machine, model = report["machine"], report["model"]
    console.print(f"{machine['device']}, torch {machine['torch']}, {machine['date']}; {report['clock']} time")
    console.print(
        f"{model['name']}, {model['dtype']}, {model['loops']} loops: {report['rows']} requests decode, then a prompt "
        f"of {report['prompt']:,} tokens comes; the bound is {report['bound_ms']:.3f} ms a token"
    )
    heads = ("arm", "before p50", "p99", "during p50", "p99", "most", "within", "first token", "share")
    table = Table(*heads, box=SIMPLE, padding=(0, 1))
    for name, one in report["arms"].items():
        before, during, share = one["before"], one["during"], one["share_tokens"]
        times = (before["p50_ms"], before["p99_ms"], during["p50_ms"], during["p99_ms"], during["max_ms"])
        table.add_row(
            name,
            *(f"{time:,.2f}" for time in times),
            f"{one['within_bound']:.1%}",
            f"{one['first_token_ms']['median']:,.0f}",
            f"{share['least']} to {share['most']}",
        )
    console.print(table)
    console.print("ms a token, ms to the long prompt's first token, prompt tokens of a step")
    least = report["arms"]["bound"]["least_shares"]
    if least:
        console.print(f"bound: in {least} steps even the least share was expected to pass it")
