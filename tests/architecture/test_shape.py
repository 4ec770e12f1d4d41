"""The shape of the tree: file and function lengths, where kinds of files live, what the layers cover."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("loopline", "coordinator", "prefill_worker", "decode_worker", "kvtransfer", "kernels")
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
_GENERATED = ROOT / "loopline/wire/_generated"
# Pieces of names of machines and folders that are no part of the project; in pieces, so that this file passes itself.
_FOREIGN_WORDS = ("/work" + "/", "/home" + "/", "/opt" + "/", "/root" + "/", "shared" + "/models", "shared" + "/golden")
_TEXT_ENDINGS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".json", ""}
_SKIPPED = {"__pycache__", "data", "models", "build", "dist"}


def _sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if _GENERATED not in path.parents]


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def _is_triton_kernel(path: Path) -> bool:
    return path.is_relative_to(ROOT / "kernels") and "import triton" in path.read_text(encoding="utf-8")


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(*PACKAGES, "tests")}
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length >= MOST_FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}": length
        for path in _sources(*PACKAGES, "tests")
        if not _is_triton_kernel(path)
        for name, length in _functions(path)
    }
    assert {name: length for name, length in found.items() if length >= MOST_FUNCTION_LINES} == {}


def test_every_module_says_what_it_is_for() -> None:
    bare = [
        str(path.relative_to(ROOT))
        for path in _sources(*PACKAGES)
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert bare == []


def test_proto_holds_protocol_files_only() -> None:
    """A Python package there would shadow the proto package of others."""
    files = [path for path in (ROOT / "proto").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files
    assert [path.name for path in files if path.suffix != ".proto"] == []


def test_the_layers_cover_the_whole_tree() -> None:
    """A module that no layer names would be free to import anything."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    text = " ".join(next(contract["layers"] for contract in contracts if contract["id"] == "layers"))
    named = {word.strip("()") for word in text.replace("|", " ").replace(":", " ").split()}
    parts = [path for path in (ROOT / "loopline").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    expected = {f"loopline.{path.stem}" for path in parts if path.stem != "__init__"} | set(PACKAGES) - {"loopline"}
    assert expected - named == set()


def test_the_project_speaks_of_itself_alone() -> None:
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_hidden = parts[0].startswith(".") and parts[0] != ".ci" and len(parts) > 1
        if is_hidden or _SKIPPED.intersection(parts) or not path.is_file() or path.suffix not in _TEXT_ENDINGS:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in _FOREIGN_WORDS if word in text]
    assert found == []
