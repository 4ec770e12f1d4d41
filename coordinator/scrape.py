"""Where the coordinator's metrics are asked for, and those of all workers found. Scrapes run in threads of their own;
what only the event loop may look at, it looks at for them.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from prometheus_client.core import Metric

from coordinator.dispatcher import Dispatcher
from coordinator.metrics import collect_cluster
from coordinator.snapshot import ClusterSnapshot
from loopline.errors import AddressInUse
from loopline.identity import WorkerState
from loopline.telemetry.exposition import METRICS_PATH, TARGETS_PATH, MetricsServer, Target
from loopline.telemetry.metrics import registry_of
from loopline.wire.channel import join_address

_LOG = logging.getLogger(__name__)
_ANSWER_S = 5.0
T = TypeVar("T")


def serve_metrics(dispatcher: Dispatcher, host: str, port: int) -> MetricsServer:
    """Answer scrapes and discoveries from now on; the event loop must be running. Raises AddressInUse."""
    loop = asyncio.get_running_loop()

    def look() -> tuple[Metric, ...]:
        counts = {"queued": dispatcher.num_queued, "running": dispatcher.num_running}
        return tuple(collect_cluster(dispatcher.membership(), **counts, serving=dispatcher.readiness.serving))

    def targets() -> list[Target]:
        return ask_loop(loop, lambda: targets_of(dispatcher.membership()))

    registry = registry_of(dispatcher.metrics.collect, lambda: ask_loop(loop, look))
    try:
        server = MetricsServer(registry, host, port, targets)
    except OSError as error:
        text = f"telemetry.metrics_port is {port}: {host}:{port} cannot be listened on: {error.strerror}"
        raise AddressInUse(text) from None
    here = f"http://{join_address(host, server.port)}"
    _LOG.info("metrics are at %s%s, those of all processes are listed at %s%s", here, METRICS_PATH, here, TARGETS_PATH)
    return server


def targets_of(snapshot: ClusterSnapshot) -> list[Target]:
    """Living workers that serve metrics."""
    return [
        (view.metrics_address, {"process": view.peer.name, "kind": view.role.value})
        for view in snapshot.workers
        if view.metrics_address and view.state is not WorkerState.LOST
    ]


def ask_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Have the loop call a function; what it returns or raises. From another thread; TimeoutError after a while."""
    answer: Future[T] = Future()

    def carry_out() -> None:
        try:
            answer.set_result(call())
        except Exception as error:  # it is the asker's
            answer.set_exception(error)

    loop.call_soon_threadsafe(carry_out)
    return answer.result(_ANSWER_S)
