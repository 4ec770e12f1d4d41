"""What the product's code must not use, because it breaks in a way that no ordinary test sees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("loopline", "coordinator", "prefill_worker", "decode_worker", "kvtransfer", "kernels")


def test_no_queue_whose_timed_wait_may_never_end() -> None:
    """In CPython 3.11 `SimpleQueue.get(timeout=...)` after a `put` and a `get_nowait` may wait without a limit, once in
    some hundred rounds of short timeouts: a thread that polls would stand still until somebody puts something.
    """
    assert users_of("SimpleQueue(") == []


def test_no_code_between_fork_and_exec() -> None:
    """`preexec_fn` makes Python fork where it would not have to, and a fork beside gRPC's threads may abort the child:
    gRPC's handlers around a fork do nothing while another of its threads is inside a call.
    """
    assert users_of("preexec_fn=") == []


@pytest.mark.parametrize(
    "module", ["pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"]
)
def test_nothing_is_unpickled(module: str) -> None:
    """Reading such bytes runs whatever their writer wanted."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [str(path.relative_to(ROOT)) for name in names if name.partition(".")[0] == module]
    assert found == []


def test_no_call_unpickles_by_another_name() -> None:
    """`torch.load` unpickles unless told otherwise, numpy does with `allow_pickle`, and `multiprocessing` with all that
    it sends between processes."""
    names = {"torch.load", "torch.package", "read_pickle", "send_object_list", "broadcast_object_list"}
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                found += [f"{path.relative_to(ROOT)}: {text}" for name in names if text.endswith(name)]
            elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
                found.append(f"{path.relative_to(ROOT)}: {node.arg}")
            elif isinstance(node, ast.Import | ast.ImportFrom) and "multiprocessing" in ast.unparse(node):
                found.append(f"{path.relative_to(ROOT)}: multiprocessing")
    assert found == []


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def users_of(text: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sources() if text in path.read_text(encoding="utf-8")]
