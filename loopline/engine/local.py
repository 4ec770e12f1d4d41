"""An engine for one process: `loopline run`, tests and benches. Requests in, token rows out, no cluster."""

from collections.abc import Iterator, Sequence

from loopline.engine.engine import Engine
from loopline.engine.forward import StateSource
from loopline.errors import InvariantBroken, RequestRefused
from loopline.intake import check_exit_gate
from loopline.kv.arena import Arena
from loopline.messages import TokenRow
from loopline.model_spec import ModelSpec
from loopline.request import Limits, Request, check_request
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings


class LocalEngine:
    """A whole engine behind two calls; not for several threads."""

    def __init__(self, settings: EngineSettings, states: StateSource | None = None) -> None:
        """`states`: as for Engine. Raises OperatorError kinds that say what to change."""
        self._engine = Engine(settings, UnifiedPolicy(), states)

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    @property
    def spec(self) -> ModelSpec:
        return self._engine.model.spec

    def generate(self, request: Request) -> Iterator[TokenRow]:
        """Rows of one request as they are made; others that were submitted go on beside it. Closing the iterator
        cancels. Raises RequestError for a bad request."""
        self._submit(request)
        try:
            while True:
                for row in self._step():
                    if row.request_id != request.request_id:
                        continue
                    yield row
                    if row.finish is not None:
                        return
        finally:
            self._cancel(request.request_id)

    def generate_all(self, requests: Sequence[Request]) -> dict[str, list[TokenRow]]:
        """Run requests together to their ends; rows by request id. If one fails, none of them goes on."""
        rows: dict[str, list[TokenRow]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._submit(request)
            while self._engine.scheduler.has_work:
                for row in self._step():
                    rows[row.request_id].append(row)
        finally:
            for request in requests:
                self._cancel(request.request_id)
        return rows

    @property
    def arena(self) -> Arena:
        """The KV arena, for those who look at its bytes."""
        return self._engine.arena

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self._engine.scheduler.num_preempted

    def find_cached(self, request: Request) -> list[int]:
        """Ids of the cached blocks that this request would share if it came now."""
        return self._engine.scheduler.find_cached(request)

    def audit(self) -> None:
        """Raise AuditFailed if the books do not add up."""
        self._engine.ledger.audit()

    def close(self) -> None:
        """Audit the books one last time."""
        self.audit()

    def _submit(self, request: Request) -> None:
        check_request(request, self.limits)
        if request.params.exit_probabilities:
            check_exit_gate(self.spec, self._engine.settings.exit_gate)
        cause = self._engine.scheduler.submit(request)
        if cause is not None:
            raise RequestRefused(f"request {request.request_id} was refused: {cause.value}")

    def _step(self) -> Sequence[TokenRow]:
        outcome = self._engine.step()
        if outcome is None:
            raise InvariantBroken("requests are running and nothing can be computed")
        for lost in outcome.lost:
            self._engine.ledger.release(lost.allocation)
        if outcome.lost:
            raise RequestRefused(f"request {outcome.lost[0].request_id} failed: {outcome.lost[0].detail}")
        return outcome.rows

    def _cancel(self, request_id: str) -> None:
        allocation = self._engine.scheduler.remove(request_id)
        if allocation is not None:
            self._engine.ledger.release(allocation)
