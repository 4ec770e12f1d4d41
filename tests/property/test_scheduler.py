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
from loopline.sched.budget import StepCost, share_token_loops, share_within
from loopline.sched.plan import NOT_FINITE, StepPlan, StepResult
from loopline.sched.policy import Demand, UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 2000 if SOAK else 120
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


def check_plan(plan: StepPlan, limit: int) -> None:
    """What every plan must be: known depths, chunks on block borders, the budget kept for prompt tokens."""
    prompt_work = 0
    for segment in plan.segments:
        assert (segment.runs or segment.decode) and segment.first_loop == 0
        for run in segment.runs:
            assert run.params.loops == segment.last_loop
            end = run.first_position + run.num_tokens
            assert run.sampling is not None or end % BLOCK_SIZE == 0 or run.num_tokens < BLOCK_SIZE
            prompt_work += run.num_tokens * run.params.loops
    assert prompt_work <= max([limit, *(BLOCK_SIZE * run.params.loops for run in plan.runs)])
    assert len(set(plan.request_ids)) == len(plan.request_ids)


REQUESTS = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4))
SCRIPTS = st.lists(st.tuples(st.sampled_from(["submit", "step", "cancel", "fail"]), REQUESTS), max_size=60)


@pytest.mark.parametrize("parts", [None, ("model",)], ids=["private", "shared"])
@pytest.mark.parametrize("growth_share", [1.0, 0.3, 0.0])
def test_every_request_ends_with_its_own_answer(growth_share: float, parts: tuple[str, ...] | None) -> None:
    """Also while the youngest are preempted, and while all prompts share their beginnings."""

    @settings(max_examples=EXAMPLES // 3, deadline=None)
    @given(SCRIPTS)
    def run(script: Sequence[tuple[str, tuple[int, int, int]]]) -> None:
        check_script(script, growth_share, parts)

    run()


def check_script(
    script: Sequence[tuple[str, tuple[int, int, int]]], growth_share: float, parts: tuple[str, ...] | None
) -> None:
    chosen = SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=48, growth_share=growth_share)
    ledger, scheduler = make(chosen, parts=parts)
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
    assert ledger.num_free_blocks == NUM_BLOCKS
    assert growth_share < 1 or not scheduler.num_preempted


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=8))
def test_the_same_requests_give_the_same_plans(shapes: Sequence[tuple[int, int, int]]) -> None:
    def plans() -> list[object]:
        _, scheduler = make(parts=("model",))
        for number, (prompt, most, loops) in enumerate(shapes):
            scheduler.submit(request(f"r{number}", prompt, most, loops))
        seen: list[object] = []
        while scheduler.has_work:
            plan = scheduler.plan()
            if plan is None:
                break
            seen.append([(run.request_id, run.first_position, run.token_ids) for run in plan.runs])
            seen.append([s.decode.positions.tolist() for s in plan.segments if s.decode is not None])
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
        assert not plan.runs and plan.num_decode_rows == 1, "nothing of the prompt is computed again"
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
    bad = StepResult(plan.step, [NOT_FINITE, *good.token_ids[1:]])
    outcome = scheduler.commit(plan, bad)
    assert [lost.request_id for lost in outcome.lost] == ["a"]
    ledger.release(outcome.lost[0].allocation)
    ledger.audit()
    assert scheduler.has_work


def drain(scheduler: Scheduler) -> dict[str, list[int | None]]:
    answers: dict[str, list[int | None]] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "deadlock"
        for row in scheduler.commit(plan, run_scripted(plan)).rows:
            answers.setdefault(row.request_id, []).append(row.token_id)
    return answers


def test_preemption_takes_the_youngest_and_never_a_reservation() -> None:
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, growth_share=0.0))
    kept = reserve(scheduler, request("reserved", 16, 16))
    names = ("oldest", "middle", "youngest")
    for name in names:
        scheduler.submit(request(name, 16, 60))
    reserved_blocks = ledger.block_ids(kept)
    last_step: dict[str, int] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        last_step.update(dict.fromkeys(plan.request_ids, plan.step))
        scheduler.commit(plan, run_scripted(plan))
        assert ledger.block_ids(kept) == reserved_blocks
        ledger.audit()
    assert scheduler.num_preempted > 0
    ended = [name for name in names if len(expected_answer(request(name, 16, 60))[0]) > 30]
    assert [last_step[name] for name in ended] == sorted(last_step[name] for name in ended)


