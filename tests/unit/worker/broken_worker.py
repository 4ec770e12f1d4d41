"""`python -m tests.unit.worker.broken_worker hang|fail|quarantine LIFE_FD`: a worker process without a coordinator
whose engine thread hangs or fails as soon as it runs, or whose blocks are in quarantine for good. It says so on
standard output first."""

import sys
import threading

from loopline.engine.engine import Engine
from loopline.identity import HandoffKey
from loopline.process import leave
from loopline.sched.plan import StepOutcome
from loopline.settings import EngineSettings, WorkerSettings
from loopline.telemetry.logs import configure_logging
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.worker.events import BeginDrain
from loopline.worker.runtime import RoleParts, WorkerContext, run_worker
from prefill_worker.policy import PrefillPolicy
from tests.support.golden import GOLDEN


class BrokenCore:
    """A core whose first tick never returns or quarantines most blocks, or that cannot count its handoffs after it."""

    def __init__(self, mode: str, engine: Engine) -> None:
        self._mode = mode
        self._engine = engine
        self.is_draining = False
        self._has_ticked = False

    def handle(self, event: object) -> None:
        self.is_draining |= isinstance(event, BeginDrain)

    def stepped(self, outcome: StepOutcome) -> None:
        pass

    def tick(self) -> None:
        if self._has_ticked:
            return
        self._has_ticked = True
        if self._mode == "quarantine":
            ledger = self._engine.ledger
            allocation = ledger.reserve(5 * ledger.block_size, 5 * ledger.block_size)
            assert allocation is not None
            ledger.quarantine(allocation, list(ledger.block_ids(allocation)))
        sys.stdout.write("ticking\n")
        sys.stdout.flush()
        if self._mode in ("hang", "stand still"):
            threading.Event().wait()

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        if self._has_ticked and self._mode == "fail":
            raise RuntimeError("broken by the test")
        return ()

    def known(self) -> tuple[HandoffKey, ...]:
        return ()

    def ignored(self) -> tuple[tuple[str, int], ...]:
        return ()


def main(mode: str, life_fd: int) -> int:
    configure_logging("broken")
    engine = EngineSettings(model_path=str(GOLDEN / "ouro_fp32"), block_size=4, num_blocks=8)
    settings = WorkerSettings(
        name="broken",
        role="prefill",
        coordinator="127.0.0.1:1",
        engine=engine,
        connect_timeout_s=600.0,
        quarantine_limit=0.5,
        quarantine_patience_s=0.2,
        engine_timeout_s=1.0 if mode == "stand still" else 600.0,
    )

    def build_role(context: WorkerContext) -> RoleParts:
        return RoleParts(BrokenCore(mode, context.engine), cluster_pb2_grpc.PeeringServicer(), lambda message: False)

    return run_worker(settings, PrefillPolicy(), build_role, life_fd)


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2])))
