"""Generates `_generated/` from proto/, and checks that what is committed is fresh.

Usage: `python -m loopline.wire.protogen [--check]`.

protoc names a module after the .proto's own path (`loopline.v1`), which would have to be importable under that name;
the import lines are rewritten so that everything resolves under `loopline.wire._generated`.
"""

import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
GENERATED = Path(__file__).resolve().parent / "_generated"
_IMPORT = re.compile(r"^from loopline\.v1 import", re.MULTILINE)


def generate(target: Path) -> None:
    """Write the generated tree into `target`, which must not exist. Raises RuntimeError if protoc fails."""
    from grpc_tools import protoc  # a development tool: the import belongs to this command alone

    target.mkdir(parents=True)
    files = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTO}", *outputs, *files]) != 0:
        raise RuntimeError("protoc failed")
    for path in target.rglob("*.py*"):
        text = _IMPORT.sub("from loopline.wire._generated.loopline.v1 import", path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (folder / "__init__.py").write_text("", encoding="utf-8")


def _differences(left: Path, right: Path) -> list[str]:
    names = {str(path.relative_to(root)) for root in (left, right) for path in root.rglob("*.py*")}
    names = {name for name in names if "__pycache__" not in name}
    return sorted(
        name
        for name in names
        if not ((left / name).is_file() and (right / name).is_file())
        or not filecmp.cmp(left / name, right / name, shallow=False)
    )


def main(arguments: list[str]) -> int:
    """Exit status of the command: 1 when `--check` finds a stale file."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "generated"
        generate(fresh)
        if "--check" in arguments:
            stale = _differences(fresh, GENERATED)
            for name in stale:
                sys.stderr.write(f"loopline/wire/_generated/{name} is stale: run `make proto`\n")
            return 1 if stale else 0
        shutil.rmtree(GENERATED, ignore_errors=True)
        shutil.copytree(fresh, GENERATED)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
