"""What a process counts and measures for a monitoring system, and how a scrape reads it.

A count is kept in plain numbers by the one thread that counts; a scrape copies them in a thread of its own, so counting
takes no lock. `loopline.telemetry.catalogue` lists every metric there is.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

_INFINITE = "+Inf"
Labels = tuple[str, ...]
Values = Mapping[Labels, float]


class Kind(StrEnum):
    """A metric's type, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Definition:
    """One metric: its name as a scrape shows it, what it says, its labels."""

    name: str
    kind: Kind
    what: str
    labels: Labels = ()


class Histogram:
    """How often which size was seen. One thread observes; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ends of the buckets, ascending, in the metric's unit."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, observations up to it), the last one without an end."""
        found, total = [], 0
        for end, count in zip((*map(repr, self._bounds), _INFINITE), tuple(self._counts), strict=True):
            total += count
            found.append((end, float(total)))
        return found

    @property
    def sum(self) -> float:
        """Of all that was observed."""
        return self._sum

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)


def count_of(metric: Definition, values: Values) -> Metric:
    """A counter's or a gauge's samples."""
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is Kind.COUNTER:
        family = CounterMetricFamily(metric.name, metric.what, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.what, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def value_of(metric: Definition, value: float) -> Metric:
    """The sample of a metric without labels."""
    return count_of(metric, {(): value})


def counts_by(metric: Definition, names: Iterable[str], counts: Mapping[Any, float]) -> Metric:
    """Samples of a metric with one label, one for each of its values `names`, zero where nothing was counted. `counts`
    has the names as they are or as text."""
    return count_of(metric, {(str(name),): counts.get(name, 0) for name in names})


def histogram_of(metric: Definition, histograms: Mapping[Labels, Histogram]) -> Metric:
    """A histogram's samples."""
    family = HistogramMetricFamily(metric.name, metric.what, labels=metric.labels)
    for labels, histogram in histograms.items():
        family.add_metric(labels, histogram.buckets(), histogram.sum)
    return family


class FromCall(Collector):
    """Samples that a function makes at every scrape, in the scrape's thread."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def registry_of(*collects: Callable[[], Iterable[Metric]]) -> CollectorRegistry:
    """A registry with these samples and nothing else."""
    registry = CollectorRegistry(auto_describe=False)
    for collect in collects:
        registry.register(FromCall(collect))
    return registry
