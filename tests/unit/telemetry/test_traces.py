"""Spans over OTLP to a collector in this process, and what happens without packages or without a collector."""

import sys
import time

import pytest

from loopline.errors import ConfigError
from loopline.telemetry.otlp import OtlpTracing
from loopline.telemetry.traces import open_tracing
from tests.support.collector import Collector

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LIMIT_S = 20.0


def test_without_an_endpoint_there_is_nothing() -> None:
    assert open_tracing(None, "cluster", "prefill", "prefill-0") is None


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loopline.telemetry.otlp", None)
    with pytest.raises(ConfigError, match=r"telemetry.otlp_endpoint is 'http://h:1'.*pip install 'loopline\[otel\]'"):
        open_tracing("http://h:1", "cluster", "prefill", "prefill-0")


def test_spans_reach_the_collector_below_their_parents() -> None:
    collector = Collector()
    try:
        tracing = open_tracing(collector.endpoint, "mine", "prefill", "prefill-0")
        assert tracing is not None
        outer = tracing.start("outer", CLIENT, depth=4)
        inner = tracing.start("inner", outer.traceparent)
        inner.end("peer_lost", tokens=3)
        inner.end("twice")
        outer.end()
        tracing.close()
        first, second = sorted(collector.spans(), key=lambda span: span.start_ns)
    finally:
        collector.close()
    assert (first.name, first.service, first.instance) == ("outer", "loopline-prefill", "prefill-0")
    assert (first.trace_id, first.parent_id) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert (second.name, second.trace_id, second.parent_id) == ("inner", first.trace_id, first.span_id)
    assert (first.error, second.error) == ("", "peer_lost")
    assert first.attributes == {"loopline.depth": 4}
    assert second.attributes == {"loopline.tokens": 3}
    assert first.start_ns <= second.start_ns <= second.end_ns <= first.end_ns


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_parent_that_is_none_begins_a_trace(parent: str) -> None:
    collector = Collector()
    try:
        tracing = OtlpTracing(collector.endpoint, "mine", "coordinator", "coordinator")
        tracing.start("alone", parent).end()
        tracing.close()
        (span,) = collector.spans()
    finally:
        collector.close()
    assert span.parent_id == ""
    assert int(span.trace_id, 16)


def test_what_the_client_does_not_sample_is_not_sent_and_its_context_goes_on() -> None:
    collector = Collector()
    try:
        tracing = OtlpTracing(collector.endpoint, "mine", "coordinator", "coordinator")
        span = tracing.start("silent", CLIENT[:-2] + "00")
        assert span.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert span.traceparent.endswith("-00")
        span.end()
        tracing.close()
        assert collector.spans() == []
    finally:
        collector.close()


def test_without_a_collector_a_process_leaves_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.close()
    tracing = OtlpTracing(collector.endpoint, "mine", "coordinator", "coordinator")
    tracing.start("lost", "").end()
    began_s = time.monotonic()
    tracing.close()
    assert time.monotonic() - began_s < LIMIT_S
