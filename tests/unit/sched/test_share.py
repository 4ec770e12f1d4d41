"""The share of a step that prompts take: within the bound on decode's time per token, on scripted machines."""

import random

import pytest

from loopline.kv.ledger import Allocation
from loopline.messages import TokenRow
from loopline.sched.budget import PromptLimit, StepBudget, share_token_loops
from loopline.sched.share import TILES, PromptShare, RowSteps
from loopline.settings import SchedulerSettings
from tests.support.scheduling import request, scripted_token
from tests.support.simulated import Machine, Simulated, p99

BOUND_S = 0.040
GRAPHS = RowSteps((64, 128, 192, 256))


def settings(share: int | None, bound_s: float | None, steps_ahead: int = 0) -> SchedulerSettings:
    return SchedulerSettings(
        chunk_tokens=4096,
        max_token_loops=1 << 20,
        prefill_tokens_per_loop=share,
        max_time_per_token_s=bound_s,
        steps_ahead=steps_ahead,
    )


def long_prompt_beside_eight(made: Simulated, prompt: int = 4096) -> list[float]:
    """Times per token of one of eight requests while a long prompt is computed, ascending."""
    for number in range(8):
        made.submit(request(f"row{number}", 40, 3000, loops=4, stop_ids=()))
    made.run_until("row7", 20)
    since_s = made.now_s
    made.submit(request("long", prompt, 1, loops=4, stop_ids=()))
    made.run_until("long")
    return made.gaps_s("row0", since_s)


def test_p99_is_within_the_bound_with_it_and_not_without() -> None:
    within = Simulated(Machine(), settings(512, BOUND_S))
    assert p99(long_prompt_beside_eight(within)) <= BOUND_S
    assert max(within.shares) > 160, "the bound is made use of"
    assert within.scheduler.share.num_passed == within.scheduler.share.num_least == 0
    fixed = Simulated(Machine(), settings(512, None))
    assert p99(long_prompt_beside_eight(fixed)) > BOUND_S
    assert set(fixed.shares) == {512}
    whole = Simulated(Machine(), settings(None, None))
    assert p99(long_prompt_beside_eight(whole)) > 0.3
    assert whole.shares == [4096]


def test_it_holds_one_step_ahead_and_with_the_padding_of_graphs() -> None:
    machine = Machine(rows=GRAPHS, pass_s=0.004)
    made = Simulated(machine, settings(512, BOUND_S, steps_ahead=1))
    assert p99(long_prompt_beside_eight(made)) <= BOUND_S
    assert made.shares[0] == 64 and max(made.shares) >= 192
    assert set(made.shares[:-1]) <= {64, 128, 192, 256}, "a pass is never padded in vain"


def test_the_fixed_share_stays_the_most() -> None:
    made = Simulated(Machine(), settings(32, 1.0))
    long_prompt_beside_eight(made)
    assert max(made.shares) == 32


def test_a_bound_that_nothing_fits_into_does_not_stop_a_prompt() -> None:
    machine = Machine()
    made = Simulated(machine, settings(512, machine.decode_s / 2))
    gaps_s = long_prompt_beside_eight(made, 256)
    assert set(made.shares) == {8}
    assert gaps_s[-1] == pytest.approx(machine.least_s)
    assert made.scheduler.share.num_passed == 32
    assert made.scheduler.share.num_least == 31, "of the first step nothing is known yet"


def test_without_a_bound_nothing_is_learnt_and_nothing_counted() -> None:
    made = Simulated(Machine(), settings(64, None))
    long_prompt_beside_eight(made, 256)
    assert made.scheduler.share.token_loops({4: 8}, 4) is None
    assert made.scheduler.share.num_passed == 0


def test_one_outlier_costs_little_and_a_slower_machine_is_followed() -> None:
    factors = iter([1.0] * 60 + [20.0] + [1.0] * 40 + [1.6] * 2000)
    made = Simulated(Machine(), settings(512, BOUND_S), lambda: next(factors))
    long_prompt_beside_eight(made, 24_576)
    before, outlier = made.shares[:35], made.shares[40:75]
    assert max(outlier) > max(before) / 2, "one outlier does not make the share small for long"
    slow_s = made.gaps_s("row0", made.now_s - 0.4)
    assert len(slow_s) > 10 and slow_s[-1] <= BOUND_S


def test_after_a_restless_time_the_share_comes_back() -> None:
    draw = random.Random(5)
    restless = [draw.uniform(0.9, 2.5) for _ in range(200)]
    factors = iter([1.0] * 60 + restless + [draw.uniform(0.98, 1.02) for _ in range(2000)])
    made = Simulated(Machine(), settings(512, BOUND_S), lambda: next(factors))
    long_prompt_beside_eight(made, 24_576)
    assert min(made.shares[:-1]) == 8
    assert made.shares[-2] > 100


def test_rows_that_join_take_from_the_share() -> None:
    machine = Machine(tile_s=0.008)
    made = Simulated(machine, settings(512, BOUND_S))
    for number in range(8):
        made.submit(request(f"row{number}", 40, 4000, loops=4, stop_ids=()))
    made.run_until("row7", 20)
    made.submit(request("long", 24_576, 1, loops=4, stop_ids=()))
    for _ in range(40):
        made.step()
    least_before = min(made.shares[-5:])
    joins = made.scheduler.reserve(request("row8", 16, 4000, loops=4, stop_ids=()))  # a second tile: 8 ms more
    assert isinstance(joins, Allocation)
    made.scheduler.activate(joins, TokenRow("row8", 1, 16, scripted_token("row8", 16), 4))
    made.run_until("row8", 4)
    since_s = made.now_s
    made.run_until("long")
    assert p99(made.gaps_s("row0", since_s)) <= BOUND_S
    assert max(made.shares[-20:-1]) < least_before


@pytest.mark.parametrize("rows", [TILES, GRAPHS, RowSteps((8, 16, 100))])
def test_padding_and_the_most_that_is_padded_to_no_more(rows: RowSteps) -> None:
    for count in range(400):
        assert rows.padded(count) >= count
        assert rows.most(rows.padded(count)) == rows.padded(count)
        assert rows.most(count) <= count and rows.padded(rows.most(count)) == rows.most(count)
    assert TILES.padded(9) == 16 and TILES.most(15) == 8 and TILES.most(7) == 0
    assert GRAPHS.padded(1) == 64 and GRAPHS.most(63) == 0 and GRAPHS.most(300) == 296


def test_the_prompts_of_a_depth_share_their_padding() -> None:
    budget = StepBudget(1 << 20, None, PromptLimit(64 * 4 + 64 * 8, GRAPHS))
    assert budget.tokens_left(4) == 192
    budget.charge_prompt(5, 4)
    assert budget.tokens_left(4) == 187
    assert budget.tokens_left(8) == 64
    budget.charge_prompt(60, 8)
    assert budget.tokens_left(8) == 4
    assert budget.tokens_left(4) == 59


def test_the_share_of_a_submission() -> None:
    assert share_token_loops(64, 4) == 256
    assert share_token_loops(64, 32) == 2048


def test_before_anything_was_measured_the_share_is_the_least() -> None:
    share = PromptShare(BOUND_S, TILES)
    assert share.token_loops({4: 3}, 4) == 32
    assert PromptShare(BOUND_S, GRAPHS).token_loops({4: 3}, 32) == 64 * 32
