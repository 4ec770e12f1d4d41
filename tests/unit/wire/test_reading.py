"""Bytes that are no message, against a real server on this machine's loopback: its caller hears whose fault it is."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from loopline.security import OPEN_ACCESS, Access
from loopline.wire._generated.loopline.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    loopline_pb2,
    loopline_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
)
from loopline.wire.channel import bind, make_server, open_channel

LIMIT_S = 60.0
MODULES = (cluster_pb2, loopline_pb2, operations_pb2)
BAD_TEXTS = (b"\xff", b"a\xc3", b"\xed\xa0\x80")  # no UTF-8, cut short, a lone surrogate
_LENGTH = 2  # the wire type of strings and messages


def field_of(number: int, content: bytes) -> bytes:
    tag = number << 3 | _LENGTH
    head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    assert len(content) < 128
    return head + bytes([len(content)]) + content


def with_bad_text(message: Descriptor, text: bytes, above: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """The message once for each string field in it, however deep, with this text there; and the field's path."""
    for field in message.fields:
        path = ".".join((*above, field.name))
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path, field_of(field.number, text)
        elif field.message_type is not None and len(above) < 3:
            for inner, content in with_bad_text(field.message_type, text, (*above, field.name)):
                yield inner, field_of(field.number, content)


def unary_calls() -> list[tuple[str, Descriptor]]:
    services = [one for module in MODULES for one in module.DESCRIPTOR.services_by_name.values()]
    methods = [(service, method) for service in services for method in service.methods]
    return [
        (f"/{service.full_name}/{method.name}", method.input_type)
        for service, method in methods
        if not method.client_streaming
    ]


def bad_requests() -> list[tuple[str, str, bytes]]:
    """(method, what is wrong, bytes)"""
    found = []
    for method, message in unary_calls():
        found.append((method, "cut short", field_of(1, b"abc")[:-1]))
        for text in BAD_TEXTS:
            found += [(method, path, raw) for path, raw in with_bad_text(message, text)]
    return found


def servicers(called: list[str]) -> dict[Any, Any]:
    """Each service with methods that note that they were called, and how it is added to a server."""

    def noting(base: type) -> Any:
        async def note(self: Any, message: Any, context: Any) -> None:
            called.append(type(message).__name__)
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "heard")

        names = [name for name in dir(base) if not name.startswith("_")]
        return type(base.__name__, (base,), dict.fromkeys(names, note))()

    return {
        loopline_pb2_grpc.add_LooplineServicer_to_server: noting(loopline_pb2_grpc.LooplineServicer),
        cluster_pb2_grpc.add_ClusterServicer_to_server: noting(cluster_pb2_grpc.ClusterServicer),
        cluster_pb2_grpc.add_PeeringServicer_to_server: noting(cluster_pb2_grpc.PeeringServicer),
        operations_pb2_grpc.add_OperationsServicer_to_server: noting(operations_pb2_grpc.OperationsServicer),
    }


async def statuses(requests: list[tuple[str, bytes]], called: list[str], access: Access) -> list[grpc.aio.AioRpcError]:
    server = make_server(access)
    for add, servicer in servicers(called).items():
        add(servicer, server)
    port = bind(server, "127.0.0.1", 0, access)
    await server.start()
    ends = []
    async with asyncio.timeout(LIMIT_S), open_channel(f"127.0.0.1:{port}") as channel:
        for method, raw in requests:
            has_stream = method.endswith("/Generate")
            make: Any = channel.unary_stream if has_stream else channel.unary_unary
            call = make(method)(raw)
            with pytest.raises(grpc.aio.AioRpcError) as end:
                await (call.read() if has_stream else call)
            ends.append(end.value)
    await server.stop(0)
    return ends


def test_every_string_of_every_request_has_to_be_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bad, called = bad_requests(), list[str]()
    assert {path for method, path, _ in bad if method.endswith("Generate")} >= {"session", "label"}
    ends = asyncio.run(statuses([(method, raw) for method, _, raw in bad], called, OPEN_ACCESS))
    for (method, path, _), end in zip(bad, ends, strict=True):
        assert end.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{method} {path}: {end}"
        assert "not UTF-8" in str(end.details())
        assert dict(end.trailing_metadata())["loopline-error"] == "InvalidRequest"
    assert not called
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
    assert len([record for record in caplog.records if "cannot be parsed" in record.getMessage()]) == len(bad)


def test_what_can_be_parsed_gets_to_its_service() -> None:
    called: list[str] = []
    ends = asyncio.run(statuses([(method, b"") for method, _ in unary_calls()], called, OPEN_ACCESS))
    assert {end.code() for end in ends} == {grpc.StatusCode.ALREADY_EXISTS}
    assert len(called) == len(unary_calls())


def test_nothing_is_parsed_of_who_is_not_let_in() -> None:
    access, called = Access(cluster_tokens=("c" * 32,), client_tokens={"kim": "k" * 32}), list[str]()
    ends = asyncio.run(statuses([(method, raw) for method, _, raw in bad_requests()[:9]], called, access))
    assert {end.code() for end in ends} == {grpc.StatusCode.UNAUTHENTICATED} and not called
