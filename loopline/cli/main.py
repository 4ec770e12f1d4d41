"""Entry point of the `loopline` command."""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from loopline.errors import LooplineError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "launch": "launch:launch",
        "generate": "generate:generate",
        "run": "run:run",
        "status": "status:status",
        "scale": "scale:scale",
        "drain": "drain:drain",
        "rolling-restart": "drain:rolling_restart",
        "check": "check:check",
        "certs": "certs:certs",
        "worker": "worker:worker",
        "bench": "bench:app",
        "demo": "demo:demo",
    }
)
"""By name, in the order of the help: where its function is, or the group of its own commands."""
_HIDDEN = ("demo",)


class _Commands(TyperGroup):
    """Loads a command's module when that command is wanted: none waits for what only others need. (Contexts and
    commands have types of typer's inside.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        wanted = (cmd_name,) if cmd_name in COMMANDS else COMMANDS  # all, to find what may have been meant
        self.commands.update({name: _load(name) for name in wanted if name not in self.commands})
        return self.commands.get(cmd_name)


def _load(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(f"loopline.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name, hidden=name in _HIDDEN)(found)
    return get_command(alone)


app = typer.Typer(
    cls=_Commands,
    help="Serve looped language models on a cluster with prefill and decode apart.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _loopline() -> None:
    """What is said before a command's name: nothing but the options of every group."""


def main() -> None:
    """Run the command; an error of the tree in `loopline.errors` is one line on standard error and exit status 1."""
    try:
        app()
    except LooplineError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
