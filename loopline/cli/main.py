"""Entry point of the `loopline` command."""

import sys

import typer

from loopline.cli import bench, certs, check, demo, drain, generate, launch, run, scale, status, worker
from loopline.errors import LooplineError

app = typer.Typer(
    help="Serve looped language models on a cluster with prefill and decode apart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("launch")(launch.launch)
app.command("generate")(generate.generate)
app.command("run")(run.run)
app.command("status")(status.status)
app.command("scale")(scale.scale)
app.command("drain")(drain.drain)
app.command("rolling-restart")(drain.rolling_restart)
app.command("check")(check.check)
app.command("certs")(certs.certs)
app.command("worker")(worker.worker)
app.add_typer(bench.app, name="bench")
app.command("demo", hidden=True)(demo.demo)


def main() -> None:
    """Run the command; an error of the tree in `loopline.errors` is one line on standard error and exit status 1."""
    try:
        app()
    except LooplineError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
