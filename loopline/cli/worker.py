"""`loopline worker`: one worker process, started by hand on any node that reaches the coordinator."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer


def worker(
    *,
    role: Annotated[
        Literal["prefill", "decode", "unified"], typer.Option(help="What the worker does.", show_default=False)
    ],
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The coordinator's address.", show_default=False)
    ],
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG", help="Cluster YAML.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Its name for people; made up if not given.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; this machine's on the way to the coordinator if not given."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address at which others reach it, where that is not --host.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; any free one if not given.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port to answer scrapes at; any free one if not given and the YAML has metrics.")
    ] = None,
) -> None:
    """Run one worker until it is told to stop."""
    arguments = ["--config", str(config), "--coordinator", coordinator]
    options = (("--name", name), ("--host", host), ("--advertise", advertise), ("--port", port))
    for option, value in (*options, ("--metrics-port", metrics_port)):
        if value is not None:
            arguments += [option, str(value)]
    raise typer.Exit(_main_of(role)(arguments))


def _main_of(role: str) -> Callable[[list[str]], int]:
    """The worker package's own entry point; only that package is loaded, and torch with it."""
    if role == "prefill":
        from prefill_worker.__main__ import main as prefill_main

        return prefill_main
    if role == "unified":
        from decode_worker.unified.__main__ import main as unified_main

        return unified_main
    from decode_worker.__main__ import main as decode_main

    return decode_main
