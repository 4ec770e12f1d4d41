"""However many rows decode, at whatever depth and under whatever limits: a prompt that waits is computed in every step,
so that it ends within as many steps as there are prompt tokens before its end.
"""

from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loopline.kv.ledger import Ledger
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.sched.share import TILES, RowSteps
from loopline.settings import SchedulerSettings
from tests.support.scheduling import BLOCK_SIZE, ScriptedEngine, request

DEPTHS = st.integers(1, 4)


class Mix(NamedTuple):
    """Depths of rows that decode and go on, and (tokens, depth) of prompts that come then."""

    rows: list[int]
    prompts: list[tuple[int, int]]
    max_token_loops: int
    share: int | None
    bound_s: float | None
    padded_to: RowSteps


MIXES = st.builds(
    Mix,
    rows=st.lists(DEPTHS, max_size=8),
    prompts=st.lists(st.tuples(st.integers(1, 40), DEPTHS), min_size=1, max_size=3),
    max_token_loops=st.integers(1, 64),
    share=st.sampled_from([None, 1, 6, 16]),
    bound_s=st.sampled_from([None, 0.5]),
    padded_to=st.sampled_from([TILES, RowSteps((16, 32))]),
)


def settings_of(mix: Mix, steps_ahead: int) -> SchedulerSettings:
    return SchedulerSettings(
        max_running=16,
        chunk_tokens=16,
        max_token_loops=mix.max_token_loops,
        prefill_tokens_per_loop=mix.share,
        max_time_per_token_s=mix.bound_s,
        steps_ahead=steps_ahead,
    )


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_prompt_that_waits_ends_whatever_decodes_beside_it(steps_ahead: int) -> None:
    @settings(max_examples=30, deadline=None)
    @given(MIXES)
    @example(Mix([1], [(1, 3), (8, 1)], max_token_loops=1, share=None, bound_s=None, padded_to=TILES))
    @example(Mix([1], [(1, 4), (12, 1)], max_token_loops=10, share=None, bound_s=None, padded_to=TILES))
    def run(mix: Mix) -> None:
        scheduler = Scheduler(
            Ledger(2000, BLOCK_SIZE), settings_of(mix, steps_ahead), UnifiedPolicy(), prompt_rows=mix.padded_to
        )
        engine, begun = ScriptedEngine(scheduler, steps_ahead), set[str]()

        def step() -> None:
            outcome = engine.step()
            assert outcome is not None
            begun.update(row.request_id for row in outcome.rows)

        for number, loops in enumerate(mix.rows):
            scheduler.submit(request(f"row{number}", 1, 500, loops, stop_ids=()))
        while len(begun) < len(mix.rows):
            step()
        first_plan, prompts = len(engine.plans), [f"prompt{number}" for number in range(len(mix.prompts))]
        for name, (length, loops) in zip(prompts, mix.prompts, strict=True):
            assert scheduler.submit(request(name, length, 2, loops, stop_ids=())) is None
        num_tokens = sum(length for length, _ in mix.prompts)
        num_steps = 0
        while not begun.issuperset(prompts):
            step()
            num_steps += 1
            assert num_steps <= num_tokens + 2 * steps_ahead, "a prompt waits and is not computed"
        counts = [sum(run.num_tokens for run in plan.runs) for plan in engine.plans[first_plan:]]
        left = num_tokens
        for plan, count in zip(engine.plans[first_plan:], counts, strict=True):
            depths = [run.params.loops for run in plan.runs]
            alone = max([BLOCK_SIZE, *(mix.max_token_loops // depth for depth in depths)])
            assert count or not left, "a step without prompt tokens while some are left"
            assert count <= max(alone, len(depths) * BLOCK_SIZE), "no step has more rows than one of prompts alone"
            left -= count

    run()
