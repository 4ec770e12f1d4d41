"""An OpenTelemetry collector inside a test: takes spans over OTLP/gRPC and keeps them."""

import threading
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SeenSpan:
    """One span as a process exported it."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    error: str  # "": none
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens from the start; `endpoint` is its URL."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        seen = [
            _seen(span, resource.resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += seen
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[SeenSpan]:
        """What has come, of one trace or of all."""
        with self._lock:
            return [span for span in self._spans if trace_id in (None, span.trace_id)]

    def close(self) -> None:
        self._server.stop(None).wait()


def _seen(span: Any, resource: Any) -> SeenSpan:
    of = {pair.key: pair.value.string_value for pair in resource.attributes}
    attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
    return SeenSpan(
        name=span.name,
        service=of["service.name"],
        instance=of["service.instance.id"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == 2 else "",
        attributes=attributes,
    )
