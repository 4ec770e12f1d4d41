"""The coordinator's counts for a monitoring system, in Prometheus' names and types.

The dispatcher counts, a scrape reads.
A cause is a label, so each kind of failure is a series of its own: a request whose deadline passed never looks like one
whose worker died.
"""

import logging
from collections.abc import Iterator, Mapping
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from coordinator.effects import Ending
from coordinator.registry import LossReason
from loopline.errors import AddressInUse
from loopline.identity import Cause, Role
from loopline.wire.channel import join_address

_LOG = logging.getLogger(__name__)


class CoordinatorMetrics:
    """All counts of one coordinator, in a registry of its own. Every label value exists from the start, at zero."""

    def __init__(self, ignored: Mapping[Cause, int]) -> None:
        """`ignored`: what the tracker counts; read at a scrape."""
        self.registry = CollectorRegistry()
        self._requests = self._counter("loopline_requests", "Requests that ended, by how.", "ending", Ending)
        what = "Requests that were refused because the queue was full."
        self._refused = Counter("loopline_refused_requests", what, registry=self.registry)
        what = "Attempts at a request that workers could not finish, by why."
        self._failed_attempts = self._counter("loopline_failed_attempts", what, "cause", Cause)
        what = "Workers that were lost, by what showed it."
        self._lost_workers = self._counter("loopline_lost_workers", what, "reason", LossReason)
        what = "Workers that were moved from one role to the other, by the role that got one."
        self._rebalances = self._counter("loopline_rebalances", what, "to", Role)
        self.registry.register(_Ignored(ignored))

    def ended(self, ending: Ending) -> None:
        self._requests.labels(ending).inc()

    def refused(self) -> None:
        self._refused.inc()

    def attempt_failed(self, cause: Cause) -> None:
        self._failed_attempts.labels(cause).inc()

    def worker_lost(self, reason: LossReason) -> None:
        self._lost_workers.labels(reason).inc()

    def rebalanced(self, to: Role) -> None:
        self._rebalances.labels(to).inc()

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes at /metrics from a thread of its own; the port. Raises AddressInUse."""
        try:
            server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            text = f"telemetry.metrics_port is {port}: {host}:{port} cannot be listened on: {error.strerror}"
            raise AddressInUse(text) from None
        _LOG.info("metrics are at http://%s/metrics", join_address(host, server.server_port))
        return int(server.server_port)

    def _counter(self, name: str, what: str, label: str, values: type[StrEnum]) -> Counter:
        counter = Counter(name, what, [label], registry=self.registry)
        for value in values:
            counter.labels(value.value)
        return counter


class _Ignored(Collector):
    """Counts that somebody else keeps."""

    def __init__(self, counts: Mapping[Cause, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        what = "Workers' messages that changed nothing, by why."
        family = CounterMetricFamily("loopline_ignored_messages", what, labels=["cause"])
        for cause in Cause:
            family.add_metric([cause.value], self._counts.get(cause, 0))
        yield family
