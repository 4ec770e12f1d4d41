"""The documentation knows every key, every command and every option, and its links lead somewhere."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from loopline.cli.main import app
from loopline.config import ClusterConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _keys(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of the YAML with its default, `...` where it has none."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found.update(_keys(field.annotation, f"{prefix}{name}."))
        else:
            found[prefix + name] = ... if field.is_required() else field.get_default(call_default_factory=True)
    return found


def _cell(default: Any) -> str:
    if default is ...:
        return "required"
    if default is None:
        return "`null`"
    text = str(default).lower() if isinstance(default, bool) else str(default)
    return f"`{text.removesuffix('.0')}`"


def test_every_key_is_documented_with_its_default() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", text, re.MULTILINE))
    expected = {key: _cell(default) for key, default in _keys(ClusterConfig).items()}
    expected["name"] = "the file's name"
    assert documented == expected


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for command in app.registered_commands:
        if command.hidden:
            continue
        assert f"## loopline {command.name}" in text
        assert command.callback is not None
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            (info,) = parameter.annotation.__metadata__
            if "Argument" in type(info).__name__:
                continue
            named = str(info.default).startswith("--")  # typer keeps the first name of an option there
            option = info.default if named else f"--{parameter.name.replace('_', '-')}"
            assert f"`{option}" in text, f"{command.name} {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
