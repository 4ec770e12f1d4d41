"""The scheduler under random submits, cancels, reservations and failing steps, with a scripted engine.

The oracle: each request alone, fed the same scripted tokens, gives the same answer; whatever happens, books add up,
everything ends, and the same seed gives the same plans.
"""

import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.errors import InvariantBroken
from loopline.identity import Cause
from loopline.kv.ledger import Allocation, Ledger
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request, SamplingParams
from loopline.sched.plan import SampledToken, StepPlan, StepResult
from loopline.sched.policy import Demand, UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 2000 if SOAK else 120
BLOCK_SIZE, NUM_BLOCKS, STOP_ID = 4, 24, 7


class HoldPolicy:
    """A prefill worker's: one token, then the blocks are held."""

    holds_after_first_token = True

    def demand(self, request: Request) -> Demand:
        return Demand(request.num_known_tokens, request.num_known_tokens)


def scripted_token(request_id: str, position: int) -> int:
    return random.Random(f"{request_id}/{position}").randrange(40)


def run_scripted(plan: StepPlan) -> StepResult:
    """A model whose next token is a function of request and position alone."""
    runs = [run for run in plan.runs if run.sampling is not None]
    tokens = [SampledToken(run.request_id, scripted_token(run.request_id, run.sampling.position)) for run in runs]
    return StepResult(plan.step, tuple(tokens))


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


def make(settings_: SchedulerSettings | None = None, policy: object | None = None) -> tuple[Ledger, Scheduler]:
    ledger = Ledger(NUM_BLOCKS, BLOCK_SIZE)
    chosen = settings_ or SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=48)
    return ledger, Scheduler(ledger, chosen, policy or UnifiedPolicy())  # type: ignore[arg-type]


def request(name: str, prompt: int, most: int, loops: int = 2, **rest: object) -> Request:
    params = SamplingParams(max_tokens=most, loops=loops, stop_ids=(STOP_ID,), **rest)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_ids=tuple(range(1, prompt + 1)), params=params)


def check_plan(plan: StepPlan, limit: int) -> None:
    """What every plan must be: known depths, chunks on block borders, the budget kept for prompt tokens."""
    prompt_work = 0
    for segment in plan.segments:
        assert segment.runs and segment.first_loop == 0
        for run in segment.runs:
            assert run.params.loops == segment.last_loop
            end = run.first_position + run.num_tokens
            assert run.sampling is not None or end % BLOCK_SIZE == 0
            if run.num_tokens > 1:
                prompt_work += run.num_tokens * run.params.loops
    assert prompt_work <= max(limit, BLOCK_SIZE * max(run.params.loops for run in plan.runs))
    assert len({run.request_id for run in plan.runs}) == len(plan.runs)


REQUESTS = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4))
SCRIPTS = st.lists(st.tuples(st.sampled_from(["submit", "step", "cancel", "fail"]), REQUESTS), max_size=60)


@settings(max_examples=EXAMPLES, deadline=None)
@given(SCRIPTS)
def test_every_request_ends_with_its_own_answer(script: Sequence[tuple[str, tuple[int, int, int]]]) -> None:
    ledger, scheduler = make()
    alive: dict[str, Request] = {}
    answers: dict[str, list[TokenRow]] = {}

    def step(fail: bool = False) -> None:
        plan = scheduler.plan()
        ledger.audit()
        if plan is None:
            return
        check_plan(plan, 48)
        outcome = scheduler.abandon(plan, "scripted") if fail else scheduler.commit(plan, run_scripted(plan))
        for lost in outcome.lost:
            ledger.release(lost.allocation)
            alive.pop(lost.request_id)
        for row in outcome.rows:
            answers[row.request_id].append(row)
        ledger.audit()

    for number, (action, (prompt, most, loops)) in enumerate(script):
        if action == "submit":
            new = request(f"r{number}", prompt, most, loops)
            cause = scheduler.submit(new)
            assert cause == (Cause.TOO_LARGE if prompt + most - 1 > NUM_BLOCKS * BLOCK_SIZE else None)
            if cause is None:
                alive[new.request_id], answers[new.request_id] = new, []
                assert scheduler.submit(new) is Cause.DUPLICATE
        elif action == "cancel" and alive:
            name = sorted(alive)[number % len(alive)]
            allocation = scheduler.remove(name)
            if allocation is not None:
                ledger.release(allocation)
            del alive[name]
        else:
            step(fail=action == "fail")
    steps = 0
    while scheduler.has_work:
        step()
        steps += 1
        assert steps < 4000, "something never ends"
    for name, one in alive.items():
        tokens, finish = expected_answer(one)
        rows = answers[name]
        assert [row.token_id for row in rows if row.token_id is not None] == tokens
        assert rows[-1].finish is finish
        assert [row.position for row in rows] == list(range(len(one.prompt_ids), len(one.prompt_ids) + len(rows)))
    assert ledger.counts().free == NUM_BLOCKS


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8))
def test_the_same_requests_give_the_same_plans(shapes: Sequence[tuple[int, int, int]]) -> None:
    def plans() -> list[object]:
        _, scheduler = make()
        for number, (prompt, most, loops) in enumerate(shapes):
            scheduler.submit(request(f"r{number}", prompt, most, loops))
        seen: list[object] = []
        while scheduler.has_work:
            plan = scheduler.plan()
            if plan is None:
                break
            seen.append([(run.request_id, run.first_position, run.token_ids) for run in plan.runs])
            scheduler.commit(plan, run_scripted(plan))
        return seen

    assert plans() == plans()


