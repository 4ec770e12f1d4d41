"""Both workers' cores with fetches, in any order of all messages, with some of them lost: what completes has the tokens
of a single engine, and in the end every block of both is free or cached and nothing is under way."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.policy import DecodePolicy
from loopline.engine.engine import Engine
from loopline.settings import EngineSettings, SchedulerSettings
from prefill_worker.policy import PrefillPolicy
from tests.property.test_worker_pair import EXAMPLES, STEPS, Answers, Script, advance, check, make_request
from tests.support.golden import GOLDEN
from tests.support.pair import BLOCK_SIZE, Pair
from tests.unit.worker.clocks import OwnClock

NAMES = itertools.count()
FETCH_STEPS = (
    "decode_command",
    "poll_decode_sender",
    "poll_prefill_receiver",
    "fetch",
    "fetch_close",
    "fetch_lost",
    "fetch_answer_lost",
    "prefill_event_lost",
)


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """A prefill worker that keeps nothing, so that it always has something to fetch, and a decode worker that does."""
    scheduler = SchedulerSettings(max_running=4, chunk_tokens=8)
    settings_ = EngineSettings(
        model_path=str(GOLDEN / "ouro_fp32"), block_size=BLOCK_SIZE, num_blocks=24, scheduler=scheduler
    )
    return Engine(settings_, PrefillPolicy(shares_prefixes=False)), Engine(settings_, DecodePolicy())


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


def advance_fetch(script: Script, step: str, number: int) -> None:
    pair = script.pair
    match step:
        case "decode_command":
            pair.carry_out_decode_command()
        case "poll_decode_sender":
            pair.poll_decode_sender()
        case "poll_prefill_receiver":
            pair.poll_prefill_receiver()
        case "fetch":
            pair.deliver_fetch(number)
        case "fetch_close":
            pair.deliver_fetch_close(number)
        case "fetch_lost" if number % 3 == 0:
            pair.lose_fetch(number)
        case "fetch_answer_lost" if number % 3 == 0:
            pair.lose_fetch_answer(number)
        case "prefill_event_lost" if number % 3 == 0:
            lose_prefill_notice(pair)
        case _:
            advance(script, step, number)


def lose_prefill_notice(pair: Pair) -> None:
    """A notice of a push to the prefill worker; what its own transfer thread says is never lost."""
    events = pair.channels.prefill_events
    at = next((at for at, event in enumerate(events) if type(event).__name__ == "PushArrived"), None)
    if at is not None:
        del events[at]


def lose_decode_notice(step: str, pair: Pair) -> bool:
    """The shared step takes whatever is first; here the decode worker's own transfer thread speaks too."""
    events = pair.channels.decode_events
    return step == "notice_lost" and bool(events) and type(events[0]).__name__ != "PushArrived"


ORDERS = st.lists(
    st.tuples(st.sampled_from((*STEPS, *FETCH_STEPS, *FETCH_STEPS)), st.integers(0, 200)), min_size=20, max_size=200
)


def test_any_order_of_fetches_gives_right_tokens_and_free_blocks(
    engines: tuple[Engine, Engine], answers: Answers
) -> None:
    fetched = 0

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(ORDERS)
    def run(steps: list[tuple[str, int]]) -> None:
        nonlocal fetched
        pair = Pair(*engines, name=f"fetch{next(NAMES)}", clock=OwnClock())
        script = Script(pair, fetches=True)
        warm(script)
        script.send(make_request("r0", 14, 3))
        for step, number in steps:
            if not lose_decode_notice(step, pair):
                advance_fetch(script, step, number)
            pair.audit()
        script.settle()
        check(script, answers)
        fetched += pair.decode_sender.push_counts.num_bytes
        pair.close()

    run()
    assert fetched, "nothing was ever fetched"


def warm(script: Script) -> None:
    """Whatever the requests before have left, the decode worker has the beginning of every prompt."""
    script.send(make_request("warm", 13, 2))
    script.settle()


@pytest.mark.parametrize("moment", range(24))
def test_a_cancel_at_every_moment_of_a_fetch(moment: int, engines: tuple[Engine, Engine], answers: Answers) -> None:
    """After `moment` rounds of a slow, fair schedule; another request, which fetches too, must not notice."""
    pair = Pair(*engines, name=f"fetch{next(NAMES)}", clock=OwnClock())
    script = Script(pair, fetches=True)
    warm(script)
    script.send(make_request("cancelled", 19, 4))
    script.send(make_request("other", 14, 4))
    channels = pair.channels
    for round_ in range(60):
        if round_ == moment:
            script.cancel("cancelled", overtake=False)
        script.deliver_to_decode()
        script.deliver_to_prefill()
        script.listen(channels.from_decode)
        script.listen(channels.from_prefill)
        pair.step_prefill()
        for step in (*FETCH_STEPS[:5], "command", "poll_receiver", "poll_sender", "prefill_event", "decode_event"):
            advance_fetch(script, step, 1)
        pair.deliver_commit()
        pair.deliver_close()
        pair.step_decode()
        pair.audit()
    script.settle()
    check(script, answers)
    assert [row.token_id for _, row in sorted(script.tokens["other"].items())] == answers.of(script.requests["other"])
    pair.close()
