"""What must start without torch does: the coordinator, the client, and the commands that only ask a cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "nixl", "ray", "opentelemetry")
_REPORT = f"; import sys; print([name for name in {HEAVY} if name in sys.modules])"
_COMMAND = (
    "import sys; from loopline.cli.main import main; sys.argv = {arguments!r}\ntry: main()\nexcept SystemExit: pass\n"
)


def _loaded_after(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return finished.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "module",
    [
        "loopline",
        "coordinator",
        "coordinator.__main__",
        "coordinator.launcher",
        "coordinator.server",
        "loopline.client",
        "loopline.config",
        "loopline.intake",
        "loopline.messages",
        "loopline.text",
        "loopline.wire.convert",
        "loopline.sched.scheduler",
        "loopline.kv.ledger",
        "loopline.cli.main",
    ],
)
def test_a_module_loads_nothing_heavy(module: str) -> None:
    assert _loaded_after(f"import {module}" + _REPORT) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["loopline", "generate", "--address", "127.0.0.1:1", "--prompt", "x", "--json"],
        ["loopline", "status", "--address", "127.0.0.1:1"],
        ["loopline", "check", "configs/local-cpu.yaml"],
        ["loopline", "--help"],
    ],
    ids=lambda arguments: arguments[1],
)
def test_a_command_loads_nothing_heavy(arguments: list[str]) -> None:
    assert _loaded_after(_COMMAND.format(arguments=arguments) + _REPORT.removeprefix("; ")) == "[]"
