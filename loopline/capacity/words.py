"""What is wrong in a profile's file or in a report, in words: one sentence for a validation error of pydantic's."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

_KINDS = {int: "a whole number", float: "a number", str: "text", type(None): "null", bool: "true or false"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
_MOST_CHARS = 60


def fault_text(schema: type[BaseModel], error: ValidationError, more_keys: Sequence[str] = ()) -> str:
    """The first fault of a mapping that was to be a `schema`: its key, its value and what is allowed. `more_keys` may
    be beside those of the schema."""
    fault = error.errors(include_url=False, include_context=False)[0]
    loc = [part for part in fault["loc"] if part != "[key]"]
    key = ".".join(shown(part, is_key=True) for part in loc)
    if fault["type"] == "value_error":
        return f"{key}.{fault['msg'].removeprefix('Value error, ')}"
    if fault["type"] == "extra_forbidden":
        inner = _at(schema, loc[:-1])
        more = more_keys if len(loc) == 1 else ()
        return f"{key}: no such key; allowed: {', '.join([*_keys(inner), *more])}"
    if fault["type"] == "missing":
        fields = _at(schema, loc[:-1]).model_fields
        return f"{key} is missing; needed: {', '.join(name for name, field in fields.items() if field.is_required())}"
    if not loc or fault["type"] == "invalid_key" or "[key]" in fault["loc"]:
        return f"{key or 'a key'} is no key; allowed: {', '.join([*_keys(schema), *more_keys])}"
    return f"{key} is {shown(fault['input'])}; allowed: {_allowed(schema, loc)}"


def shown(value: object, *, is_key: bool = False) -> str:
    """A value of the file, cut where it is long."""
    try:
        text = str(value) if is_key else repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or nested too deeply
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _keys(annotation: Any) -> list[str]:
    return list(annotation.model_fields) if _is_schema(annotation) else []


def _is_schema(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _at(schema: type[BaseModel], loc: Sequence[object]) -> Any:
    """The type at a location."""
    return _with_bounds(schema, loc)[0]


def _with_bounds(schema: type[BaseModel], loc: Sequence[object]) -> tuple[Any, list[Any]]:
    """The type at a location, and its constraints."""
    found: Any = schema
    bounds: list[Any] = []
    for part in loc:
        if _is_schema(found):
            field = found.model_fields[str(part)]
            found, bounds = _plain(field.annotation, list(field.metadata))
        else:  # a list's or a mapping's
            found, bounds = _plain(typing.get_args(found)[-1], [])
    return found, bounds


def _plain(annotation: Any, bounds: list[Any]) -> tuple[Any, list[Any]]:
    """Without `Annotated`, and X of `X | None` where X is no plain value."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *rest = typing.get_args(annotation)
        return _plain(inner, [*bounds, *(one for part in rest for one in getattr(part, "metadata", [part]))])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        kinds = [_plain(kind, []) for kind in typing.get_args(annotation)]
        complex_ones = [kind for kind, _ in kinds if kind not in _KINDS]
        if len(complex_ones) == 1:
            return complex_ones[0], bounds
        own = [one for _, inner in kinds for one in inner]
        return tuple(kind for kind, _ in kinds), [*bounds, *own]
    return annotation, bounds


def _allowed(schema: type[BaseModel], loc: Sequence[object]) -> str:
    """What may stand at a location, in words."""
    found, bounds = _with_bounds(schema, loc)
    limits = [f"{word} {_number(getattr(one, name))}" for one in bounds for name, word in _BOUNDS if hasattr(one, name)]
    return ", ".join([_named(found), *limits])


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _named(found: Any) -> str:
    if isinstance(found, tuple):
        return " or ".join(_KINDS[kind] for kind in found)
    if _is_schema(found):
        return f"a mapping with the keys {', '.join(found.model_fields)}"
    if typing.get_origin(found) is typing.Literal:
        return " or ".join(str(one) for one in typing.get_args(found))
    if typing.get_origin(found) in (Mapping, dict):
        return f"a mapping of names to values that are each {_named(_plain(typing.get_args(found)[-1], [])[0])}"
    if typing.get_origin(found) in (tuple, list):
        return f"a list of values that are each {_named(_plain(typing.get_args(found)[0], [])[0])}"
    return _KINDS[found]
