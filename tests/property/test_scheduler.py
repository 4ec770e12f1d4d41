"""The scheduler under random submits, cancels, reservations and failing steps, with a scripted engine.

The oracle: each request alone, fed the same scripted tokens, gives the same answer; whatever happens, and however many
steps are planned ahead, books add up, everything ends, and the same script gives the same plans. The ledger checks that
no block is handed out which a step may still write, the engine that every row goes on from its own token.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.identity import Cause
from loopline.kv.ledger import Allocation
from loopline.messages import TokenRow
from loopline.request import Request
from loopline.sched.plan import StepOutcome, StepPlan
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import SchedulerSettings
from tests.support.scheduling import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    ScriptedEngine,
    expected_answer,
    make,
    request,
    scripted_token,
)

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 2000 if SOAK else 120

Shape = tuple[int, int, int, int]  # prompt tokens, most tokens, depth, stop ids
Script = Sequence[tuple[str, Shape]]


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


CHANGES = ("submit", "submit", "arrive", "start", "cancel", "again")
ACTIONS = (*CHANGES, "step", "step", "plan", "commit", "bad row", "fail")
HOLDING = (*ACTIONS, "hold", "hold")
GENTLE = ("submit", "submit", "arrive", "step", "plan", "commit")
SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 4), st.sampled_from([1, 1, 10]))


def scripts(actions: Sequence[str] = ACTIONS) -> st.SearchStrategy[list[tuple[str, Shape]]]:
    return st.lists(st.tuples(st.sampled_from(actions), SHAPES), max_size=60)


def settings_of(steps_ahead: int, growth_share: float, chunk_tokens: int) -> SchedulerSettings:
    return SchedulerSettings(
        max_running=6,
        chunk_tokens=chunk_tokens,
        max_token_loops=48,
        growth_share=growth_share,
        steps_ahead=steps_ahead,
    )


@dataclass(frozen=True)
class HoldingPolicy(UnifiedPolicy):
    """Holds back the requests whose names it has."""

    held: set[str] = field(default_factory=set)

    def may_compute(self, request_id: str) -> bool:
        return request_id not in self.held


class Player:
    """Plays a script, checks all that must hold after every call, and keeps what each request was given."""

    def __init__(self, chosen: SchedulerSettings, parts: tuple[str, ...] | None) -> None:
        self.policy = HoldingPolicy()
        self.ledger, self.scheduler = make(chosen, self.policy, parts)
        self.engine = ScriptedEngine(self.scheduler, chosen.steps_ahead)
        self.alive: dict[str, Request] = {}
        self.rows: dict[tuple[str, int], list[TokenRow]] = {}  # by id and attempt
        self.asked: dict[tuple[str, int], Request] = {}

    def play(self, script: Script) -> None:
        for number, (action, shape) in enumerate(script):
            self._act(number, action, shape)
            self._check()
        self.policy.held.clear()
        num_steps = 0
        while self.scheduler.has_work:
            self._step()
            num_steps += 1
            assert num_steps < 4000, "something never ends"
        assert not self.engine.in_flight
        assert self.ledger.num_free_blocks == NUM_BLOCKS
        self._check_answers()

    def _act(self, number: int, action: str, shape: Shape) -> None:
        name = sorted(self.alive)[number % len(self.alive)] if self.alive else None
        if action == "submit":
            self._submit(_request(f"r{number}", shape))
        elif action == "arrive":
            self._arrive(_request(f"r{number}", shape))
        elif action == "start":
            self._start(_request(f"r{number}", shape))
        elif action == "cancel" and name is not None:
            self._cancel(name)
        elif action == "again" and name is not None:
            attempt = self.alive[name].attempt + 1
            self._cancel(name)
            self._submit(_request(name, shape, attempt))
        elif action == "hold" and name is not None:
            self.policy.held.symmetric_difference_update({name})
        elif action == "plan":
            self._plan()
        elif action == "commit":
            self._commit()
        elif action == "bad row":
            self._commit(bad_row=number)
        elif action == "fail":
            self._commit(fails=True)
        else:
            self._step()

    def _submit(self, new: Request) -> None:
        cause = self.scheduler.submit(new)
        assert cause == (Cause.TOO_LARGE if new.max_kv_tokens > NUM_BLOCKS * BLOCK_SIZE else None)
        if cause is None:
            self._expect(new)
            assert self.scheduler.submit(new) is Cause.DUPLICATE

    def _arrive(self, new: Request) -> None:
        """A request whose prompt was computed elsewhere, if there is room for it and it goes on."""
        first = scripted_token(new.request_id, len(new.prompt_ids))
        if first in new.params.stop_ids or new.params.max_tokens == 1:
            return
        held = self.scheduler.reserve(new)
        if isinstance(held, Allocation):
            self._expect(new)
            row = TokenRow(new.request_id, new.attempt, len(new.prompt_ids), first, new.params.loops)
            self._take(self.scheduler.activate(held, row))

    def _start(self, new: Request) -> None:
        """A request that is reserved and then computed here, if there is room for it."""
        held = self.scheduler.reserve(new)
        if isinstance(held, Allocation):
            self._expect(new)
            self.scheduler.start_reserved(held)

    def _expect(self, new: Request) -> None:
        self.alive[new.request_id] = self.asked[new.request_id, new.attempt] = new
        self.rows[new.request_id, new.attempt] = []

    def _cancel(self, name: str) -> None:
        allocation = self.scheduler.remove(name)
        if allocation is not None:
            self.ledger.release(allocation)
        self.alive.pop(name, None)

    def _plan(self) -> None:
        if self.engine.may_submit and (plan := self.engine.submit()) is not None:
            check_plan(plan, 48)

    def _commit(self, bad_row: int | None = None, fails: bool = False) -> None:
        if self.engine.in_flight:
            self._learn(self.engine.commit(bad_row, fails))

    def _step(self) -> None:
        outcome = self.engine.step()
        for plan, _ in self.engine.in_flight:
            check_plan(plan, 48)
        if outcome is not None:
            self._learn(outcome)

    def _learn(self, outcome: StepOutcome) -> None:
        for lost in outcome.lost:
            self.ledger.release(lost.allocation)
            del self.alive[lost.request_id]
        for row in outcome.rows:
            assert self.alive[row.request_id].attempt == row.attempt, "a row of a request that had left"
            self._take(row)

    def _take(self, row: TokenRow) -> None:
        self.rows[row.request_id, row.attempt].append(row)

    def _check(self) -> None:
        self.ledger.audit()
        assert self.scheduler.num_in_flight == len(self.engine.in_flight)
        assert self.scheduler.has_work or not self.engine.in_flight

    def _check_answers(self) -> None:
        for (name, attempt), rows in self.rows.items():
            one = self.asked[name, attempt]
            tokens, finish = expected_answer(one)
            given = [row.token_id for row in rows if row.token_id is not None]
            assert given == tokens[: len(given)]
            assert [row.position for row in rows] == list(range(len(one.prompt_ids), len(one.prompt_ids) + len(rows)))
            if self.alive.get(name) is one:
                assert given == tokens and rows[-1].finish is finish


def _request(name: str, shape: Shape, attempt: int = 1) -> Request:
    prompt, most, loops, num_stops = shape
    return request(name, prompt, most, loops, attempt, stop_ids=tuple(range(7, 7 + num_stops)))


@pytest.mark.parametrize("parts", [None, ("model",)], ids=["private", "shared"])
@pytest.mark.parametrize("growth_share", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_every_request_ends_with_its_own_answer(
    steps_ahead: int, growth_share: float, parts: tuple[str, ...] | None
) -> None:
    """Also while the youngest are preempted, while some are held back, and while all prompts share their beginnings."""

    @settings(max_examples=EXAMPLES // 4, deadline=None)
    @given(scripts(HOLDING), st.sampled_from([4, 8, 16]))
    def run(script: Script, chunk_tokens: int) -> None:
        player = Player(settings_of(steps_ahead, growth_share, chunk_tokens), parts)
        player.play(script)
        assert growth_share < 1 or not player.scheduler.num_preempted

    run()


@pytest.mark.parametrize("growth_share", [1.0, 0.0])
def test_steps_ahead_change_no_request(growth_share: float) -> None:
    """The rows of every request are the same, one by one, as without steps ahead."""

    @settings(max_examples=EXAMPLES // 4, deadline=None)
    @given(scripts(GENTLE), st.sampled_from([4, 8]))
    def run(script: Script, chunk_tokens: int) -> None:
        script = [("submit", shape) if action == "arrive" else (action, shape) for action, shape in script]
        players = [Player(settings_of(ahead, growth_share, chunk_tokens), ("model",)) for ahead in (0, 1)]
        for player in players:
            player.play(script)
        assert players[0].rows == players[1].rows

    run()


def outline(plan: StepPlan) -> list[object]:
    """What a plan says, as plain values."""
    decode = [one.decode for one in plan.segments if one.decode is not None]
    return [
        plan.step,
        [(run.request_id, run.first_position, run.token_ids) for run in plan.runs],
        [
            ([one.request_id for one in rows.requests], rows.positions.tolist(), rows.token_ids.tolist())
            for rows in decode
        ],
        [None if rows.sources is None else rows.sources.tolist() for rows in decode],
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_same_script_gives_the_same_plans(steps_ahead: int) -> None:
    @settings(max_examples=EXAMPLES // 4, deadline=None)
    @given(scripts(), st.sampled_from([1.0, 0.0]))
    def run(script: Script, growth_share: float) -> None:
        players = [Player(settings_of(steps_ahead, growth_share, 8), ("model",)) for _ in range(2)]
        for player in players:
            player.play(script)
        first, second = ([outline(plan) for plan in player.engine.plans] for player in players)
        assert first == second

    run()
