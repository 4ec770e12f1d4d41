"""docs/faults.md names tests that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`([a-z_/]+): ([a-z_]+)`", (ROOT / "docs" / "faults.md").read_text(encoding="utf-8"))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize(("module", "name"), sorted(set(NAMED)), ids=": ".join)
def test_a_named_test_is_there(module: str, name: str) -> None:
    folder, _, file = module.rpartition("/")
    text = (ROOT / "tests" / folder / f"test_{file}.py").read_text(encoding="utf-8")
    assert re.search(rf"^def test_{name}\(", text, re.MULTILINE), f"{module} has no test_{name}"
