"""A scheduler with a scripted engine: the next token is a function of request and position alone."""

import random
from collections import deque
from collections.abc import Sequence

from loopline.identity import Fingerprint
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import FinishReason, Request, SamplingParams
from loopline.sched.plan import NOT_FINITE, DecodeRows, StepOutcome, StepPlan, StepResult
from loopline.sched.policy import Demand, UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings

BLOCK_SIZE, NUM_BLOCKS, STOP_ID = 4, 24, 7


class HoldPolicy:
    """A prefill worker's: one token, then the blocks are held."""

    holds_after_first_token = True
    shares_prefixes = False

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        return Demand(num_known_tokens, num_known_tokens)


class WatchedLedger(Ledger):
    """Checks at every hand-out that no step which has not ended may still write the block."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        super().__init__(total_blocks, block_size)
        self.done = 0
        self.written_by: dict[int, int] = {}  # block -> last step that may write it
        self.num_reused = 0

    def reserve(
        self, num_tokens: int, max_tokens: int, digests: Sequence[bytes] = (), depth: int = 0
    ) -> Allocation | None:
        allocation = super().reserve(num_tokens, max_tokens, digests, depth)
        if allocation is not None:
            self._check(self.block_ids(allocation))
        return allocation

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        before = len(self.block_ids(allocation))
        has_grown = super().grow(allocation, num_tokens)
        self._check(self.block_ids(allocation)[before:])
        return has_grown

    def begin_run(
        self, allocation: Allocation, first: int, count: int, depth: int, step: int, writes: bool = True
    ) -> None:
        super().begin_run(allocation, first, count, depth, step, writes)
        if writes:
            blocks = self.block_ids(allocation)[first // self.block_size : -(-(first + count) // self.block_size)]
            self.written_by.update(dict.fromkeys(blocks, step))

    def begin_rows(self, rows: IntArray, firsts: IntArray, depth: int, step: int) -> None:
        super().begin_rows(rows, firsts, depth, step)
        tables = self.block_tables(rows, int(firsts.max()) // self.block_size + 1)
        blocks = [int(table[first // self.block_size]) for table, first in zip(tables, firsts, strict=True)]
        self.written_by.update(dict.fromkeys(blocks, step))

    def step_done(self, step: int) -> None:
        self.done = max(self.done, step)
        super().step_done(step)

    def _check(self, block_ids: list[int]) -> None:
        for block in block_ids:
            self.num_reused += block in self.written_by
            assert self.written_by.get(block, 0) <= self.done, "handed out while a step may still write it"


def scripted_token(request_id: str, position: int, seed: int = 0) -> int:
    name = f"{request_id}@{seed}" if seed else request_id
    return random.Random(f"{name}/{position}").randrange(40)


def run_scripted(plan: StepPlan, previous: StepResult | None = None) -> StepResult:
    """A model whose next token is a function of request and position alone; `previous` is what the step before gave.

    Checks that each decode row goes on from the right token, wherever the plan says that it comes from.
    """
    tokens: list[int] = []
    for segment in plan.segments:
        if segment.decode is not None:
            tokens += _run_rows(plan.step, segment.decode, previous)
        for run in segment.runs:
            if run.sampling is not None:
                tokens.append(scripted_token(run.request_id, run.sampling.position, run.params.seed))
    return StepResult(plan.step, tokens)


def _run_rows(step: int, rows: DecodeRows, previous: StepResult | None) -> list[int]:
    tokens = []
    for index, request_ in enumerate(rows.requests):
        name, seed, position = request_.request_id, request_.params.seed, int(rows.positions[index])
        token, source = int(rows.token_ids[index]), -1 if rows.sources is None else int(rows.sources[index])
        if source >= 0:
            assert token == 0 and previous is not None and previous.step == step - 1
            token = previous.token_ids[source]
        assert token == scripted_token(name, position, seed)
        assert rows.num_generated[index] == position + 1 - len(request_.prompt_ids)
        if rows.histories is not None and rows.histories[index].prompt_ids:
            assert len(rows.histories[index].generated_ids) == rows.num_generated[index]
            assert source == -1
        tokens.append(scripted_token(name, position + 1, seed))
    return tokens


class ScriptedEngine:
    """Submits plans as an engine does, as many ahead as the scheduler allows, and commits the oldest."""

    def __init__(self, scheduler: Scheduler, steps_ahead: int) -> None:
        self.scheduler = scheduler
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self._steps_ahead = steps_ahead
        self._previous: StepResult | None = None

    @property
    def may_submit(self) -> bool:
        return len(self.in_flight) <= self._steps_ahead

    def submit(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self._previous = run_scripted(plan, self._previous)
            self.in_flight.append((plan, self._previous))
            self.plans.append(plan)
        return plan

    def commit(self, bad_row: int | None = None, fails: bool = False) -> StepOutcome:
        """`bad_row`: whose logits were not finite, of as many as there are; `fails`: the whole step did."""
        plan, result = self.in_flight.popleft()
        if fails:
            return self.scheduler.abandon(plan, "scripted")
        tokens = list(result.token_ids)
        if bad_row is not None and tokens:
            tokens[bad_row % len(tokens)] = NOT_FINITE
        return self.scheduler.commit(plan, StepResult(plan.step, tokens))

    def step(self) -> StepOutcome | None:
        """None: nothing can be computed."""
        while self.may_submit and self.submit() is not None:
            pass
        return self.commit() if self.in_flight else None


def expected_answer(request: Request) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while True:
        position = len(request.prompt_ids) + len(tokens)
        token = scripted_token(request.request_id, position, request.params.seed)
        if token in request.params.stop_ids:
            return tokens, FinishReason.STOP
        tokens.append(token)
        if len(tokens) == request.params.max_tokens:
            return tokens, FinishReason.LENGTH


def make(
    settings_: SchedulerSettings | None = None, policy: object | None = None, parts: tuple[str, ...] | None = None
) -> tuple[WatchedLedger, Scheduler]:
    ledger = WatchedLedger(NUM_BLOCKS, BLOCK_SIZE)
    chosen = settings_ or SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=48)
    group = None if parts is None else Fingerprint(tuple((part, part) for part in parts))
    return ledger, Scheduler(ledger, chosen, policy or UnifiedPolicy(), group)  # type: ignore[arg-type]


def request(name: str, prompt: int, most: int, loops: int = 2, attempt: int = 1, **rest: object) -> Request:
    """An attempt after the first has a seed, and so an answer, of its own."""
    given: dict[str, object] = {"stop_ids": (STOP_ID,), "seed": attempt - 1} | rest
    params = SamplingParams(max_tokens=most, loops=loops, **given)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_ids=tuple(range(1, prompt + 1)), params=params, attempt=attempt)
