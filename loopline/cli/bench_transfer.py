"""`loopline bench transfer`: what moving a prompt's KV to another process costs, by how it is described."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.bench.transfer_plot import plot_transfer
from loopline.cli.bench_report import check_targets, command_line, hand_over, say

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder with a config.json, or ouro-1.4b, huginn-0125, tiny.", show_default=False
    ),
]
_Tokens = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
_Transport = Annotated[str, typer.Option(metavar="auto|tcp", help="auto: as UCX chooses.")]
_Device = Annotated[str, typer.Option(metavar="cpu|cuda|SOURCE,TARGET", help="Where the arenas lie.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Turns of every arm.")]
_Scale = Annotated[
    float | None,
    typer.Option(help="Share of the planes to move; as many as half of free memory takes if not given."),
]
_Overlap = Annotated[bool, typer.Option("--overlap", help="Also push chunks while later ones are computed.")]
_Compute = Annotated[
    float | None, typer.Option(min=0, help="What a chunk of --overlap takes to compute; twice its push if not given.")
]
_Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write one JSON object; - prints it alone.")
]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="PATH.png", help="Draw it (needs the extra bench).")]


def transfer(
    model: _Model,
    *,
    tokens: _Tokens = 512,
    transport: _Transport = "auto",
    device: _Device = "cpu",
    rounds: _Rounds = 5,
    scale: _Scale = None,
    overlap: _Overlap = False,
    compute_ms: _Compute = None,
    json_path: _Json = None,
    plot_path: _Plot = None,
) -> None:
    """Push one prompt's KV to another process, in turns with other ways to lay it out and to describe it."""
    from loopline.bench.transfer import TransferBench, measure  # it loads torch, and other commands do without

    check_targets(json_path, plot_path)
    bench = TransferBench(
        model=model,
        tokens=tokens,
        transport=transport,
        device=device,
        rounds=rounds,
        scale=scale,
        overlap=overlap,
        compute_ms=compute_ms,
    )
    report = measure(bench, command_line(), say)
    hand_over(report, json_path, _show, plot_path, plot_transfer)


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    machine, model, link = report["machine"], report["model"], report["link"]
    load = ", ".join(f"{one:.1f}" for one in machine["load"] or ()) or "unknown"
    console.print(f"{machine['cpu']} ({machine['num_cpus']} CPUs, load {load}), {machine['date']}")
    console.print(f"{machine['source']} to {machine['target']} over {link['transport']} ({link['asked']} asked for)")
    console.print(
        f"{model['name']}, {model['dtype']}: {model['tokens']} tokens = {model['blocks']} blocks of "
        f"{model['block_bytes'] / 2**20:.3g} MiB; {model['planes']} of the model's {model['model_planes']} planes"
    )
    heads = ("arm", "desc.", "prep ms", "post ms", "total ms", "GB/s", "/ flat", "bytes")
    table = Table(*heads, box=SIMPLE, padding=(0, 1))
    for name, one in report["arms"].items():
        table.add_row(name, *_cells(one))
    console.print(table)
    for name, one in report["arms"].items():
        if "error" in one:
            console.print(f"{name}: {one['error']}")
    console.print("medians; total: from post_write's begin until the target has said over a socket that it has it")
    if report["overlap"] is not None:
        _show_overlap(console, report["overlap"])


def _cells(one: dict[str, Any]) -> list[str]:
    cells = [f"{one['descriptors']:,}"]
    if "total_ms" in one:
        cells += [f"{one[name]:,.3f}" for name in ("prep_ms", "post_ms", "total_ms")]
        cells += [f"{one['gb_per_s']:.2f}", f"{one['ratio']:.2f}" if "ratio" in one else ""]
    else:
        cells += [""] * 5
    return [*cells, "failed" if "error" in one else "same"]


def _show_overlap(console: Console, overlap: dict[str, Any]) -> None:
    if "error" in overlap:
        console.print(f"overlap: {overlap['error']}")
        return
    chunks = f"{overlap['chunks']} chunks of {overlap['chunk_tokens']} tokens, {overlap['chunk_bytes'] / 2**20:.3g} MiB"
    console.print(f"{chunks}, {overlap['compute_ms']:.3g} ms to compute one; from then until the target has all:")
    for name, one in overlap.items():
        if isinstance(one, dict):
            console.print(f"  {name.replace('_', ' ')}: {one['ms']:,.3f} ms, {one['descriptors']} descriptors")
