"""Both workers' cores against a scripted coordinator whose messages are delayed, repeated and overtaken by cancels.

Whatever the order: what completes has the tokens of a single engine, and in the end every block of both is free.
"""

import itertools
import os
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopline.engine.engine import Engine
from loopline.engine.local import LocalEngine
from loopline.identity import Cause, HandoffKey
from loopline.messages import (
    Bind,
    Cancel,
    CoordinatorMessage,
    Granted,
    Prefilled,
    RequestFailed,
    Reserve,
    Reserved,
    StartPrefill,
    StepTokens,
    TokenRow,
    WorkerMessage,
)
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings
from loopline.worker.events import CoordinatorLost
from tests.support.golden import GOLDEN
from tests.support.pair import BLOCK_SIZE, PUSH_TIMEOUT_S, Pair, make_engines
from tests.unit.worker.clocks import OwnClock

EXAMPLES = 400 if os.environ.get("LOOPLINE_SOAK") == "1" else 40
NAMES = itertools.count()
DEADLINE_S = 1e6


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return make_engines()


@pytest.fixture(scope="module")
def answers() -> Iterator["Answers"]:
    answers = Answers()
    yield answers
    answers.engine.close()


class Answers:
    """What a single engine gives, remembered."""

    def __init__(self) -> None:
        settings_ = EngineSettings(model_path=str(GOLDEN / "ouro_fp32"), block_size=BLOCK_SIZE, num_blocks=24)
        self.engine = LocalEngine(settings_)
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[int | None]] = {}

    def of(self, request: Request) -> list[int | None]:
        key = (request.prompt_ids, request.params.max_tokens)
        if key not in self._known:  # type: ignore[comparison-overlap]
            rows = self.engine.generate(request)
            self._known[key] = [row.token_id for row in rows]  # type: ignore[index]
        return self._known[key]  # type: ignore[index]


class Script:
    """A coordinator that says the right next thing to each answer, into channels that the test delivers."""

    def __init__(self, pair: Pair, fetches: bool = False) -> None:
        """`fetches`: the prefill worker fetches what the decode worker has before it computes."""
        self.pair = pair
        self.fetch_from_tokens = int(fetches)
        self.to_prefill: deque[CoordinatorMessage] = deque()
        self.to_decode: deque[CoordinatorMessage] = deque()
        self.requests: dict[str, Request] = {}
        self.generation: dict[str, int] = {}
        self.tokens: dict[str, dict[int, TokenRow]] = {}
        self.failed: dict[str, Cause] = {}
        self.cancelled: set[str] = set()

    def key(self, name: str) -> HandoffKey:
        return HandoffKey(name, self.generation[name])

    def send(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.generation[request.request_id] = 1
        self.tokens[request.request_id] = {}
        self.to_decode.append(Reserve(self.key(request.request_id), request, DEADLINE_S))

    def cancel(self, name: str, overtake: bool) -> None:
        """Tell both workers; overtaking puts the cancel before everything that is still on its way."""
        self.cancelled.add(name)
        for channel in (self.to_prefill, self.to_decode):
            message = Cancel(self.key(name), Cause.CANCELLED)
            channel.appendleft(message) if overtake else channel.append(message)

    def take(self, message: WorkerMessage) -> None:
        match message:
            case Reserved(key, _, None) if key.request_id not in self.cancelled:
                self.to_decode.append(Bind(key, self.pair.prefill_peer))
            case Reserved(key, _, cause) if cause is not None:
                self.failed[key.request_id] = cause
            case Granted(key, _, first, runs, None) if key.request_id not in self.cancelled:
                of = self.requests[key.request_id], self.pair.decode_peer
                self.to_prefill.append(StartPrefill(key, *of, first, runs, DEADLINE_S, "", self.fetch_from_tokens))
            case Prefilled(key, _, row):
                self.row(row)
                if row.finish is not None:
                    self.to_decode.append(Cancel(key, Cause.CANCELLED))
            case StepTokens(_, rows):
                for row in rows:
                    self.row(row)
            case RequestFailed(key, cause):
                self.failed[key.request_id] = cause
                self.to_decode.append(Cancel(key, cause))
                self.to_prefill.append(Cancel(key, cause))
            case _:
                pass

    def row(self, row: TokenRow) -> None:
        known = self.tokens[row.request_id].setdefault(row.position, row)
        assert known == row, "one position, two tokens"

    def deliver_to_prefill(self) -> bool:
        if self.to_prefill:
            self.pair.prefill.handle(self.to_prefill.popleft())
            return True
        return False

    def deliver_to_decode(self) -> bool:
        if self.to_decode:
            self.pair.decode.handle(self.to_decode.popleft())
            return True
        return False

    def listen(self, channel: deque[WorkerMessage]) -> bool:
        if channel:
            self.take(channel.popleft())
            return True
        return False

    def let_time_pass(self) -> None:
        """More than a push may take, and less than a request."""
        assert isinstance(self.pair.clock, OwnClock)
        self.pair.clock.time_s += PUSH_TIMEOUT_S
        self.pair.decode.tick()
        self.pair.prefill.tick()

    def settle(self) -> None:
        """Deliver everything; what waits for something that was lost ends with its limit."""
        self._deliver_everything()
        self.let_time_pass()
        self._deliver_everything()

    def _deliver_everything(self) -> None:
        channels = self.pair.channels
        moved = True
        while moved:
            self.pair.settle()
            moved = any(
                [
                    self.deliver_to_decode(),
                    self.deliver_to_prefill(),
                    self.listen(channels.from_decode),
                    self.listen(channels.from_prefill),
                ]
            )


def make_request(name: str, prompt_length: int, max_tokens: int, first: int = 0) -> Request:
    """Prompts of one `first` share their beginnings."""
    prompt = tuple((first + 7 * i) % 250 for i in range(prompt_length))
    return Request(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=max_tokens, loops=4))


