"""Plans made while a step is in flight, by example: where tokens come from, who has no row, what is void."""

from collections import Counter
from types import CodeType

import numpy as np
import pytest

from loopline.bench.host import count_calls
from loopline.errors import InvariantBroken
from loopline.kv.ledger import Allocation
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request
from loopline.sched.decode_group import DecodeGroup
from loopline.sched.plan import DecodeRows, StepPlan
from loopline.settings import SchedulerSettings
from tests.support.scheduling import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    HoldPolicy,
    ScriptedEngine,
    WatchedLedger,
    expected_answer,
    make,
    request,
    scripted_token,
)

AHEAD = SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=96, steps_ahead=1)
LONG = [name for name in map(str, range(99)) if len(expected_answer(request(name, 4, 12))[0]) == 12]
STOPS = next(name for name in map(str, range(999)) if expected_answer(request(name, 4, 12))[1] is FinishReason.STOP)
"""Ends by a stop id, after some tokens."""


def engine_of(*requests: Request, settings: SchedulerSettings = AHEAD) -> tuple[WatchedLedger, ScriptedEngine]:
    ledger, scheduler = make(settings)
    for one in requests:
        assert scheduler.submit(one) is None
    return ledger, ScriptedEngine(scheduler, settings.steps_ahead)


def started(*requests: Request) -> tuple[WatchedLedger, ScriptedEngine]:
    """An engine in which all of the requests, with short prompts, decode; nothing is in flight."""
    ledger, engine = engine_of(*requests)
    assert engine.submit() is not None
    engine.commit()
    return ledger, engine


def decode_of(plan: StepPlan | None) -> DecodeRows:
    assert plan is not None
    (segment,) = plan.segments
    assert segment.decode is not None
    return segment.decode


def finish(engine: ScriptedEngine) -> list[TokenRow]:
    rows: list[TokenRow] = []
    while engine.scheduler.has_work:
        outcome = engine.step()
        assert outcome is not None, "deadlock"
        rows += outcome.rows
    assert not engine.in_flight
    return rows


def test_a_row_goes_on_from_the_token_that_the_step_before_chooses() -> None:
    _, engine = started(*(request(name, 4, 12) for name in LONG[:3]))
    first, second = decode_of(engine.submit()), decode_of(engine.submit())
    assert first.sources is None and first.token_ids.all()
    assert second.requests is first.requests
    assert second.positions.tolist() == [5, 5, 5] and second.num_generated.tolist() == [2, 2, 2]
    assert second.sources is not None and second.sources.tolist() == [0, 1, 2] and not second.token_ids.any()
    with pytest.raises(InvariantBroken, match="not committed"):
        engine.scheduler.plan()
    with pytest.raises(InvariantBroken, match="not the oldest"):
        engine.scheduler.commit(*engine.in_flight[1])


def test_sources_count_over_all_segments() -> None:
    """Depth 1 comes first: its decode row and the first token of its prompt are tokens 0 and 1."""
    _, engine = started(request(LONG[0], 4, 12, 1), request(LONG[1], 4, 12, 2), request(LONG[2], 4, 12, 2))
    engine.scheduler.submit(request("prompt", 4, 3, 1))
    first = engine.submit()
    assert first is not None and [one.num_chosen for one in first.segments] == [2, 2]
    second = engine.submit()
    assert second is not None
    sources = [one.decode.sources.tolist() for one in second.segments if one.decode and one.decode.sources is not None]
    assert sources == [[0], [2, 3]]


def test_a_request_that_ends_for_certain_has_no_row_more() -> None:
    """And the rows that stay are the same object from then on."""
    ledger, engine = started(request(LONG[0], 4, 2), request(LONG[1], 4, 12), request(LONG[2], 4, 12))
    first, second = decode_of(engine.submit()), decode_of(engine.submit())
    assert len(first) == 3 and [one.request_id for one in second.requests] == LONG[1:3]
    assert second.sources is not None and second.sources.tolist() == [1, 2]
    assert [row.finish for row in engine.commit().rows] == [FinishReason.LENGTH, None, None]
    third = decode_of(engine.submit())
    assert third.requests is second.requests
    assert third.sources is not None and third.sources.tolist() == [0, 1]
    finish(engine)
    assert ledger.counts().free == NUM_BLOCKS


