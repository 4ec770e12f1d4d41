"""Traces over OTLP/gRPC: the one module that imports OpenTelemetry. `traces.open_tracing` loads it when it is asked to.

The SDK's own environment variables hold here too: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and others.
"""

import logging
import threading
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loopline.telemetry.traces import TRACEPARENT, Value

_DELAY_MS = 1_000.0
_CLOSE_S = 2.0
_PREFIX = "loopline."
_RETRIES = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # its log; what it gives up is an error there
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpSpan:
    """See `traces.Span`."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier.get(TRACEPARENT, "")

    def end(self, error: str = "", **attributes: Value) -> None:
        if not self._span.is_recording():  # ended, or not sampled
            return
        self._span.set_attributes(_named(attributes))
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class OtlpTracing:
    """See `traces.Tracing`. Spans leave in batches, from a thread of their own; while no collector takes them some are
    dropped, and the SDK logs so."""

    def __init__(self, endpoint: str, cluster: str, kind: str, process: str) -> None:
        """`endpoint` is http://HOST:PORT, or https:// for TLS."""
        resource = Resource.create(
            {"service.namespace": cluster, "service.name": f"loopline-{kind}", "service.instance.id": process}
        )
        logging.getLogger(_RETRIES).setLevel(logging.ERROR)  # each retry is a warning
        exporter = OTLPSpanExporter(endpoint, insecure=urlsplit(endpoint).scheme == "http")
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY_MS))
        self._tracer = self._provider.get_tracer("loopline")

    def start(self, name: str, parent: str, **attributes: Value) -> OtlpSpan:
        context = _PROPAGATOR.extract({TRACEPARENT: parent}, Context()) if parent else Context()
        return OtlpSpan(self._tracer.start_span(name, context, attributes=_named(attributes)))

    def close(self) -> None:
        last = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        last.start()
        last.join(_CLOSE_S)  # a collector that does not answer keeps no process from leaving


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {_PREFIX + name: value for name, value in attributes.items()}