def test_younger_ones_pass_a_blocked_request_a_bounded_number_of_times() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, max_passes=3))
    scheduler.submit(request("running", 40, 20))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("long", 60, 20))
    for n in range(8):
        scheduler.submit(request(f"short{n}", 4, 1))
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name in plan.request_ids if name not in order]
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan() or plan
    passed = [name for name in order[: order.index("long")] if name.startswith("short")]
    assert passed == ["short0", "short1", "short2"]


def test_a_common_prefix_is_computed_once() -> None:
    ledger, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    for name in ("first", "second", "third"):
        scheduler.submit(request(name, 33, 1))
    computed: dict[str, int] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        for run in plan.runs:
            computed[run.request_id] = computed.get(run.request_id, 0) + run.num_tokens
        scheduler.commit(plan, run_scripted(plan))
    assert computed == {"first": 33, "second": 1, "third": 1}
    ledger.audit()


@pytest.mark.parametrize(
    ("length", "hit", "computed"), [(3, 0, 3), (4, 4, 1), (5, 4, 1), (8, 8, 1), (9, 8, 1), (11, 8, 3)]
)
def test_a_second_request_computes_what_is_missing(length: int, hit: int, computed: int) -> None:
    """Hits are whole blocks; a full hit computes exactly one token, and writes nothing."""
    ledger, scheduler = make(parts=("model",))
    scheduler.submit(request("warm", length, 1))
    drain(scheduler)
    scheduler.submit(request("hit", length, 1))
    plan = scheduler.plan()
    assert plan is not None
    (run,) = plan.runs
    assert (run.first_position, run.num_tokens) == (length - computed, computed)
    assert run.writes == (hit < length)
    scheduler.commit(plan, run_scripted(plan))
    ledger.audit()


def test_digests_are_computed_once_however_often_a_request_is_tried() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=8), parts=("model",))
    scheduler.submit(request("blocker", 80, 10))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("waits", 41, 30))
    entry = next(scheduler._admission._waiting.first(1))
    assert entry.digests is not None
    before = entry.digests.num_hashed
    for _ in range(12):
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan()
        assert plan is not None
    assert before == entry.digests.num_hashed == 10


def test_the_share_of_a_submission() -> None:
    assert share_token_loops(64, 4) == 256
    assert share_token_loops(64, 32) == 2048
    cost = StepCost(decode_s=0.25, prompt_token_loop_s=2.0**-12)
    assert share_within(cost, 0.5, 4) == 256
    assert share_within(cost, 0.5, 32) == 32
    assert share_within(cost, 0.2, 4) == 1


def test_prompt_tokens_keep_to_their_share_while_others_decode() -> None:
    _, scheduler = make(SchedulerSettings(max_running=6, chunk_tokens=64, prefill_tokens_per_loop=6))
    scheduler.submit(request("decodes", 4, 30))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.submit(request("long", 50, 1))
    chunks = []
    while scheduler.has_work:
        scheduler.commit(plan, run_scripted(plan))
        plan = scheduler.plan() or plan
        chunks += [run.num_tokens for run in plan.runs if plan.num_decode_rows]
    assert chunks and max(chunks) <= 6


def test_a_step_that_lags_keeps_freed_blocks_back() -> None:
    """The engine is two steps behind: blocks of a removed request wait for the step that may write them."""
    ledger = Ledger(4, BLOCK_SIZE)
    first = ledger.reserve(8, 8)
    assert first is not None
    ledger.begin_run(first, 0, 8, 1, step=3)
    ledger.release(first)
    other = ledger.reserve(8, 8)
    assert other is not None
    assert ledger.reserve(4, 4) is None
    for step in (1, 2):
        ledger.step_done(step)
        assert ledger.reserve(4, 4) is None
    ledger.step_done(3)
    assert ledger.reserve(8, 8) is not None
    ledger.audit()
