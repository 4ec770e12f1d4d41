"""The coordinator's counts for a monitoring system. The dispatcher counts, on the event loop; a scrape reads.

A cause is a label, so each kind of failure is a series of its own: a request whose deadline passed never looks like one
whose worker died. Every label value exists from the start, at zero.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

from prometheus_client.core import Metric

from coordinator.effects import Ending, Outcome
from coordinator.registry import LossReason
from coordinator.snapshot import ClusterSnapshot
from loopline.clock import Clock
from loopline.identity import Cause, Role, WorkerState
from loopline.request import PrefixSource
from loopline.telemetry import catalogue
from loopline.telemetry.metrics import Histogram, count_of, counts_by, histogram_of, value_of

_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_ITL_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1800.0)
_QUEUE_S = (0.001, 0.005, *_REQUEST_S)


class CoordinatorMetrics:
    """All counts of one coordinator. Requests that nobody `admitted` here, such as the warm-up's, are not counted."""

    def __init__(self, clock: Clock, ignored: Mapping[Cause, int]) -> None:
        """`ignored`: what the tracker counts; read at a scrape."""
        self._clock = clock
        self._ignored = ignored
        self._endings: Counter[str] = Counter()
        self._refused = 0
        self._failed_attempts: Counter[str] = Counter()
        self._lost_workers: Counter[str] = Counter()
        self._rebalances: Counter[str] = Counter()
        self._ttft, self._itl = Histogram(_TTFT_S), Histogram(_ITL_S)
        self._queued, self._whole = Histogram(_QUEUE_S), Histogram(_REQUEST_S)
        self._sources: Counter[str] = Counter()
        self._prompt_tokens = self._cached_tokens = self._new_tokens = 0
        self._arrived_s: dict[str, float] = {}
        self._last_token_s: dict[str, float] = {}

    def admitted(self, request_id: str) -> None:
        """A client's request was let in."""
        self._arrived_s[request_id] = self._clock.now_s()

    def token(self, request_id: str) -> None:
        """It has a new token."""
        arrived_s = self._arrived_s.get(request_id)
        if arrived_s is None:
            return
        now_s, last_s = self._clock.now_s(), self._last_token_s.get(request_id)
        if last_s is None:
            self._ttft.observe(now_s - arrived_s)
        else:
            self._itl.observe(now_s - last_s)
        self._last_token_s[request_id] = now_s
        self._new_tokens += 1

    def ended(self, request_id: str, outcome: Outcome) -> None:
        if self._arrived_s.pop(request_id, None) is None:
            return
        self._last_token_s.pop(request_id, None)
        self._endings[outcome.ending] += 1
        self._queued.observe(outcome.timing.queued_s)
        self._whole.observe(outcome.timing.total_s)
        if outcome.route.prefix_source:
            self._sources[outcome.route.prefix_source] += 1
        self._prompt_tokens += outcome.usage.prompt_tokens
        self._cached_tokens += outcome.usage.cached_tokens

    def refused(self) -> None:
        """One was not let in: too many waited."""
        self._refused += 1

    def attempt_failed(self, cause: Cause) -> None:
        self._failed_attempts[cause] += 1

    def worker_lost(self, reason: LossReason) -> None:
        self._lost_workers[reason] += 1

    def rebalanced(self, to: Role) -> None:
        self._rebalances[to] += 1

    def collect(self) -> Iterator[Metric]:
        """Everything that was counted; any thread."""
        yield counts_by(catalogue.REQUESTS, Ending, self._endings)
        yield value_of(catalogue.REFUSED, self._refused)
        yield counts_by(catalogue.FAILED_ATTEMPTS, Cause, self._failed_attempts)
        yield counts_by(catalogue.LOST_WORKERS, LossReason, self._lost_workers)
        yield counts_by(catalogue.REBALANCES, (Role.PREFILL, Role.DECODE), self._rebalances)
        yield counts_by(catalogue.IGNORED, Cause, self._ignored)
        yield histogram_of(catalogue.TTFT, {(): self._ttft})
        yield histogram_of(catalogue.ITL, {(): self._itl})
        yield histogram_of(catalogue.QUEUE_TIME, {(): self._queued})
        yield histogram_of(catalogue.E2E, {(): self._whole})
        yield counts_by(catalogue.PREFIX_SOURCES, PrefixSource, self._sources)
        yield value_of(catalogue.PROMPT_TOKENS, self._prompt_tokens)
        yield value_of(catalogue.CACHED_TOKENS, self._cached_tokens)
        yield value_of(catalogue.GENERATION_TOKENS, self._new_tokens)


def collect_cluster(snapshot: ClusterSnapshot, *, queued: int, running: int, serving: bool) -> Iterator[Metric]:
    """The cluster as it is now."""
    states = Counter((view.role.value, view.state.value) for view in snapshot.workers)
    every = product((role.value for role in Role), (state.value for state in WorkerState))
    yield count_of(catalogue.WORKERS, {pair: states[pair] for pair in every})
    yield value_of(catalogue.WAITING, queued)
    yield value_of(catalogue.RUNNING, running)
    yield value_of(catalogue.SERVING, serving)
