"""A worker's counts for a monitoring system: what it says and computes is counted where it happens, its load is the one
that its engine thread published last. A scrape reads both in a thread of its own, so the engine waits for nobody.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric

from kvtransfer.handoff import ReceiveState, SendState
from kvtransfer.push_counts import PushCounts, PushResult
from loopline.engine.engine import Engine
from loopline.engine.step_counts import TokenPhase
from loopline.errors import AddressInUse
from loopline.fetch_messages import FetchState
from loopline.identity import BudgetCounts, Cause, Role, WorkerLoad
from loopline.messages import Granted, LocalPrefillStarted, Prefilled, RequestFailed, Reserved, WorkerMessage
from loopline.telemetry import catalogue
from loopline.telemetry.exposition import METRICS_PATH, MetricsServer
from loopline.telemetry.metrics import FromCall, count_of, counts_by, histogram_of, registry_of, value_of
from loopline.wire.channel import join_address

logger = logging.getLogger(__name__)
_BLOCK_STATES = ("free", "held", "cached", "quarantined")
_LASTING = {
    Role.PREFILL: (
        *(SendState.OPEN, SendState.COMMITTED, SendState.CLOSING, SendState.FAILED),
        *(FetchState.FETCHING, ReceiveState.QUARANTINED),
    ),
    Role.DECODE: (
        *(ReceiveState.RESERVED, ReceiveState.BOUND, ReceiveState.COMMITTED, ReceiveState.QUARANTINED),
        *(FetchState.LENDING, SendState.CLOSING, SendState.FAILED),
    ),
    Role.UNIFIED: (ReceiveState.RESERVED,),
}
"""States that a handoff or a fetch stays in for a while."""
_STATES: dict[Role, tuple[str, ...]] = {
    Role.PREFILL: (*SendState, FetchState.FETCHING, FetchState.FETCHED),
    Role.DECODE: (*ReceiveState, FetchState.LENDING),
    Role.UNIFIED: (ReceiveState.RESERVED, ReceiveState.LOCAL, ReceiveState.CLOSED),
}


class Scrapes:
    """Answers scrapes until the process ends; with nothing while the model is loaded."""

    def __init__(self, host: str, port: int, advertise: str) -> None:
        """Listens on `host`; `advertise`: where others reach that. Raises AddressInUse."""
        self._registry = registry_of()
        try:
            server = MetricsServer(self._registry, host, port)
        except OSError as error:
            raise AddressInUse(
                f"--metrics-port is {port}: {host}:{port} cannot be listened on: {error.strerror}"
            ) from None
        self.address = join_address(advertise, server.port)
        logger.info("metrics are at http://%s%s", self.address, METRICS_PATH)

    def show(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Answer with these samples from now on."""
        self._registry.register(FromCall(collect))


class WorkerMetrics:
    """All counts of one worker process, over all its lives."""

    def __init__(
        self,
        role: Role,
        engine: Engine,
        read_load: Callable[[], WorkerLoad],
        read_pushes: Callable[[], PushCounts],
    ) -> None:
        """`read_load` and `read_pushes` are called at a scrape, in its thread."""
        self._role = role
        self._steps = engine.counts
        self._scheduler = engine.scheduler
        self._read_load = read_load
        self._read_pushes = read_pushes
        self._entered: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._fetched_bytes = 0

    def sending(self, send: Callable[[WorkerMessage], None]) -> Callable[[WorkerMessage], None]:
        """`send`, with what it is given counted."""

        def count_and_send(message: WorkerMessage) -> None:
            if isinstance(message, RequestFailed):
                self._given_up[message.cause] += 1
            elif isinstance(message, Reserved | Granted | LocalPrefillStarted) and message.cause is not None:
                self._refusals[message.cause] += 1
            elif isinstance(message, Prefilled):
                self._fetched_bytes += message.stats.fetched_bytes
            send(message)

        return count_and_send

    def entering(self, entered: Callable[[str], None]) -> Callable[[str], None]:
        """`entered`, with the states of handoffs that it hears of counted."""

        def count_and_tell(state: str) -> None:
            self._entered[state] += 1
            entered(state)

        return count_and_tell

    def collect(self) -> Iterator[Metric]:
        """Everything that a scrape shows; any thread."""
        load = self._read_load()
        yield from self._collect_steps()
        yield value_of(catalogue.QUEUED_TOKEN_LOOPS, load.token_loops)
        yield value_of(catalogue.WAITING, load.waiting)
        yield value_of(catalogue.RUNNING, load.running)
        yield count_of(catalogue.BLOCKS, {(state,): getattr(load.blocks, state) for state in _BLOCK_STATES})
        yield value_of(catalogue.PROMISED_BLOCKS, load.promised_blocks)
        yield counts_by(catalogue.HANDOFFS, _LASTING[self._role], dict(load.handoffs))
        yield counts_by(catalogue.HANDOFF_STATES, _STATES[self._role], self._entered)
        yield counts_by(catalogue.GIVEN_UP, Cause, self._given_up)
        yield counts_by(catalogue.REFUSALS, Cause, self._refusals)
        yield counts_by(catalogue.IGNORED, Cause, dict(load.ignored))
        if load.budget is not None:
            yield from _collect_pushes(self._read_pushes(), load.budget)
            yield value_of(catalogue.FETCHED_BYTES, self._fetched_bytes)

    def _collect_steps(self) -> Iterator[Metric]:
        steps = self._steps
        yield counts_by(catalogue.TOKEN_LOOPS, TokenPhase, steps.token_loops)
        yield counts_by(catalogue.COMPUTED_TOKENS, TokenPhase, steps.tokens)
        yield histogram_of(catalogue.STEP_SECONDS, {(rows.value,): one for rows, one in steps.seconds.items()})
        yield value_of(catalogue.FAILED_STEPS, steps.failed_steps)
        yield value_of(catalogue.SLOW_STEPS, self._scheduler.share.num_passed)
        yield value_of(catalogue.LEAST_SHARES, self._scheduler.share.num_least)
        yield value_of(catalogue.PREEMPTIONS, self._scheduler.num_preempted)
        yield value_of(catalogue.PREFIX_QUERIES, self._scheduler.prefix_counts.queries)
        yield value_of(catalogue.PREFIX_HITS, self._scheduler.prefix_counts.hits)


def _collect_pushes(pushes: PushCounts, budget: BudgetCounts) -> Iterator[Metric]:
    yield counts_by(catalogue.PUSHES, PushResult, pushes.results)
    yield value_of(catalogue.PUSHED_BYTES, pushes.num_bytes)
    yield histogram_of(catalogue.PUSH_SECONDS, {(): pushes.seconds})
    yield value_of(catalogue.IN_FLIGHT_BYTES, budget.in_flight_bytes)
    yield value_of(catalogue.LIMIT_BYTES, budget.limit_bytes)
    yield value_of(catalogue.PUSHES_WAITING, budget.num_waiting)
    yield value_of(catalogue.PUSH_WAIT, budget.waited_s)
