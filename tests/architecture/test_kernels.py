"""Each kernel has a plain twin: what the seam offers, and what a Triton module offers, is in kernels.reference too."""

import ast
import inspect
from pathlib import Path

import pytest

from kernels import reference
from kernels.ops import Ops

KERNELS = Path(__file__).parents[2] / "kernels"
OPERATIONS = [name for name, value in vars(Ops).items() if inspect.isfunction(value) and not name.startswith("_")]


def _triton_wrappers() -> list[tuple[str, str, list[str]]]:
    """(module, function, parameter names) of what modules with Triton kernels offer."""
    found = []
    for path in sorted(KERNELS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        if "triton" not in imports:
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list:
                found.append((path.stem, node.name, [argument.arg for argument in node.args.args]))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_a_twin(name: str) -> None:
    twin = getattr(reference.ReferenceOps, name)
    assert list(inspect.signature(twin).parameters) == list(inspect.signature(getattr(Ops, name)).parameters)


def test_a_triton_kernel_has_a_twin() -> None:
    for module, name, parameters in _triton_wrappers():
        twin = getattr(reference, name, None) or getattr(reference.ReferenceOps, name, None)
        assert twin is not None, f"kernels.{module}.{name} has no twin in kernels.reference"
        names = [parameter for parameter in inspect.signature(twin).parameters if parameter != "self"]
        assert names == parameters, f"kernels.{module}.{name} and its twin take different arguments"


def test_there_are_operations() -> None:
    assert len(OPERATIONS) >= 5