def test_two_worst_cases_fit_and_six_long_answers_all_finish() -> None:
    ledger, scheduler = make()
    worst = NUM_BLOCKS * BLOCK_SIZE // 2
    answers: dict[str, list[int]] = {}
    wanted = [request(f"long{n}", 8, worst - 8, 1) for n in range(6)]
    for one in wanted:
        assert scheduler.submit(one) is None
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "deadlock"
        assert scheduler.num_running <= 2
        for row in scheduler.commit(plan, run_scripted(plan)).rows:
            if row.token_id is not None:
                answers.setdefault(row.request_id, []).append(row.token_id)
    assert answers == {one.request_id: expected_answer(one)[0] for one in wanted if expected_answer(one)[0]}
    ledger.audit()


def test_a_prefill_role_holds_its_blocks_after_the_first_token() -> None:
    ledger, scheduler = make(policy=HoldPolicy())
    assert scheduler.submit(request("p", 10, 5)) is None
    chunks = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        outcome = scheduler.commit(plan, run_scripted(plan))
        chunks += [(chunk.num_computed, chunk.is_last) for chunk in outcome.chunks]
    assert chunks == [(8, False), (10, True)]
    assert ledger.counts().held == 3
    assert scheduler.plan() is None
    allocation = scheduler.remove("p")
    assert allocation is not None
    ledger.release(allocation)
    assert ledger.counts().free == NUM_BLOCKS


def reserve(scheduler: Scheduler, one: Request) -> Allocation:
    allocation = scheduler.reserve(one)
    assert isinstance(allocation, Allocation)
    return allocation


def test_an_activated_request_goes_on_from_the_first_token() -> None:
    ledger, scheduler = make()
    one = request("d", 9, 6)
    allocation = reserve(scheduler, one)
    first = TokenRow("d", 1, 9, scripted_token("d", 9), 2)
    rows = [scheduler.activate(allocation, first)]
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        assert [run.num_tokens for run in plan.runs] == [1], "nothing of the prompt is computed again"
        rows += scheduler.commit(plan, run_scripted(plan)).rows
    assert [row.token_id for row in rows if row.token_id is not None] == expected_answer(one)[0]
    ledger.audit()


def test_reservations_are_refused_by_room_and_by_size() -> None:
    _, scheduler = make(SchedulerSettings(max_running=2, chunk_tokens=8))
    assert scheduler.reserve(request("x", 90, 40)) is Cause.TOO_LARGE
    reserve(scheduler, request("a", 8, 8))
    kept = reserve(scheduler, request("b", 8, 8))
    assert scheduler.reserve(request("c", 8, 8)) is Cause.NO_ROOM
    scheduler.unreserve(kept)
    assert scheduler.num_running == 1


def test_a_request_that_ended_cannot_be_activated() -> None:
    _, scheduler = make()
    allocation = reserve(scheduler, request("d", 9, 6))
    ended = TokenRow("d", 1, 9, None, 2, FinishReason.STOP)
    with pytest.raises(InvariantBroken):
        scheduler.activate(allocation, ended)


def test_one_plan_at_a_time() -> None:
    _, scheduler = make()
    scheduler.submit(request("a", 8, 8))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(InvariantBroken):
        scheduler.plan()
    scheduler.commit(plan, run_scripted(plan))
    with pytest.raises(InvariantBroken):
        scheduler.commit(plan, run_scripted(plan))


def test_logits_that_are_not_finite_cost_one_request() -> None:
    ledger, scheduler = make()
    scheduler.submit(request("a", 4, 8))
    scheduler.submit(request("b", 4, 8))
    plan = scheduler.plan()
    assert plan is not None
    good = run_scripted(plan)
    bad = StepResult(plan.step, tuple(SampledToken("a", None) if t.request_id == "a" else t for t in good.tokens))
    outcome = scheduler.commit(plan, bad)
    assert [lost.request_id for lost in outcome.lost] == ["a"]
    ledger.release(outcome.lost[0].allocation)
    ledger.audit()
    assert scheduler.has_work