def test_a_row_after_a_stop_id_is_void() -> None:
    """Its blocks wait for the step that computes it, and nothing of it is told."""
    ledger, engine = engine_of(request(STOPS, 4, 12), request(LONG[0], 4, 12))
    rows: list[TokenRow] = []
    while not any(row.finish for row in rows):
        outcome = engine.step()
        assert outcome is not None
        rows = list(outcome.rows)
    assert len(decode_of(engine.in_flight[0][0])) == 2, "its row is in flight"
    assert ledger._waiting and ledger.counts().held > ledger.blocks_for(12)
    outcome = engine.commit()
    assert [row.request_id for row in outcome.rows] == [LONG[0]]
    assert not ledger._waiting
    finish(engine)
    assert ledger.counts().free == NUM_BLOCKS


def test_the_last_void_row_is_work_until_it_is_committed() -> None:
    ledger, engine = engine_of(request(STOPS, 4, 12))
    rows: list[TokenRow] = []
    while not any(row.finish for row in rows):
        outcome = engine.step()
        assert outcome is not None
        rows += outcome.rows
    assert engine.scheduler.num_running == 0 and engine.scheduler.token_loops() == 0
    assert engine.scheduler.has_work and ledger.counts().held
    outcome = engine.step()
    assert outcome is not None and not outcome.rows and not outcome.tokens
    assert not engine.scheduler.has_work and ledger.counts().free == NUM_BLOCKS


def test_steady_steps_are_columns_with_one_plan_in_flight() -> None:
    """Also after a row has ended: nothing is rebuilt, sorted out or asked of single rows while the same rows decode."""
    _, engine = engine_of(*(request(one, 4, 21, stop_ids=()) for one in LONG[:3]), request(STOPS, 4, 12))
    while engine.scheduler.step < 3 or engine.scheduler.num_running > 3:
        engine.step()
    engine.step()
    engine.submit()
    counts: Counter[CodeType | None] = Counter()
    requests = decode_of(engine.in_flight[0][0]).requests
    for _ in range(BLOCK_SIZE):
        count_calls(engine.commit, counts)
        assert decode_of(count_calls(engine.submit, counts)).requests is requests
    assert counts[DecodeGroup._rows_ahead.__code__] == counts[DecodeGroup._advance.__code__] == BLOCK_SIZE
    assert not counts[DecodeGroup._still_here.__code__] and not counts[DecodeRows.take.__code__]


def test_a_request_that_came_again_under_its_id_is_another() -> None:
    """It is removed and let in again between a plan and its commit."""
    for fails in (False, True):
        ledger, engine = started(request(LONG[0], 4, 12), request(LONG[1], 4, 12))
        engine.submit()
        removed = engine.scheduler.remove(LONG[0])
        assert removed is not None
        ledger.release(removed)
        again = request(LONG[0], 9, 6, attempt=2)
        assert engine.scheduler.submit(again) is None
        plan = engine.submit()
        assert plan is not None and [run.request_id for run in plan.runs] == [LONG[0]]
        outcome = engine.commit(fails=fails)
        assert [one.request_id for one in outcome.lost] == ([LONG[1]] if fails else [])
        for lost in outcome.lost:
            ledger.release(lost.allocation)
        assert LONG[0] not in {row.request_id for row in outcome.rows}
        rows = [row for row in finish(engine) if row.request_id == LONG[0]]
        assert [row.token_id for row in rows if row.finish is not FinishReason.STOP] == expected_answer(again)[0]
        assert {row.attempt for row in rows} == {2}
        assert ledger.counts().free == NUM_BLOCKS


def test_rows_after_a_failure_are_void() -> None:
    ledger, engine = started(*(request(name, 4, 12) for name in LONG[:3]))
    engine.submit()
    engine.submit()
    (lost,) = engine.commit(bad_row=1).lost
    assert lost.request_id == LONG[1]
    ledger.release(lost.allocation)
    assert [row.request_id for row in engine.commit().rows] == [LONG[0], LONG[2]]
    finish(engine)
    assert ledger.counts().free == NUM_BLOCKS


