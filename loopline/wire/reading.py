"""Messages that cannot be parsed: a server says so with INVALID_ARGUMENT, where gRPC would log a traceback of ours and
answer UNKNOWN.

That is so for calls with one request. What comes in a stream is parsed while its service reads, and fails there.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

logger = logging.getLogger(__name__)
_TEXT = "the request cannot be parsed: a string in it is not UTF-8, or the bytes are no protobuf message"
Handler = Any  # grpc.RpcMethodHandler, whose attributes the stubs lack


@dataclass(frozen=True)
class _Unreadable:
    """In the place of a message."""

    detail: str


class Reader(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # at run time it takes none
    """Answers in place of the service where a request cannot be parsed."""

    def __init__(self, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """`metadata`: what trails such an answer."""
        self._metadata = metadata

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        return _checked(handler, str(details.method), self._metadata)


def _checked(handler: Handler, method: str, metadata: tuple[tuple[str, str], ...]) -> Handler:
    """The same, asked only for what could be parsed."""
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

    def read(raw: bytes) -> Any:
        try:
            return handler.request_deserializer(raw)
        except DecodeError as error:
            return _Unreadable(str(error))

    async def answer(message: Any, context: Any) -> Any:
        if isinstance(message, _Unreadable):
            logger.info("%s: %s: %s", method, _TEXT, message.detail)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{_TEXT} ({message.detail})", metadata)
        given = behaviour(message, context)
        if not inspect.isasyncgen(given):
            return await given
        async for part in given:
            await context.write(part)
        return None

    make: Any = (
        grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(answer, request_deserializer=read, response_serializer=handler.response_serializer)
