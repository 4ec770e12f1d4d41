"""A decode worker that computes some prompts itself while others are handed to it, with real engines and the scripted
coordinator of `test_worker_pair`: messages late, repeated and overtaken by cancels. Tokens are those of one engine, and
in the end every block of both workers is free or cached.
"""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from loopline.engine.engine import Engine
from loopline.identity import Cause, HandoffKey
from loopline.messages import (
    Bind,
    Cancel,
    Granted,
    LocalPrefillStarted,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StepTokens,
    WorkerMessage,
)
from loopline.worker.events import BeginDrain, CoordinatorLost
from tests.property.test_worker_pair import EXAMPLES, SCRIPTS, Answers, Script, advance, check, make_request
from tests.support.pair import Pair, make_engines
from tests.unit.worker.clocks import OwnClock

NAMES = itertools.count()
KEY = HandoffKey("r", 1)
BELOW_TOKENS = 9


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return make_engines()


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.engine.close()


@pytest.fixture
def pair(engines: tuple[Engine, Engine]) -> Iterator[Pair]:
    """After the test nothing is held."""
    made = Pair(*engines, name=f"local{next(NAMES)}", clock=OwnClock())
    yield made
    made.settle()
    made.audit()
    counts = made.decode_engine.ledger.counts()
    assert counts.free + counts.cached == counts.total
    assert made.decode.known() == () and made.decode.handoffs() == ()
    made.close()


class LocalScript(Script):
    """Has what is short, and the rest of what is mostly cached, prefilled by the decode worker."""

    num_local = 0

    def take(self, message: WorkerMessage) -> None:
        if isinstance(message, LocalPrefillStarted):
            self.num_local += message.cause is None
            if message.cause is not None:
                self.failed[message.key.request_id] = message.cause
        is_held = isinstance(message, Reserved) and message.cause is None
        if isinstance(message, Reserved) and is_held and message.key.request_id not in self.cancelled:
            uncached = self.requests[message.key.request_id].num_known_tokens - message.cached_tokens
            if uncached < BELOW_TOKENS:
                self.to_decode.append(StartLocalPrefill(message.key))
                return
        super().take(message)


def test_any_order_gives_right_tokens_and_free_blocks(engines: tuple[Engine, Engine], answers: Answers) -> None:
    num_local = 0

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(SCRIPTS)
    def run(steps: list[tuple[str, int]]) -> None:
        nonlocal num_local
        pair = Pair(*engines, name=f"local{next(NAMES)}", clock=OwnClock())
        script = LocalScript(pair)
        script.send(make_request("r0", 7, 3))
        for step, number in steps:
            advance(script, step, number)
            pair.audit()
        script.settle()
        check(script, answers)
        num_local += script.num_local
        pair.close()

    run()
    assert num_local


def reserve(pair: Pair, prompt: int = 14, max_tokens: int = 4, first: int = 0) -> None:
    pair.decode.handle(Reserve(KEY, make_request("r", prompt, max_tokens, first), 600.0))
    answer = pair.channels.from_decode.pop()
    assert isinstance(answer, Reserved) and answer.cause is None


def start(pair: Pair, key: HandoffKey = KEY) -> Cause | None:
    pair.decode.handle(StartLocalPrefill(key))
    answer = pair.channels.from_decode.pop()
    assert isinstance(answer, LocalPrefillStarted) and answer.key == key
    return answer.cause


def tokens(pair: Pair) -> list[int | None]:
    return [
        row.token_id for message in pair.channels.from_decode if isinstance(message, StepTokens) for row in message.rows
    ]


def test_a_start_that_comes_twice_or_too_late_changes_nothing(pair: Pair, answers: Answers) -> None:
    assert start(pair) is Cause.UNKNOWN
    reserve(pair)
    assert start(pair) is None
    assert start(pair) is Cause.DUPLICATE
    pair.decode.handle(Bind(KEY, pair.prefill_peer))
    refused = pair.channels.from_decode.pop()
    assert isinstance(refused, Granted) and refused.cause is Cause.DUPLICATE
    assert pair.decode.known() == (KEY,)
    pair.settle()
    assert tokens(pair) == answers.of(make_request("r", 14, 4))
    assert start(pair) is Cause.DUPLICATE
    pair.decode.handle(Cancel(KEY, Cause.CANCELLED))
    assert start(pair) is Cause.TOMBSTONED


def test_a_writer_and_the_worker_itself_never_share_a_reservation(pair: Pair) -> None:
    reserve(pair)
    pair.decode.handle(Bind(KEY, pair.prefill_peer))
    assert isinstance(pair.channels.from_decode.pop(), Granted)
    assert start(pair) is Cause.WRONG_WRITER
    assert pair.decode.handoffs() == (("bound", 1),)
    pair.decode.handle(Cancel(KEY, Cause.CANCELLED))


@pytest.mark.parametrize("how", ["cancel", "deadline", "coordinator", "newer"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_ends_in_the_middle_of_a_local_prefill(pair: Pair, how: str, num_steps: int) -> None:
    """Two chunks, so that the end comes before the first, between them and among the answer's tokens."""
    reserve(pair, first=50 + num_steps)
    assert start(pair) is None
    for _ in range(num_steps):
        assert pair.step_decode()
    pair.channels.from_decode.clear()
    if how == "cancel":
        pair.decode.handle(Cancel(KEY, Cause.CANCELLED))
    elif how == "deadline":
        assert isinstance(pair.clock, OwnClock)
        pair.clock.time_s += 601.0
        pair.decode.tick()
        (failed,) = pair.channels.from_decode
        assert isinstance(failed, RequestFailed) and (failed.key, failed.cause) == (KEY, Cause.DEADLINE)
    elif how == "coordinator":
        pair.decode.handle(CoordinatorLost())
    else:
        pair.decode.handle(Reserve(HandoffKey("r", 2), make_request("r", 14, 4), 600.0))
        pair.decode.handle(Cancel(HandoffKey("r", 2), Cause.CANCELLED))
    assert not pair.step_decode() and pair.decode.known() == ()


def test_a_draining_worker_finishes_what_it_holds(engines: tuple[Engine, Engine], answers: Answers) -> None:
    pair = Pair(*engines, name=f"local{next(NAMES)}", clock=OwnClock())
    reserve(pair, first=80)
    pair.decode.handle(BeginDrain())
    assert start(pair) is None
    pair.settle()
    assert tokens(pair) == answers.of(make_request("r", 14, 4, 80))
    assert pair.decode_engine.ledger.counts().held == 0
    pair.close()
