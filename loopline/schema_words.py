"""What may stand at a place of a pydantic schema, and what is wrong there: one line for people.

A key that should not be there, and a value, may be a token in the wrong place: what looks like one is not shown, nor is
any value below the keys that are named secret.
"""

import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from loopline.security import MIN_TOKEN_CHARS

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_CROSS, _INNER = "cross_check", "inner_check"
_MOST_CHARS = 120
_LIKE_A_TOKEN = re.compile(rf"(?!UCX_)[A-Za-z0-9_+/=~-]{{{MIN_TOKEN_CHARS},}}")


@dataclass(frozen=True)
class Words:
    """Beside a type, in `Annotated`: what is allowed there, where its kind and bounds do not say it."""

    text: str


@dataclass(frozen=True)
class _Place:
    """Where a fault is: its key as it is shown, and the type there with what constrains it."""

    key: str
    annotation: Any
    constraints: Sequence[Any] = ()


def cross_error(text: str) -> PydanticCustomError:
    """An error that is shown as this text."""
    return PydanticCustomError(_CROSS, "{text}", {"text": text})


def cross_fault(key: str, value: object, allowed: str) -> PydanticCustomError:
    """The error of a key whose value does not fit others. `key` is the whole of it; text is shown without quotes."""
    plain = value if isinstance(value, str) and value.isprintable() else shown(value)
    return cross_error(f"{key} is {plain}; allowed: {allowed}")


def inner_fault(key: str, value: object, allowed: str) -> PydanticCustomError:
    """The same, of a key that lies in the mapping which is validated."""
    return PydanticCustomError(_INNER, "{text}", {"text": f"{key} is {shown(value)}; allowed: {allowed}"})


def keys_of(schema: type[BaseModel]) -> str:
    """The keys that a mapping of this schema may have."""
    return ", ".join(schema.model_fields)


def fault_text(
    schema: type[BaseModel], fault: Any, *, more_keys: Sequence[str] = (), secret: Collection[str] = ()
) -> str:
    """One of a validation error's `errors()`: key, value, and what is allowed.

    `more_keys`: allowed beside those of `schema`. `secret`: keys of `schema` below which no value is shown.
    """
    kind, loc = fault["type"], fault["loc"]
    if kind == _CROSS:
        return str(fault["msg"])
    is_no_key = kind in ("extra_forbidden", "invalid_key")
    place = _place(schema, loc[:-1] if is_no_key else loc)
    if kind == _INNER:
        return f"{place.key}.{fault['msg']}" if loc else str(fault["msg"])
    if is_no_key:
        allowed = [keys_of(_without_null(place.annotation)), *(more_keys if len(loc) == 1 else ())]
        above = f"{place.key}." if place.key else ""
        return f"{above}{key_text(str(loc[-1]))}: no such key; allowed: {', '.join(allowed)}"
    words = _words(place.annotation, place.constraints)
    if kind == "missing":
        return f"{place.key} is missing; needed: {words}"
    if words.startswith(_KINDS[str]) and isinstance(fault["input"], int | float):
        words = words.replace(_KINDS[str], "text (quote numbers)", 1)
    is_secret = bool(loc) and loc[0] in secret
    value = f"of type {type(fault['input']).__name__}" if is_secret else shown(fault["input"])
    return f"{place.key} is {value}; allowed: {words}"


def key_text(key: str) -> str:
    """A key for people."""
    if _LIKE_A_TOKEN.fullmatch(key):
        return f"a key of {len(key)} characters"
    return _shortened(key if key.isprintable() else repr(key))


def shown(value: object) -> str:
    """A value for people."""
    if isinstance(value, str) and _LIKE_A_TOKEN.fullmatch(value):
        return f"text of {len(value)} characters"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or nested too deeply
        return f"a value of type {type(value).__name__}"
    if isinstance(value, Mapping | list) and len(text) >= MIN_TOKEN_CHARS:
        return f"a mapping of {len(value)} keys" if isinstance(value, Mapping) else f"a list of {len(value)} values"
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _place(schema: type[BaseModel], loc: Sequence[Any]) -> _Place:
    """Without what pydantic adds to a location: the mark of a mapping's key, and the kinds of a union."""
    found, constraints = schema, []
    parts: list[str] = []
    for index, part in enumerate(loc):
        inner = _without_null(found)
        if _is_schema(inner):
            field = inner.model_fields[str(part)]
            parts.append(str(part))
            found, constraints = field.annotation, list(field.metadata)
        elif typing.get_origin(inner) is list:
            parts.append(str(part))
            found, constraints = typing.get_args(inner)[0], []
        elif typing.get_origin(inner) in (dict, Mapping):
            parts.append(key_text(str(part)))
            if loc[index + 1 :] == ("[key]",):
                break
            found, constraints = typing.get_args(inner)[1], []
        else:
            break
    return _Place(".".join(parts), found, constraints)


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
        kinds = sorted(args, key=lambda kind: _is_schema(_without_null(kind)))  # the one with a list of keys last
        return " or ".join(_words(kind, () if kind is type(None) else constraints) for kind in kinds)
    if origin is Literal:
        return " or ".join(str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args)
    if origin in (dict, Mapping):
        name = "NAME" if args[0] is str else _words(args[0], ())
        return f"a mapping of {name} to {'text (quote numbers)' if args[1] is str else _words(args[1], ())}"
    if origin is list:
        return f"a list of values, each {_words(args[0], ())}"
    if _is_schema(annotation):
        return f"a mapping with the keys {keys_of(annotation)}"
    bounds = [
        f"{_BOUNDS[key]} {_number(getattr(one, key))}" for one in constraints for key in _BOUNDS if hasattr(one, key)
    ]
    if any(getattr(one, "min_length", 0) for one in constraints):
        bounds.append("not empty")
    return ", ".join([_KINDS[annotation], *bounds])


def _number(bound: float) -> str:
    is_whole = isinstance(bound, int) or (bound.is_integer() and bound < 1e15)
    return str(int(bound)) if is_whole else f"{bound:g}"
