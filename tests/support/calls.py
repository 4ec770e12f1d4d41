"""Every call of every service that Loopline has, read from the protobuf descriptors, to be made by whoever has no
business to."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

import loopline.wire._generated.loopline.v1 as generated
from loopline.wire.guard import token_metadata

LIMIT_S = 15.0


@dataclass(frozen=True)
class Call:
    """One method of a service, by its path /SERVICE/METHOD."""

    service: str
    path: str
    request_streaming: bool
    response_streaming: bool

    def status_on(
        self, channel: grpc.Channel, *, token: str | None = None, request: bytes = b""
    ) -> grpc.RpcError | None:
        """How it ends with one message of these bytes; None if it is answered, or let in for a moment."""
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        method: Any = kinds[self.request_streaming, self.response_streaming](self.path)
        metadata = None if token is None else token_metadata(token)
        try:
            answer = method(iter([request]) if self.request_streaming else request, timeout=LIMIT_S, metadata=metadata)
            if self.response_streaming:
                next(answer, None)
                answer.cancel()
        except grpc.RpcError as error:
            return error
        return None


def all_calls() -> Iterator[Call]:
    for module in pkgutil.iter_modules(generated.__path__):
        if not module.name.endswith("_pb2"):
            continue
        descriptor = importlib.import_module(f"{generated.__name__}.{module.name}").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                yield Call(
                    service.full_name,
                    f"/{service.full_name}/{method.name}",
                    method.client_streaming,
                    method.server_streaming,
                )


PUBLIC_CALLS = [call for call in all_calls() if call.service == "loopline.v1.Loopline"]
CONTROL_CALLS = [call for call in all_calls() if call.service != "loopline.v1.Loopline"]
HEALTH = Call("grpc.health.v1.Health", "/grpc.health.v1.Health/Check", False, False)
REFLECTION = Call(
    "grpc.reflection.v1alpha.ServerReflection",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    True,
    True,
)
