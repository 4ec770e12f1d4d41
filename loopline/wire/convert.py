"""Records of `loopline.messages`, `fetch_messages` and `launcher_messages` <-> protobuf, both ways, for the traffic
inside a cluster.

Each record and its proto message have the same fields by name (tests/contract checks it), so one converter per record
class is compiled from the two descriptions at first use and kept. Special cases are data at the head of this file.
Decoding garbage raises ValueError that names the field; the caller ignores and counts such a message.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from loopline import messages
from loopline.wire._generated.loopline.v1 import cluster_pb2, loopline_pb2

_PROTO_NAMES = {
    "SamplingParams": "ResolvedParams",
    "Request": "EngineRequest",
    "CloseHandoff": "CloseHandoffRequest",
    "FetchPrefix": "FetchPrefixRequest",
}
_NOT_SENT = {("SamplingParams", "stop")}  # stop strings are watched where text is made
R = TypeVar("R")


def to_proto(record: Any) -> Any:
    """The protobuf message of a record."""
    target = _proto_class(type(record))()
    for field in _fields(type(record)):
        value = getattr(record, field.name)
        if value is not None:
            field.write(target, value)
    return target


def from_proto(kind: type[R], message: Message) -> R:
    """The record of class `kind` that a protobuf message holds; ValueError names the field that is wrong."""
    values = {}
    for field in _fields(kind):
        try:
            values[field.name] = field.read(message)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{field.name}: {error}") from error
    return kind(**values)


def wrap_worker_message(record: messages.WorkerMessage, coordinator_epoch: int) -> Any:
    """Put a worker's message into its stream's envelope."""
    return _wrap(cluster_pb2.WorkerMessage(coordinator_epoch=coordinator_epoch), record)


def unwrap_worker_message(envelope: Message) -> tuple[messages.WorkerMessage, int]:
    """The message in a worker's envelope, and the coordinator epoch that it speaks to. Raises ValueError."""
    return _unwrap(envelope, messages.WorkerMessage)


def wrap_coordinator_message(record: messages.CoordinatorMessage, coordinator_epoch: int) -> Any:
    """Put a coordinator's message into its stream's envelope."""
    return _wrap(cluster_pb2.CoordinatorMessage(coordinator_epoch=coordinator_epoch), record)


def unwrap_coordinator_message(envelope: Message) -> tuple[messages.CoordinatorMessage, int]:
    """The message in a coordinator's envelope, and that coordinator's epoch. Raises ValueError."""
    return _unwrap(envelope, messages.CoordinatorMessage)


def encode_push_notice(notice: messages.PushNotice) -> bytes:
    """The bytes that ride on a push."""
    return bytes(to_proto(notice).SerializeToString())


def decode_push_notice(data: bytes) -> messages.PushNotice:
    """Raises ValueError on anything that is not a whole notice."""
    message = cluster_pb2.PushNotice()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(f"not a push notice: {error}") from error
    if not message.key.request_id or not message.range.num_blocks:
        raise ValueError("not a push notice: empty key or range")
    return from_proto(messages.PushNotice, message)


def _wrap(envelope: Any, record: Any) -> Any:
    getattr(envelope, _snake(type(record).__name__)).CopyFrom(to_proto(record))
    return envelope


def _unwrap(envelope: Any, union: Any) -> tuple[Any, int]:
    name = envelope.WhichOneof("message")
    if name is None:
        raise ValueError("an envelope without a message that this version knows")
    kind = _kinds(union)[name]
    return from_proto(kind, getattr(envelope, name)), envelope.coordinator_epoch


@cache
def _kinds(union: Any) -> dict[str, type]:
    return {_snake(kind.__name__): kind for kind in typing.get_args(union)}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _proto_class(kind: type) -> Any:
    name = _PROTO_NAMES.get(kind.__name__, kind.__name__)
    module = cluster_pb2 if hasattr(cluster_pb2, name) else loopline_pb2
    if kind.__name__ == "BlockCounts":
        return loopline_pb2.Blocks
    return getattr(module, name)


@dataclasses.dataclass(frozen=True)
class _Field:
    """How one field of a record is written to and read from its proto message."""

    name: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


_COMPILED: dict[type, tuple[_Field, ...]] = {}


def _fields(kind: type) -> tuple[_Field, ...]:
    if kind not in _COMPILED:
        _COMPILED[kind] = _compile_fields(kind)
    return _COMPILED[kind]


def _compile_fields(kind: type) -> tuple[_Field, ...]:
    descriptor = _proto_class(kind).DESCRIPTOR
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if (kind.__name__, field.name) not in _NOT_SENT]
    return tuple(_compile(name, hints[name], descriptor.fields_by_name[name]) for name in names)


def _compile(name: str, hint: Any, proto: FieldDescriptor) -> _Field:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        optional = True
    origin = typing.get_origin(hint)
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _compile_many(name, hint, proto)
    encode, decode = _value_codec(hint)
    if proto.message_type is not None:
        return _message_field(name, encode, decode, optional)

    def write(target: Any, value: Any) -> None:
        setattr(target, name, encode(value))

    if optional and proto.has_presence:
        return _Field(name, write, lambda source: decode(getattr(source, name)) if source.HasField(name) else None)
    if optional:  # no presence: the empty string stands for None
        return _Field(name, write, lambda source: decode(value) if (value := getattr(source, name)) else None)
    return _Field(name, write, lambda source: decode(getattr(source, name)))


def _message_field(name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any], optional: bool) -> _Field:
    def write(target: Any, value: Any) -> None:
        getattr(target, name).CopyFrom(encode(value))

    def read(source: Any) -> Any:
        if source.HasField(name):
            return decode(getattr(source, name))
        if optional:
            return None
        raise ValueError("missing")

    return _Field(name, write, read)


def _compile_many(name: str, hint: Any, proto: FieldDescriptor) -> _Field:
    is_map = proto.message_type is not None and proto.message_type.GetOptions().map_entry
    if typing.get_origin(hint) is not tuple:  # Mapping[int, float]
        return _Field(
            name,
            lambda target, value: getattr(target, name).update(value),
            lambda source: dict(getattr(source, name)),
        )
    (item, _) = typing.get_args(hint)
    if is_map:  # tuple of (key, count) pairs
        return _Field(
            name,
            lambda target, value: getattr(target, name).update(dict(value)),
            lambda source: tuple(sorted(getattr(source, name).items())),
        )
    if typing.get_origin(item) is tuple:  # pairs in a fixed order <-> repeated {name, value}
        return _Field(
            name,
            lambda target, value: _extend_pairs(getattr(target, name), value),
            lambda source: tuple((pair.name, pair.value) for pair in getattr(source, name)),
        )
    encode, decode = _value_codec(item)
    return _Field(
        name,
        lambda target, value: getattr(target, name).extend(encode(entry) for entry in value),
        lambda source: tuple(decode(entry) for entry in getattr(source, name)),
    )


def _extend_pairs(target: Any, pairs: Iterable[tuple[str, str]]) -> None:
    for name, value in pairs:
        target.add(name=name, value=value)


def _value_codec(hint: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if dataclasses.is_dataclass(hint):
        return to_proto, lambda message: from_proto(typing.cast(type, hint), message)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return (lambda value: value.value), hint
    return _same, _same


def _same(value: Any) -> Any:
    return value
