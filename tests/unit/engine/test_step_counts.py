"""What an engine counts: token-loops to the last one, prefix hits, steps by what was in them."""

from collections.abc import Iterator

import pytest

from loopline.engine.engine import Engine
from loopline.engine.step_counts import PromptRate, Rows, TokenPhase
from loopline.identity import Cause
from loopline.request import Request, SamplingParams
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings
from tests.support.golden import MODELS

LOOPS = 3
PROMPT = tuple(range(5, 45))
NEW = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield Engine(EngineSettings(model_path=str(MODELS / "tiny-ouro"), dtype="fp32", num_blocks=32), UnifiedPolicy())


def run(engine: Engine, *request_ids: str) -> None:
    for request_id in request_ids:
        params = SamplingParams(max_tokens=NEW, loops=LOOPS)
        assert engine.scheduler.submit(Request(request_id=request_id, prompt_ids=PROMPT, params=params)) is None
    while engine.step() is not None:
        pass


def test_a_request_costs_its_tokens_times_its_depth_and_a_cached_one_less(engine: Engine) -> None:
    counts, found = engine.counts, engine.scheduler.prefix_counts
    run(engine, "r1")
    assert counts.token_loops == {TokenPhase.PREFILL: len(PROMPT) * LOOPS, TokenPhase.DECODE: (NEW - 1) * LOOPS}
    assert counts.tokens == {TokenPhase.PREFILL: len(PROMPT), TokenPhase.DECODE: NEW - 1}
    assert (found.queries, found.hits) == (len(PROMPT), 0)
    assert counts.seconds[Rows.PREFILL].count == 1
    assert counts.seconds[Rows.DECODE].count == NEW - 1
    assert counts.seconds[Rows.MIXED].count == 0
    run(engine, "r2")
    cached = 32  # the whole blocks of 16
    assert (found.queries, found.hits) == (2 * len(PROMPT), cached)
    assert counts.tokens[TokenPhase.PREFILL] == 2 * len(PROMPT) - cached


def test_a_reservation_looks_for_its_prompt_once_and_for_no_answer(engine: Engine) -> None:
    run(engine, "r1")
    found = engine.scheduler.prefix_counts
    before, generated = (found.queries, found.hits), tuple(range(100, 120))
    params = SamplingParams(max_tokens=NEW + len(generated), loops=LOOPS)
    request = Request(request_id="r4", prompt_ids=PROMPT, params=params, generated_ids=generated)
    allocation = engine.scheduler.reserve(request)
    assert not isinstance(allocation, Cause)
    engine.scheduler.start_reserved(allocation)
    while engine.step() is not None:
        pass
    assert (found.queries - before[0], found.hits - before[1]) == (len(PROMPT), 32)


def test_a_step_that_fails_is_counted(engine: Engine) -> None:
    request = Request(request_id="r3", prompt_ids=(-1,), params=SamplingParams(max_tokens=1, loops=LOOPS))
    assert engine.scheduler.submit(request) is None
    outcome = engine.step()
    assert outcome is not None
    for lost in outcome.lost:
        engine.ledger.release(lost.allocation)
    assert [lost.request_id for lost in outcome.lost] == ["r3"]
    assert engine.counts.failed_steps == 1


def test_the_first_prompt_does_not_count_for_the_rate_and_an_old_rate_is_not_known() -> None:
    now_s = [0.0]
    rate = PromptRate(lambda: now_s[0])
    rate.observe(100, 50.0)  # it compiled
    assert rate.token_loops_per_s == 0.0
    rate.observe(100, 0.5)
    assert rate.token_loops_per_s == 200.0
    now_s[0] = PromptRate.KNOWN_FOR_S + 1
    assert rate.token_loops_per_s == 0.0
    rate.observe(100, 0.5)
    assert rate.token_loops_per_s == 200.0
