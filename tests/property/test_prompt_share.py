"""On any machine and with any bounded noise: where the least share fits into the bound, time per token does; and
whatever the bound is, a prompt is computed to its end."""

import random
from types import SimpleNamespace
from typing import cast

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loopline.sched.plan import StepPlan
from loopline.sched.share import TILES, PromptShare, RowSteps
from loopline.settings import SchedulerSettings
from tests.support.scheduling import request
from tests.support.simulated import Machine, Simulated, p99

MACHINES = st.builds(
    Machine,
    decode_s=st.floats(0.001, 0.05),
    pass_s=st.floats(0.0, 0.02),
    token_loop_s=st.floats(1e-6, 2e-4),
    rows=st.sampled_from([RowSteps(), RowSteps((64, 128, 192, 256))]),
)
NOISE = 0.1
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def run(machine: Machine, bound_s: float, seed: int, steps_ahead: int, prompts: list[int]) -> tuple[Simulated, float]:
    """Eight requests decode while prompts are computed one after another; and the time at which these began."""
    noise = random.Random(seed)
    limits = SchedulerSettings(
        chunk_tokens=4096,
        max_token_loops=1 << 20,
        prefill_tokens_per_loop=512,
        max_time_per_token_s=bound_s,
        steps_ahead=steps_ahead,
    )
    made = Simulated(machine, limits, lambda: noise.uniform(1 - NOISE, 1 + NOISE))
    for number in range(8):
        made.submit(request(f"row{number}", 16, 3000, loops=4, stop_ids=()))
    made.run_until("row7", 10)
    since_s = made.now_s
    for number, length in enumerate(prompts):
        made.submit(request(f"long{number}", length, 1, loops=4, stop_ids=()))
        made.run_until(f"long{number}")
    return made, since_s


@SLOW
@given(MACHINES, st.floats(1.5, 8.0), st.integers(0, 99), st.integers(0, 1))
@example(Machine(decode_s=0.024795574989569334, pass_s=0.0, token_loop_s=0.00010872737495939845), 6.4375, 16, 1)
@example(
    Machine(decode_s=0.038089783190780706, pass_s=0.0004936929045109652, token_loop_s=0.00010264579353577288),
    4.125,
    79,
    1,
)
def test_time_per_token_stays_within_a_bound_that_can_be_held(
    machine: Machine, spare: float, seed: int, steps_ahead: int
) -> None:
    bound_s = machine.least_s * spare
    made, since_s = run(machine, bound_s, seed, steps_ahead, [2048, 333, 4096])
    gaps_s = made.gaps_s("row0", since_s)
    passed = sum(one > bound_s for one in gaps_s)
    assert passed <= max(1, len(gaps_s) // 100), f"{passed} of {len(gaps_s)}"
    assert p99(gaps_s) <= bound_s or passed == 1
    assert sum(made.shares) == 2048 + 333 + 4096


@SLOW
@given(MACHINES, st.floats(0.01, 1.0), st.integers(0, 99), st.integers(0, 1))
def test_a_prompt_progresses_whatever_the_bound(machine: Machine, spare: float, seed: int, steps_ahead: int) -> None:
    made, _ = run(machine, machine.least_s * spare, seed, steps_ahead, [777])
    least = machine.rows.padded(1)
    assert sum(made.shares) == 777
    assert all(share >= least for share in made.shares[:-1])
    assert made.scheduler.share.num_passed > 0 or spare > 1 / (1 + NOISE)
    made.ledger.audit()


@SLOW
@given(st.floats(1.0, 30.0), st.floats(0.0, 1.0), st.floats(0.005, 0.1), st.floats(1.1, 4.0), st.integers(0, 99))
def test_a_share_that_slower_rows_made_small_comes_back(
    decode_ms: float, pass_ms: float, token_loop_ms: float, slower: float, seed: int
) -> None:
    """Prompts are always there, so no step is without them but for the share's own."""
    noise = random.Random(seed)
    bound_ms = 1.3 * (decode_ms * slower + pass_ms + 512 * token_loop_ms)
    share = PromptShare(bound_ms / 1000, TILES)

    def step(rows_ms: float, num_tokens: int) -> bool:
        runs = (SimpleNamespace(num_tokens=num_tokens),) if num_tokens else ()
        plan = SimpleNamespace(segments=(SimpleNamespace(decode=range(8), runs=runs, last_loop=4),))
        taken_ms = rows_ms + (pass_ms + num_tokens * 4 * token_loop_ms if num_tokens else 0.0)
        taken_ms *= noise.uniform(0.99, 1.01)
        share.observe(cast(StepPlan, plan), taken_ms / 1000)
        return taken_ms > bound_ms

    def steps(rows_ms: float, count: int) -> tuple[list[int], int]:
        given: list[int] = []
        passed = 0
        for _ in range(count):
            most = share.token_loops({4: 8}, 4)
            assert most is not None
            given.append(min(512, TILES.most(most // 4)))
            passed += step(rows_ms, given[-1])
        return given, passed

    for _ in range(8):
        step(decode_ms, 0)
    steps(decode_ms, 100)
    given, _ = steps(decode_ms * slower, 800)
    assert given.count(0) <= 100
    last, passed = steps(decode_ms * slower, 200)
    assert sorted(last)[100] >= 64, last
    assert passed <= 2
