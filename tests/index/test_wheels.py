"""What the package index has for the pins. Of each in constraints-aarch64.txt it has a wheel, and they are all that a
node with such a processor installs. And constraints.txt fits the torch that it has for x86-64, which is built for CUDA
and asks for other packages than the builds for CPUs that machines without a GPU may take.

Nothing is installed, and of large wheels only the metadata is fetched. Environment markers are those of the interpreter
that runs this, Linux as the node's: pip has no option for them.
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
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28
LIMIT_S = 2400

pytestmark = [pytest.mark.index, pytest.mark.timeout(LIMIT_S + 60)]


def _requirements(*extras: str) -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *(one for name in extras for one in project["optional-dependencies"][name])]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins(constraints: Path) -> dict[str, str]:
    lines = [line for line in constraints.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {_key(name): version for name, version in (line.split("==") for line in lines)}


def _resolve(
    folder: Path, machine: str, python: str, constraints: Path, requirements: list[str]
) -> list[dict[str, Any]]:
    """What pip would install on a machine that is not this one, from the index alone: this one's settings may name
    other builds."""
    report = folder / "report.json"
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--use-feature=fast-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={name}" for name in [*platforms, f"manylinux2014_{machine}"]]
    command += [f"--target={folder / 'target'}", f"--report={report}", f"--constraint={constraints}"]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder / "target").exists()
    resolved: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return resolved


def _versions(resolved: list[dict[str, Any]]) -> dict[str, str]:
    return {_key(one["metadata"]["name"]): one["metadata"]["version"] for one in resolved}


def test_the_pins_are_what_a_node_installs(tmp_path: Path) -> None:
    constraints = ROOT / "constraints-aarch64.txt"
    requirements = [*_requirements("otel", "bench"), "ray[default]"]
    resolved = _resolve(tmp_path, "aarch64", "3.12", constraints, requirements)
    assert _versions(resolved) == _pins(constraints)
    files = [one["download_info"]["url"].rsplit("/", 1)[1] for one in resolved]
    assert [name for name in files if not name.endswith(("_aarch64.whl", "-any.whl"))] == []
    built = {name.split("-")[0].lower() for name in files if name.endswith("_aarch64.whl")}
    assert {"torch", "triton", "nixl_cu13", "grpcio", "ray"} <= built


def test_the_pins_fit_the_torch_of_the_index(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    torch = next(line.split(" := ")[1] for line in makefile.splitlines() if line.startswith("TORCH"))
    constraints = ROOT / "constraints.txt"
    found = _versions(_resolve(tmp_path, "x86_64", "3.11", constraints, [torch, *_requirements("dev")]))
    pins = _pins(constraints)
    assert found["torch"] == torch.split("==")[1] and any(name.startswith("nvidia-") for name in found)
    assert [name for name in found if name not in pins and not name.startswith(("nvidia-", "cuda-"))] == []
