"""What looks at a worker from outside: metrics always, traces where somebody takes them. It stands at the borders of
the role's core, which knows nothing of either.
"""

from collections.abc import Callable

from kvtransfer.commands import Command
from kvtransfer.transfer_thread import TransferThread
from loopline.engine.engine import Engine
from loopline.identity import Role, WorkerLoad
from loopline.messages import WorkerMessage
from loopline.settings import WorkerSettings
from loopline.telemetry.traces import Tracing
from loopline.worker.engine_thread import WorkerCore
from loopline.worker.metrics import Scrapes, WorkerMetrics
from loopline.worker.traces import WorkerTraces


class Observer:
    """Hands on everything that it is given, unchanged and in the caller's thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        transfer: TransferThread,
        read_load: Callable[[], WorkerLoad],
        tracing: Tracing | None,
        scrapes: Scrapes | None,
    ) -> None:
        """`scrapes` has these metrics from now on; None: nobody asks for them."""
        self._metrics = WorkerMetrics(Role(settings.role), engine, read_load, transfer.push_counts)
        self._traces = None if tracing is None else WorkerTraces(tracing)
        if scrapes is not None:
            scrapes.show(self._metrics.collect)
        self.metrics_address = "" if scrapes is None else scrapes.address
        """HOST:PORT of the metrics; "": there are none."""

    def sending(self, send: Callable[[WorkerMessage], None]) -> Callable[[WorkerMessage], None]:
        """What the core says to the coordinator."""
        counted = self._metrics.sending(send)
        return counted if self._traces is None else self._traces.sending(counted)

    def submitting(self, submit: Callable[[Command], None]) -> Callable[[Command], None]:
        """What the core has the transfer thread do."""
        return submit if self._traces is None else self._traces.submitting(submit)

    def entering(self, entered: Callable[[str], None]) -> Callable[[str], None]:
        """The states that handoffs enter."""
        return self._metrics.entering(entered)

    def core(self, core: WorkerCore) -> WorkerCore:
        """The core as the engine thread gets it."""
        return core if self._traces is None else self._traces.core(core)