def check(script: Script, answers: Answers) -> None:
    pair = script.pair
    pair.audit()
    for engine in (pair.prefill_engine, pair.decode_engine):
        counts = engine.ledger.counts()
        assert counts.free + counts.cached == counts.total, counts
        assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert pair.decode.handoffs() == pair.prefill.handoffs() == ()
    for name, request in script.requests.items():
        expected = answers.of(request)
        rows = script.tokens[name]
        got = [rows[position].token_id for position in sorted(rows)]
        assert got == expected[: len(got)], "tokens of another request, or of garbage KV"
        if name not in script.cancelled and name not in script.failed:
            assert got == expected


STEPS = (
    "to_decode",
    "to_prefill",
    "from_decode",
    "from_prefill",
    "command",
    "poll_sender",
    "poll_receiver",
    "prefill_event",
    "decode_event",
    "commit",
    "commit_again",
    "commit_lost",
    "commit_answer_lost",
    "close",
    "step_prefill",
    "step_decode",
    "send",
    "cancel",
    "cancel_overtakes",
    "notice_lost",
    "time",
)


def advance(script: Script, step: str, number: int) -> None:
    pair, channels = script.pair, script.pair.channels
    names = sorted(script.requests)
    match step:
        case "to_decode":
            script.deliver_to_decode()
        case "to_prefill":
            script.deliver_to_prefill()
        case "from_decode":
            script.listen(channels.from_decode)
        case "from_prefill":
            script.listen(channels.from_prefill)
        case "command":
            pair.carry_out_command()
        case "poll_sender":
            pair.poll_sender()
        case "poll_receiver":
            pair.poll_receiver()
        case "prefill_event":
            pair.deliver_prefill_events()
        case "decode_event":
            pair.deliver_decode_events()
        case "commit":
            pair.deliver_commit(number)
        case "commit_again":
            pair.deliver_commit(number, repeat=True)
        case "commit_lost" if number % 3 == 0:
            pair.lose_commit(number)
        case "commit_answer_lost" if number % 3 == 0:
            pair.deliver_commit(number, answer_is_lost=True)
        case "close":
            pair.deliver_close(number)
        case "step_prefill":
            pair.step_prefill()
        case "step_decode":
            pair.step_decode()
        case "send" if len(names) < 4:
            script.send(make_request(f"r{len(names)}", 1 + number % 21, 1 + number % 5))
        case "cancel" | "cancel_overtakes" if names:
            name = names[number % len(names)]
            if name not in script.cancelled:
                script.cancel(name, overtake=step == "cancel_overtakes")
        case "notice_lost" if number % 3 == 0 and channels.decode_events:
            channels.decode_events.popleft()
        case "time" if number % 3 == 0:
            script.let_time_pass()
        case _:
            pass


SCRIPTS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 200)), min_size=20, max_size=160)


def test_any_order_gives_right_tokens_and_free_blocks(engines: tuple[Engine, Engine], answers: Answers) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(SCRIPTS)
    def run(steps: list[tuple[str, int]]) -> None:
        pair = Pair(*engines, name=f"pair{next(NAMES)}", clock=OwnClock())
        script = Script(pair)
        script.send(make_request("r0", 9, 3))
        for step, number in steps:
            advance(script, step, number)
            pair.audit()
        script.settle()
        check(script, answers)
        pair.close()

    run()


