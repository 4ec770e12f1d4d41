"""What may stand at a place of a pydantic schema, and what is wrong there, in words for people."""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_CROSS = "cross_check"
_MOST_CHARS = 60


@dataclass(frozen=True)
class Words:
    """Beside a type, in `Annotated`: what is allowed there, where its kind and bounds do not say it."""

    text: str


def cross_fault(key: str, value: object, allowed: str) -> PydanticCustomError:
    """The error of a key whose value does not fit others; `key` is the whole of it, and the text is shown as it is."""
    return cross_error("{key} is {value}; allowed: {allowed}", key=key, value=value, allowed=allowed)


def cross_error(template: str, **context: object) -> PydanticCustomError:
    """An error whose text is the template filled, as it is."""
    return PydanticCustomError(_CROSS, template, context)


def keys_of(schema: type[BaseModel]) -> str:
    """The keys that a mapping of this schema may have."""
    return ", ".join(schema.model_fields)


def fault_text(
    schema: type[BaseModel],
    fault: Any,
    *,
    key_text: Callable[[str], str] = str,
    value_text: Callable[[object], str] = repr,
    more_keys: Sequence[str] = (),
) -> str:
    """One of a validation error's `errors()` as one sentence: key, value, and what is allowed.

    `key_text`, `value_text`: how a key that should not be there, and a value, are shown. `more_keys`: allowed beside
    those of `schema`.
    """
    if fault["type"] == _CROSS:
        return str(fault["msg"])
    loc = [shortened(str(part)) for part in _plain(schema, fault["loc"])]
    key = ".".join(loc)
    if fault["type"] == "value_error":  # of a check over several keys of one mapping
        return f"{key}.{fault['msg'].removeprefix('Value error, ')}"
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        allowed = [keys_of(_without_null(_at(schema, loc[:-1])[0])), *(more_keys if len(loc) == 1 else ())]
        return f"{'.'.join([*loc[:-1], key_text(loc[-1])])}: no such key; allowed: {', '.join(allowed)}"
    is_key = "[key]" in fault["loc"]
    words = _words(*_at(schema, loc[:-1] if is_key else loc))
    if fault["type"] == "missing":
        return f"{key} is missing; needed: {words}"
    if words == _KINDS[str] and not isinstance(fault["input"], str | None):
        words += " (quote numbers)"
    return f"{key} is {value_text(fault['input'])}; allowed: {words}"


def shortened(text: str) -> str:
    """Cut where it is long."""
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _plain(schema: type[BaseModel], loc: Sequence[Any]) -> list[Any]:
    """A location without what pydantic adds: marks of keys, and names of the kinds of a union."""
    plain = [part for part in loc if part != "[key]"]
    ends = (n for n in range(1, len(plain)) if _is_union(_without_null(_at(schema, plain[:n])[0])))
    return plain[: next(ends, len(plain))]


def _at(schema: type[BaseModel], loc: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The type at a location, and what constrains it."""
    found: Any = schema
    constraints: list[Any] = []
    for part in loc:
        inner = _without_null(found)
        if _is_schema(inner):
            field = inner.model_fields[str(part)]
            found, constraints = field.annotation, list(field.metadata)
        else:  # of a list or a mapping
            found, constraints = typing.get_args(inner)[-1], []
    return found, constraints


def _without_null(annotation: Any) -> Any:
    """X of `X | None` and of `Annotated[X, ...]`, else the annotation itself."""
    if typing.get_origin(annotation) is Annotated:
        return _without_null(typing.get_args(annotation)[0])
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return _without_null(kinds[0]) if len(kinds) == 1 and _is_union(annotation) else annotation


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (types.UnionType, typing.Union)


def _is_schema(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _words(annotation: Any, constraints: Sequence[Any]) -> str:
    """What a value of this type may be."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _words(args[0], [one for part in args[1:] for one in getattr(part, "metadata", [part])])
    own = next((one.text for one in constraints if isinstance(one, Words)), None)
    if own is not None:
        return own
    if _is_union(annotation):
        return " or ".join(_words(arg, () if arg is type(None) else constraints) for arg in args)
    if origin is Literal:
        return " or ".join(str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args)
    if origin in (dict, Mapping):
        name = "NAME" if args[0] is str else _words(args[0], ())
        return f"a mapping of {name} to {'text (quote numbers)' if args[1] is str else _words(args[1], ())}"
    if origin in (list, tuple):
        return f"a list of values, each {_words(args[0], ())}"
    if _is_schema(annotation):
        return f"a mapping with the keys {keys_of(annotation)}"
    bounds = [f"{_BOUNDS[key]} {getattr(one, key)}" for one in constraints for key in _BOUNDS if hasattr(one, key)]
    return ", ".join([_KINDS[annotation], *bounds])
