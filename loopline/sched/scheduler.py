"""The shared scheduler: which rows the next step computes, and what its result means.

plan() -> StepPlan -> somebody computes it -> commit(plan, result) -> StepOutcome. Requests come in by `submit` (their
prompt is computed here) or by `reserve` + `activate` (their prompt's KV arrives from another worker). Blocks end in
`Ledger.release`, or with the caller who took the allocation out by `remove`.

Every running request has at least one row's room in each step, and a request runs only once its worst case is held or
promised, so whatever runs can finish.
"""

from dataclasses import dataclass
from enum import Enum

from loopline.errors import InvariantBroken
from loopline.identity import Cause
from loopline.kv.ledger import Allocation, Ledger
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request, TokenLogprobs
from loopline.sched.budget import StepBudget, chunk_end
from loopline.sched.plan import (
    ChunkDone,
    RequestLost,
    RowRun,
    Sampling,
    Segment,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenHistory,
)
from loopline.sched.policy import RolePolicy
from loopline.sched.queue import WaitingQueue
from loopline.settings import SchedulerSettings


class _Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"  # its first token is out; the blocks are being handed off


@dataclass(eq=False)
class _Running:
    """A request that holds blocks. `num_computed` positions have KV; `token_ids` are prompt and answer so far."""

    request: Request
    allocation: Allocation
    token_ids: list[int]
    num_computed: int = 0
    phase: _Phase = _Phase.PREFILL

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)


