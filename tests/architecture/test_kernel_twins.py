"""Every kernel has a plain twin: what the Triton modules offer is in `kernels.reference`, with the same parameters.

The sources are parsed and never imported, so that this needs no Triton.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels import reference

KERNELS = Path(__file__).parents[2] / "kernels"
WITHOUT_KERNELS = {"launch"}  # its jitted functions are pieces of others' kernels
MODULES = {
    "activation",
    "decode_attention",
    "matvec",
    "norm",
    "packed_attention",
    "rope",
    "skinny_linear",
    "state_noise",
    "token_choice",
}
OTHER_NAMES = {
    "decode_attention": "paged_attention",
    "packed_attention": "paged_attention",
    "matvec": "linear",
    "gated_matvec": "gated_linear",
    "skinny_linear": "linear",
    "gated_skinny_linear": "gated_linear",
}
"""Kernels of one twin: they compute the same, each for the batches that it is fastest at."""
TUNED = "_tuned"
"""Ends the name of a function that is another with its launch configuration given."""


@dataclass(frozen=True)
class Offered:
    """A public function of a module with kernels that computes."""

    name: str
    parameters: tuple[str, ...]


def has_kernels(source: str) -> bool:
    """Whether a module imports Triton and defines a jitted function."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    jitted = any(isinstance(node, ast.FunctionDef) and _is_jitted(node) for node in nodes)
    return jitted and any(name.split(".")[0] == "triton" for name in imported)


def offered(source: str) -> list[Offered]:
    """The public functions of a module, jitted ones apart, that give a Tensor or launch a kernel."""
    return [
        Offered(node.name, _parameters(node))
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and not _is_jitted(node)
        and (_gives_tensor(node) or _launches(node))
    ]


def twin_of(name: str) -> Callable[..., object] | None:
    """The function of `kernels.reference`, or the method of its `ReferenceOps`, that says what a kernel computes."""
    known_as = OTHER_NAMES.get(name, name)
    return getattr(reference, known_as, None) or getattr(reference.ReferenceOps, known_as, None)


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    taken = function.args
    return tuple(argument.arg for argument in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs))


def _gives_tensor(function: ast.FunctionDef) -> bool:
    return function.returns is not None and "Tensor" in ast.unparse(function.returns)


def _launches(function: ast.FunctionDef) -> bool:
    """Whether it has a call of the form `kernel[grid](...)`."""
    return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) for node in ast.walk(function))


SOURCES = {path.relative_to(KERNELS).with_suffix("").as_posix(): path.read_text() for path in KERNELS.rglob("*.py")}
FOUND = {name: source for name, source in SOURCES.items() if name not in WITHOUT_KERNELS and has_kernels(source)}


def test_every_module_with_kernels_is_known() -> None:
    assert set(FOUND) == MODULES


@pytest.mark.parametrize("module", sorted(FOUND))
def test_what_a_module_offers_has_a_twin(module: str) -> None:
    functions = [function for function in offered(FOUND[module]) if not function.name.endswith(TUNED)]
    assert functions, f"kernels.{module} offers nothing"
    for function in functions:
        twin = twin_of(function.name)
        assert twin is not None, f"kernels.{module}.{function.name} has no twin in kernels.reference"
        names = tuple(name for name in inspect.signature(twin).parameters if name != "self")
        assert function.parameters == names, f"kernels.{module}.{function.name} and its twin take different arguments"


@pytest.mark.parametrize("module", sorted(FOUND))
def test_a_tuned_function_is_another_with_more_said(module: str) -> None:
    functions = {function.name: function for function in offered(FOUND[module])}
    for name in (name for name in functions if name.endswith(TUNED)):
        plain = functions.get(name.removesuffix(TUNED))
        assert plain is not None, f"kernels.{module}.{name} is a tuned form of nothing"
        shared = functions[name].parameters[: len(plain.parameters)]
        assert shared == plain.parameters, f"kernels.{module}.{name} takes other arguments than {plain.name}"


def test_other_names_are_of_functions_that_there_are() -> None:
    names = {function.name for source in FOUND.values() for function in offered(source)}
    assert set(OTHER_NAMES) - names == set()


SAMPLE = """
import triton
from torch import Tensor

def scaled(x: Tensor, by: float) -> Tensor: ...
def fill(x: Tensor) -> None:
    kernel[(1,)](x, 1)
def num_warps(width: int) -> int: ...
def check(x: Tensor) -> None: ...
def _helper(x: Tensor) -> Tensor: ...
@cache
def table(*, size: int) -> "Tensor | None": ...
@triton.jit(do_not_specialize=["n"])
def kernel(x, n): ...
"""


def test_what_counts_as_offered() -> None:
    assert has_kernels(SAMPLE)
    assert offered(SAMPLE) == [
        Offered("scaled", ("x", "by")),
        Offered("fill", ("x",)),
        Offered("table", ("size",)),
    ]
    assert not has_kernels(SAMPLE.replace("import triton\n", ""))
    assert not has_kernels(SAMPLE.replace('@triton.jit(do_not_specialize=["n"])', ""))
    assert twin_of("scaled") is None
