"""The package index has a wheel for aarch64 of every pin in constraints-aarch64.txt, and the pins are all that a node
installs. Nothing is installed, and of large wheels only the metadata is fetched.

Environment markers are those of the interpreter that runs this, Linux as the node's: pip has no option for them.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints-aarch64.txt"
PYTHON = "3.12"
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28
LIMIT_S = 2400

pytestmark = [pytest.mark.index, pytest.mark.timeout(LIMIT_S + 60)]


def _requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["otel"], *extras["bench"], "ray[default]"]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {_key(name): version for name, version in (line.split("==") for line in lines)}


def _resolve(folder: Path) -> list[dict[str, Any]]:
    """What pip would install on a node, for a machine that is not this one."""
    report = folder / "report.json"
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--use-feature=fast-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
    command += [f"--platform={name}" for name in [*platforms, "manylinux2014_aarch64"]]
    command += [f"--target={folder / 'target'}", f"--report={report}", f"--constraint={CONSTRAINTS}"]
    done = subprocess.run([*command, *_requirements()], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder / "target").exists()
    resolved: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return resolved


def test_the_pins_are_what_a_node_installs(tmp_path: Path) -> None:
    resolved, pins = _resolve(tmp_path), _pins()
    assert {_key(one["metadata"]["name"]): one["metadata"]["version"] for one in resolved} == pins
    files = [one["download_info"]["url"].rsplit("/", 1)[1] for one in resolved]
    assert [name for name in files if not name.endswith(("_aarch64.whl", "-any.whl"))] == []
    built = {name.split("-")[0].lower() for name in files if name.endswith("_aarch64.whl")}
    assert {"torch", "triton", "nixl_cu13", "grpcio", "ray"} <= built