class Scheduler:
    """Invariant: an id is waiting, running or unknown, never two of them; at most one plan is not committed."""

    def __init__(self, ledger: Ledger, settings: SchedulerSettings, policy: RolePolicy) -> None:
        self._ledger = ledger
        self._settings = settings
        self._policy = policy
        self._waiting = WaitingQueue(settings.max_waiting)
        self._running: dict[str, _Running] = {}  # in order of admission
        self._reserved: dict[Allocation, Request] = {}
        self._step = 0
        self._in_flight: StepPlan | None = None

    # ---- queries

    @property
    def step(self) -> int:
        """The last step that was planned."""
        return self._step

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, reserved ones included."""
        return len(self._running) + len(self._reserved)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether plan() could give a plan now or after something that runs has ended."""
        return bool(self._waiting) or any(entry.phase is not _Phase.HELD for entry in self._running.values())

    def token_loops(self) -> int:
        """Work that is queued, reserved and running, counted to each request's most tokens."""
        running = sum(
            (entry.request.max_kv_tokens - entry.num_computed) * entry.request.params.loops
            for entry in self._running.values()
            if entry.phase is not _Phase.HELD
        )
        reserved = sum(request.params.max_tokens * request.params.loops for request in self._reserved.values())
        return running + reserved + self._waiting.token_loops()

    # ---- intake

    def submit(self, request: Request) -> Cause | None:
        """Queue a request whose prompt is computed here. A cause means it was refused and nothing is held."""
        if request.request_id in self._running or request.request_id in self._waiting:
            return Cause.DUPLICATE
        if self._never_fits(request):
            return Cause.TOO_LARGE
        return None if self._waiting.push(request) else Cause.NO_ROOM

    def reserve(self, request: Request) -> Allocation | Cause:
        """Hold blocks now for a request whose prompt's KV will arrive, or say why not."""
        if self._never_fits(request):
            return Cause.TOO_LARGE
        if self.num_running >= self._settings.max_running:
            return Cause.NO_ROOM
        demand = self._policy.demand(request)
        allocation = self._ledger.reserve(demand.tokens_now, demand.tokens_max)
        if allocation is None:
            return Cause.NO_ROOM
        self._reserved[allocation] = request
        return allocation

    def unreserve(self, allocation: Allocation) -> None:
        """Forget a reservation; its blocks are the caller's to release or quarantine."""
        del self._reserved[allocation]

    def activate(self, allocation: Allocation, first: TokenRow) -> TokenRow:
        """Run a reserved request whose known tokens' KV is all there: `first` is the token sampled after them.

        The KV counts as written to the request's depth from here on. Returns `first`, to be sent on like any row.
        """
        request = self._reserved[allocation]
        if first.token_id is None or first.finish is not None:
            raise InvariantBroken(f"request {request.request_id} ended with its first token and cannot be activated")
        del self._reserved[allocation]
        known = [*request.prompt_ids, *request.generated_ids]
        self._ledger.mark_written(allocation, 0, len(known), request.params.loops)
        self._running[request.request_id] = _Running(
            request, allocation, [*known, first.token_id], num_computed=len(known), phase=_Phase.DECODE
        )
        return first

    def remove(self, request_id: str) -> Allocation | None:
        """Take a request out whatever its phase. Its allocation is the caller's to release; None if it held nothing."""
        self._waiting.remove(request_id)
        entry = self._running.pop(request_id, None)
        return entry.allocation if entry else None

    # ---- plan

    def plan(self) -> StepPlan | None:
        """What the next step computes; None if nothing can be computed now."""
        if self._in_flight is not None:
            raise InvariantBroken(f"step {self._in_flight.step} was planned and not committed")
        self._admit()
        budget = StepBudget(self._settings.max_token_loops)
        runs = [self._decode_run(entry, budget) for entry in self._running.values() if entry.phase is _Phase.DECODE]
        for entry in self._running.values():
            if entry.phase is _Phase.PREFILL:
                run = self._prefill_run(entry, budget, must_progress=not runs)
                if run is not None:
                    runs.append(run)
        if not runs:
            return None
        self._step += 1
        for run in runs:
            self._ledger.begin_run(run.allocation, run.first_position, run.num_tokens, run.params.loops, self._step)
        self._in_flight = StepPlan(self._step, _by_depth(runs))
        return self._in_flight

    def _never_fits(self, request: Request) -> bool:
        return self._ledger.blocks_for(self._policy.demand(request).tokens_max) > self._ledger.total_blocks

    def _admit(self) -> None:
        while (request := self._waiting.head()) is not None and self.num_running < self._settings.max_running:
            demand = self._policy.demand(request)
            allocation = self._ledger.reserve(demand.tokens_now, demand.tokens_max)
            if allocation is None:
                return
            self._waiting.pop_head()
            self._running[request.request_id] = _Running(
                request, allocation, [*request.prompt_ids, *request.generated_ids]
            )

    def _decode_run(self, entry: _Running, budget: StepBudget) -> RowRun:
        budget.charge(1, entry.request.params.loops)
        if not self._ledger.grow(entry.allocation, entry.num_computed + 1):
            raise InvariantBroken(f"request {entry.request.request_id} could not grow inside its promise")
        return self._run(entry, entry.num_computed + 1)

    def _prefill_run(self, entry: _Running, budget: StepBudget, must_progress: bool) -> RowRun | None:
        depth, block_size = entry.request.params.loops, self._ledger.block_size
        most = min(self._settings.chunk_tokens, budget.tokens_left(depth))
        end = chunk_end(entry.num_computed, len(entry.token_ids), most, block_size)
        if end == entry.num_computed:
            if not must_progress:
                return None
            end = chunk_end(entry.num_computed, len(entry.token_ids), block_size, block_size)
        budget.charge(end - entry.num_computed, depth)
        return self._run(entry, end)

    def _run(self, entry: _Running, end: int) -> RowRun:
        request = entry.request
        sampling = None
        if end == len(entry.token_ids):
            sampling = Sampling(end, entry.num_generated, _history(entry))
        return RowRun(
            request_id=request.request_id,
            allocation=entry.allocation,
            params=request.params,
            first_position=entry.num_computed,
            token_ids=tuple(entry.token_ids[entry.num_computed : end]),
            sampling=sampling,
        )

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take a step's result. Requests that were removed meanwhile are passed over."""
        self._take_in_flight(plan)
        sampled = {token.request_id: token for token in result.tokens}
        rows: list[TokenRow] = []
        chunks: list[ChunkDone] = []
        lost: list[RequestLost] = []
        for run in plan.runs:
            entry = self._running.get(run.request_id)
            if entry is None or entry.allocation is not run.allocation:
                continue
            self._ledger.mark_written(run.allocation, run.first_position, run.num_tokens, run.params.loops)
            entry.num_computed += run.num_tokens
            if entry.phase is _Phase.PREFILL:
                done = run.sampling is not None
                chunks.append(ChunkDone(run.request_id, run.allocation, entry.num_computed, is_last=done))
            if run.sampling is None:
                continue
            token = sampled[run.request_id]
            if token.token_id is None:
                lost.append(self._lose(entry, "the model's logits are not finite"))
            else:
                rows.append(self._accept(entry, token.token_id, token.logprobs))
        self._ledger.step_done(plan.step)
        return StepOutcome(plan.step, tuple(rows), tuple(chunks), tuple(lost))

    def abandon(self, plan: StepPlan, detail: str) -> StepOutcome:
        """A step could not be computed: every request in it is given up, and nothing else."""
        self._take_in_flight(plan)
        entries = [self._running.get(run.request_id) for run in plan.runs]
        lost = tuple(self._lose(entry, detail) for entry in entries if entry is not None)
        self._ledger.step_done(plan.step)
        return StepOutcome(plan.step, (), (), lost)

    def _take_in_flight(self, plan: StepPlan) -> None:
        if self._in_flight is not plan:
            raise InvariantBroken(f"step {plan.step} is not the one in flight")
        self._in_flight = None

    def _accept(self, entry: _Running, token_id: int, logprobs: TokenLogprobs | None) -> TokenRow:
        request, params = entry.request, entry.request.params
        position = len(entry.token_ids)
        finish = None
        if token_id in params.stop_ids:
            finish = FinishReason.STOP
        else:
            entry.token_ids.append(token_id)
            if entry.num_generated >= params.max_tokens:
                finish = FinishReason.LENGTH
        is_stop = finish is FinishReason.STOP
        row = TokenRow(
            request_id=request.request_id,
            attempt=request.attempt,
            position=position,
            token_id=None if is_stop else token_id,
            depth=params.loops,
            finish=finish,
            logprobs=None if is_stop else logprobs,
        )
        if self._policy.holds_after_first_token:
            entry.phase = _Phase.HELD
        elif finish is not None:
            del self._running[request.request_id]
            self._ledger.release(entry.allocation)
        else:
            entry.phase = _Phase.DECODE
        return row

    def _lose(self, entry: _Running, detail: str) -> RequestLost:
        del self._running[entry.request.request_id]
        return RequestLost(entry.request.request_id, entry.allocation, Cause.INTERNAL, detail)


def _by_depth(runs: list[RowRun]) -> tuple[Segment, ...]:
    depths = sorted({run.params.loops for run in runs})
    return tuple(Segment(0, depth, tuple(run for run in runs if run.params.loops == depth)) for depth in depths)


def _history(entry: _Running) -> TokenHistory:
    params = entry.request.params
    if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
        return TokenHistory()
    num_prompt = len(entry.request.prompt_ids)
    return TokenHistory(tuple(entry.token_ids[:num_prompt]), tuple(entry.token_ids[num_prompt:]))