@pytest.mark.parametrize("moment", range(24))
def test_cancel_at_every_state(moment: int, engines: tuple[Engine, Engine], answers: Answers) -> None:
    """One request is cancelled after `moment` rounds of a slow, fair schedule; another must not notice."""
    pair = Pair(*engines, name=f"pair{next(NAMES)}", clock=OwnClock())
    script = Script(pair)
    script.send(make_request("cancelled", 19, 4))
    script.send(make_request("other", 13, 4))
    channels = pair.channels
    for round_ in range(60):
        if round_ == moment:
            script.cancel("cancelled", overtake=False)
        script.deliver_to_decode()
        script.deliver_to_prefill()
        script.listen(channels.from_decode)
        script.listen(channels.from_prefill)
        pair.step_prefill()
        pair.carry_out_command()
        pair.poll_receiver()
        pair.poll_sender()
        pair.deliver_prefill_events()
        pair.deliver_decode_events()
        pair.deliver_commit()
        pair.deliver_close()
        pair.step_decode()
        pair.audit()
    script.settle()
    check(script, answers)
    assert [row.token_id for _, row in sorted(script.tokens["other"].items())] == answers.of(script.requests["other"])
    pair.close()


def test_a_cancel_that_overtakes_leaves_a_tombstone(engines: tuple[Engine, Engine]) -> None:
    pair = Pair(*engines, name=f"pair{next(NAMES)}", clock=OwnClock())
    request, key = make_request("late", 9, 3), HandoffKey("late", 1)
    pair.decode.handle(Cancel(key, Cause.CANCELLED))
    pair.decode.handle(Reserve(key, request, 60.0))
    (refused,) = pair.channels.from_decode
    assert isinstance(refused, Reserved) and refused.cause is Cause.TOMBSTONED
    pair.prefill.handle(Cancel(key, Cause.CANCELLED))
    pair.settle()
    pair.decode.handle(Reserve(HandoffKey("late", 2), request, 60.0))
    pair.decode.handle(Bind(HandoffKey("late", 2), pair.prefill_peer))
    granted = pair.channels.from_decode[-1]
    assert isinstance(granted, Granted) and granted.cause is None
    pair.prefill.handle(StartPrefill(key, request, pair.decode_peer, granted.first_block, granted.runs, 60.0))
    pair.settle()
    failed = pair.channels.from_prefill[-1]
    assert isinstance(failed, RequestFailed) and failed.cause is Cause.TOMBSTONED
    pair.decode.handle(Cancel(HandoffKey("late", 2), Cause.CANCELLED))
    pair.settle()
    pair.audit()
    assert pair.decode_engine.ledger.num_free_blocks == pair.decode_engine.ledger.total_blocks
    pair.close()


def test_a_lost_coordinator_ends_everything(engines: tuple[Engine, Engine], answers: Answers) -> None:
    for rounds in range(14):
        pair = Pair(*engines, name=f"pair{next(NAMES)}", clock=OwnClock())
        script = Script(pair)
        script.send(make_request("r0", 19, 4))
        for _ in range(rounds):
            script.deliver_to_decode()
            script.deliver_to_prefill()
            script.listen(pair.channels.from_decode)
            pair.step_prefill()
            pair.carry_out_command()
            pair.poll_receiver()
        script.cancelled.add("r0")
        pair.prefill.handle(CoordinatorLost())
        pair.decode.handle(CoordinatorLost())
        pair.settle()
        check(script, answers)
        pair.close()


def test_descriptors_are_runs_contiguous_on_both_sides() -> None:
    """Chunks of 2 blocks over 6: on fresh pools 3 pushes of 1 descriptor; on a fragmented one as many as runs."""
    prefill_engine, decode_engine = make_engines()  # nobody has cut up their pools
    for hole in (None, 1):
        pair = Pair(prefill_engine, decode_engine, name=f"pair{next(NAMES)}", clock=OwnClock())
        blockers = [decode_engine.ledger.reserve(BLOCK_SIZE, BLOCK_SIZE) for _ in range(24 if hole else 0)]
        for blocker in blockers[::2]:
            assert blocker is not None
            decode_engine.ledger.release(blocker)
        request, key = make_request("r", 21, 1, first=100 + len(blockers)), HandoffKey("r", 1)
        pair.decode.handle(Reserve(key, request, 60.0))
        pair.decode.handle(Bind(key, pair.prefill_peer))
        granted = pair.channels.from_decode[-1]
        assert isinstance(granted, Granted)
        assert len(granted.runs) == (6 if hole else 1)
        pair.prefill.handle(StartPrefill(key, request, pair.decode_peer, 0, granted.runs, 60.0))
        while pair.step_prefill():
            pass
        prefilled = pair.channels.from_prefill[-1]
        assert isinstance(prefilled, Prefilled)
        assert prefilled.stats.pushes == 3
        assert prefilled.stats.descriptors == (6 if hole else 3)
        assert prefilled.stats.num_bytes == 6 * decode_engine.layout.block_bytes
        pair.decode.handle(Cancel(key, Cause.CANCELLED))
        pair.settle()
        for blocker in blockers[1::2]:
            assert blocker is not None
            decode_engine.ledger.release(blocker)
        assert decode_engine.ledger.counts().free == 24
        pair.audit()
        pair.close()
