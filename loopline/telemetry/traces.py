"""Traces of requests through all processes: what the rest of the project knows of OpenTelemetry.

A trace's context travels as W3C `traceparent`, one string, "" where there is none. Spans are made where a request
enters or leaves a part of its way, never for a token. The packages behind it are the extra `otel`; without
`telemetry.otlp_endpoint` nothing of them is imported.
"""

import importlib
import logging
from typing import Protocol

from loopline.errors import ConfigError

_LOG = logging.getLogger(__name__)
TRACEPARENT = "traceparent"
"""Of a call's metadata: the context that the client's trace goes on in."""
Value = str | int | float | bool


class Span(Protocol):
    """A part of a request's way that has begun. Any thread, one at a time."""

    @property
    def traceparent(self) -> str:
        """The context of what happens within it."""
        ...

    def end(self, error: str = "", **attributes: Value) -> None:
        """It is over, now; `error` says what went wrong. Again does nothing."""
        ...


class Tracing(Protocol):
    """Where spans of one process go. Any thread; nothing here waits for the collector, but `close`."""

    def start(self, name: str, parent: str, **attributes: Value) -> Span:
        """Begin a span now. A `parent` that is no traceparent makes it the first of a trace."""
        ...

    def close(self) -> None:
        """Send what has ended, within a limit of seconds."""
        ...


def open_tracing(endpoint: str | None, cluster: str, kind: str, process: str) -> Tracing | None:
    """Send spans to the OTLP collector at `endpoint`, in the name of this process: its `kind` is coordinator, prefill
    or decode. None without an endpoint. Raises ConfigError where the packages are missing."""
    if endpoint is None:
        return None
    try:
        otlp = importlib.import_module("loopline.telemetry.otlp")  # an extra of its own, that most do without
    except ImportError as error:
        raise ConfigError(
            f"telemetry.otlp_endpoint is {endpoint!r}, and traces need packages that are not here ({error}); "
            "pip install 'loopline[otel]', or leave the key out"
        ) from error
    return _Guarded(otlp.OtlpTracing(endpoint, cluster, kind, process))


class _Guarded:
    """Tracing whose failures are a line in the log: no request is worth less for a span."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def start(self, name: str, parent: str, **attributes: Value) -> Span:
        try:
            return _GuardedSpan(self._tracing.start(name, parent, **attributes))
        except Exception:
            _LOG.exception("a span %s could not begin", name)
            return _NoSpan()

    def close(self) -> None:
        try:
            self._tracing.close()
        except Exception:
            _LOG.exception("spans could not be sent")


class _GuardedSpan:
    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = span.traceparent

    def end(self, error: str = "", **attributes: Value) -> None:
        try:
            self._span.end(error, **attributes)
        except Exception:
            _LOG.exception("a span could not end")


class _NoSpan:
    traceparent = ""

    def end(self, error: str = "", **attributes: Value) -> None:
        pass
