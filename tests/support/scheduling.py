"""A scheduler with a scripted engine: the next token is a function of request and position alone."""

import random

from loopline.kv.ledger import Ledger
from loopline.request import FinishReason, Request, SamplingParams
from loopline.sched.plan import StepPlan, StepResult
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


def scripted_token(request_id: str, position: int) -> int:
    return random.Random(f"{request_id}/{position}").randrange(40)


def run_scripted(plan: StepPlan) -> StepResult:
    """A model whose next token is a function of request and position alone."""
    tokens: list[int] = []
    for segment in plan.segments:
        if segment.decode is not None:
            for request_, position in zip(segment.decode.requests, segment.decode.positions, strict=True):
                tokens.append(scripted_token(request_.request_id, int(position) + 1))
        for run in segment.runs:
            if run.sampling is not None:
                tokens.append(scripted_token(run.request_id, run.sampling.position))
    return StepResult(plan.step, tokens)


def expected_answer(request: Request) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while True:
        position = len(request.prompt_ids) + len(tokens)
        token = scripted_token(request.request_id, position)
        if token in request.params.stop_ids:
            return tokens, FinishReason.STOP
        tokens.append(token)
        if len(tokens) == request.params.max_tokens:
            return tokens, FinishReason.LENGTH


def make(
    settings_: SchedulerSettings | None = None, policy: object | None = None, parts: tuple[str, ...] | None = None
) -> tuple[Ledger, Scheduler]:
    ledger = Ledger(NUM_BLOCKS, BLOCK_SIZE)
    chosen = settings_ or SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=48)
    return ledger, Scheduler(ledger, chosen, policy or UnifiedPolicy(), parts)  # type: ignore[arg-type]


def request(name: str, prompt: int, most: int, loops: int = 2, **rest: object) -> Request:
    params = SamplingParams(max_tokens=most, loops=loops, stop_ids=(STOP_ID,), **rest)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_ids=tuple(range(1, prompt + 1)), params=params)