def test_an_abandoned_step_costs_those_in_it_and_voids_what_follows() -> None:
    """One that came meanwhile goes on."""
    ledger, engine = started(request(LONG[0], 4, 12), request(LONG[1], 4, 12))
    engine.submit()
    held = engine.scheduler.reserve(request(LONG[2], 4, 12))
    assert not isinstance(held, str)
    engine.scheduler.activate(held, TokenRow(LONG[2], 1, 4, scripted_token(LONG[2], 4), 2))
    second = decode_of(engine.submit())
    assert second.sources is not None and second.sources.tolist() == [0, 1, -1]
    outcome = engine.commit(fails=True)
    assert [one.request_id for one in outcome.lost] == LONG[:2] and not outcome.rows
    for lost in outcome.lost:
        ledger.release(lost.allocation)
    assert [row.request_id for row in engine.commit().rows] == [LONG[2]]
    rows = finish(engine)
    assert len(rows) == 10 and ledger.counts().free == NUM_BLOCKS


def test_chunks_are_planned_ahead_and_the_last_one_is_waited_for() -> None:
    _, engine = engine_of(request("p", 14, 5))
    first, second = engine.submit(), engine.submit()
    assert first is not None and second is not None
    assert [(run.first_position, run.num_tokens) for run in (*first.runs, *second.runs)] == [(0, 8), (8, 6)]
    (chunk,) = engine.commit().chunks
    assert (chunk.num_computed, chunk.is_last) == (8, False)
    assert engine.submit() is None
    assert [row.position for row in engine.commit().rows] == [14]
    assert decode_of(engine.submit()).sources is None


def test_a_prefill_role_with_steps_ahead() -> None:
    ledger, scheduler = make(AHEAD, HoldPolicy())
    engine = ScriptedEngine(scheduler, 1)
    for name in LONG[:2]:
        scheduler.submit(request(name, 21, 5))
    assert {row.request_id for row in finish(engine)} == set(LONG[:2])
    assert scheduler.num_running == 2
    for name in LONG[:2]:
        allocation = scheduler.remove(name)
        assert allocation is not None
        ledger.release(allocation)
    assert ledger.counts().free == NUM_BLOCKS


def test_penalties_wait_for_their_tokens() -> None:
    _, engine = started(request(LONG[0], 4, 12), request(LONG[1], 4, 12, presence_penalty=1.0))
    assert decode_of(engine.submit()).histories is not None
    assert engine.submit() is None
    engine.commit()
    rows = finish(engine)
    assert len(rows) == 20


def test_nobody_steps_back_while_a_step_is_in_flight() -> None:
    settings = SchedulerSettings(max_running=6, chunk_tokens=64, growth_share=0.0, steps_ahead=1)
    _, engine = engine_of(*(request(f"n{n}", 16, 60, stop_ids=()) for n in range(4)), settings=settings)
    had_to_wait = 0
    while engine.scheduler.has_work:
        engine.submit()
        before = engine.scheduler.num_preempted
        had_to_wait += engine.submit() is None and engine.scheduler.num_running > 1
        assert engine.scheduler.num_preempted == before
        while engine.in_flight:
            engine.commit()
    assert engine.scheduler.num_preempted and had_to_wait


def test_two_steps_ahead_name_the_step_just_before() -> None:
    settings = SchedulerSettings(max_running=6, chunk_tokens=8, max_token_loops=96, steps_ahead=2)
    requests = [request(name, 4, most) for name, most in zip(LONG[:3], (12, 3, 12), strict=True)]
    _, engine = engine_of(*requests, settings=settings)
    engine.submit()
    engine.commit()
    plans = [decode_of(engine.submit()) for _ in range(3)]
    assert [len(rows) for rows in plans] == [3, 3, 2]
    assert plans[2].positions.tolist() == [6, 6]
    assert plans[2].sources is not None and plans[2].sources.tolist() == [0, 2]
    rows = finish(engine)
    assert Counter(row.request_id for row in rows) == {LONG[0]: 11, LONG[1]: 2, LONG[2]: 11}


def test_rows_can_be_taken_out_of_columns() -> None:
    column = np.arange(3)
    one, two, three = (request(name, 4, 12) for name in LONG[:3])
    allocations = tuple(Allocation(row, 0) for row in range(3))
    rows = DecodeRows((one, two, three), allocations, column, column, column, column, None, column - 1)
    taken = rows.take([0, 2])
    assert taken.requests == (one, three) and taken.allocations == (allocations[0], allocations[2])
    assert taken.positions.tolist() == [0, 2]
    assert taken.sources is not None and taken.sources.tolist() == [-1, 1]
