"""What is wrong in a cluster's YAML file, in words: `loopline.config` raises, here is what it says."""

import types
import typing
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from loopline.config_sections import LABEL_SELECTOR, Section
from loopline.security import MIN_TOKEN_CHARS

_PATTERNS = {
    LABEL_SELECTOR: "A, !A, in(A,B) or !in(A,B), where A and B are letters, digits and -_. (quote numbers)",
    r"^(auto|local|[^/\s]+:\d+)$": "auto, local or HOST:PORT",
    r"^(cpu|cuda(:\d+)?)$": "cpu, cuda or cuda:N",
    r"^UCX_[A-Z0-9_]+$": "a name UCX_...",
    r"^https?://[^/\s]+$": "http://HOST:PORT or https://HOST:PORT",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}
_CROSS = "cross_check"


def cross_fault(key: str, value: object, allowed: str) -> PydanticCustomError:
    """The error of a key whose value does not fit others; its text is shown as it is."""
    context = {"key": key, "value": value, "allowed": allowed}
    return PydanticCustomError(_CROSS, "{key} is {value}; allowed: {allowed}", context)


def shown(key: str) -> str:
    """A key for people; one as long as a token may be one, in the wrong place."""
    return f"the key {key!r}" if len(key) < MIN_TOKEN_CHARS else f"a key of {len(key)} characters"


def fault_text(schema: type[Section], loc: tuple[int | str, ...], fault: Any) -> str:
    """A validation error of pydantic's at `loc` of this schema, as one sentence. Nothing secret is in it."""
    if fault["type"] == _CROSS:
        return str(fault["msg"])
    parts = [str(part) for part in loc if part != "[key]"]
    key = ".".join(parts)
    section, name = _section_of(schema, loc)
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        last = parts[-1] if len(parts[-1]) < MIN_TOKEN_CHARS else shown(parts[-1])
        return f"{'.'.join([*parts[:-1], last])}: no such key; allowed: {keys_of(section)}"
    if fault["type"] == "missing":
        return f"{key} is missing; needed: {_allowed(section, name)}"
    value = f"of type {type(fault['input']).__name__}" if loc[0] == "security" else repr(fault["input"])
    return f"{key} is {value}; allowed: {_allowed(section, name)}"


def _section_of(schema: type[Section], loc: tuple[int | str, ...]) -> tuple[type[Section], str]:
    """The schema class that a fault's location lies in, and the field's name there."""
    section = schema
    for depth, part in enumerate(loc):
        field = section.model_fields.get(str(part))
        inner = _without_null(field.annotation) if field is not None else None
        if depth + 1 == len(loc) or not (isinstance(inner, type) and issubclass(inner, Section)):
            return section, str(part)
        section = inner
    return section, ""


def _without_null(annotation: Any) -> Any:
    """X of `X | None`, else the annotation itself."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and typing.get_origin(annotation) is types.UnionType else annotation


def keys_of(section: type[Section]) -> str:
    """The keys that a section may have, for people."""
    return ", ".join(section.model_fields)


def _allowed(section: type[Section], name: str) -> str:
    field = section.model_fields[name]
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, constraints: list[Any]) -> str:
    """What a key of this type may hold, in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe(args[0], [item for info in args[1:] if isinstance(info, FieldInfo) for item in info.metadata])
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else _describe(arg, constraints) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args)
    if origin is dict:
        names = "NAME" if args[0] is str else "UCX_NAME"
        return f"a mapping of {names} to {'text (quote numbers)' if args[1] is str else _describe(args[1], [])}"
    if issubclass(annotation, Section):
        return f"a mapping with the keys {keys_of(annotation)}"
    pattern = next((item.pattern for item in constraints if getattr(item, "pattern", None)), None)
    if pattern is not None:
        return _PATTERNS[pattern]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[annotation]
    return words + "".join(
        f", {_BOUNDS[key]} {getattr(item, key)}" for item in constraints for key in _BOUNDS if hasattr(item, key)
    )
