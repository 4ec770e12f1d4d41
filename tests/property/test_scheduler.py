"""The scheduler under random submits, cancels, reservations and failing steps, with a scripted engine.

The oracle: each request alone, fed the same scripted tokens, gives the same answer; whatever happens, books add up,
everything ends, and the same seed gives the same plans.
"""

import os
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.identity import Cause
from loopline.messages import TokenRow
from loopline.request import Request
from loopline.sched.plan import StepPlan
from loopline.settings import SchedulerSettings
from tests.support.scheduling import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    expected_answer,
    make,
    request,
    run_scripted,
)

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 2000 if SOAK else 120


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
