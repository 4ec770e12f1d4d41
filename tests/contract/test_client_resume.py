"""An answer whose calls break, against a server with the coordinator's own intake and streams behind real gRPC: what
the user sees is the undisturbed answer, wherever it breaks."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.effects import Ending, Outcome
from coordinator.intake import Intake
from coordinator.render import accepted_event, chunk_event, finished_event
from coordinator.streams import ClientStream, Finish, Taken, Tokens
from loopline.client import Accepted, AsyncClient, Chunk, Client, Completion, Event, Finished, Token
from loopline.client.resume import Answer
from loopline.errors import (
    CoordinatorUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    LooplineError,
    Overloaded,
    RequestRefused,
    WorkerLost,
)
from loopline.intake import RequestOptions
from loopline.messages import TokenRow
from loopline.model_spec import load_model_spec
from loopline.request import FinishReason, InitialState, Request, Route, Timing, TokenLogprob, TokenLogprobs, Usage
from loopline.text import load_text
from loopline.wire._generated.loopline.v1 import loopline_pb2_grpc
from loopline.wire.channel import ERROR_KEY, bind, server_options

MODEL = Path(__file__).parents[2] / "configs" / "models" / "tiny-ouro"
ANSWER = "aé€😀 the end"
IDS = tuple(ANSWER.encode())  # its tokenizer has a token for each byte
LIMIT_S = 30.0  # of everything that a test waits for
BEFORE_ACCEPTED = -1


class ScriptedCoordinator(loopline_pb2_grpc.LooplineServicer):
    """Answers every prompt with IDS, a token at a time. `script` has one entry for each call: the number of tokens,
    those delivered before included, after which it breaks, or "CODE ERROR" to refuse it with; later calls go well."""

    def __init__(self, *script: int | str) -> None:
        spec = load_model_spec(MODEL)
        self._intake = Intake(
            spec=spec,
            codec=load_text(MODEL),
            max_loops=spec.default_loops,
            initial_state=InitialState.NOISE,
            default_deadline_s=LIMIT_S,
            exit_gate=True,
        )
        self._script = list(script)
        self.requests: list[Any] = []

    def Generate(self, message: Any, context: Any) -> Iterator[Any]:
        self.requests.append(message)
        fate = self._script.pop(0) if self._script else math.inf
        if isinstance(fate, str):
            code, name = fate.split()
            context.set_trailing_metadata(((ERROR_KEY, name),))
            context.abort(grpc.StatusCode[code], "the reason")
        if fate == BEFORE_ACCEPTED:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        submission = self._intake.resolve(message)
        request = submission.request
        yield accepted_event(request)
        if submission.whole is not None:
            assert submission.decoder is not None
            yield finished_event(Finish(_outcome(request, submission.whole), submission.decoder.finish()))
            return
        stream = ClientStream(submission.decoder, 9999)
        for index in range(len(request.generated_ids), request.params.max_tokens):
            if index >= fate:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            is_stopped = stream.push(_row(request, index)) is Taken.STOPPED
            tokens = asyncio.run(stream.next_event())
            assert isinstance(tokens, Tokens)
            yield chunk_event(tokens)
            if is_stopped:
                break
        if fate == request.params.max_tokens:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        stream.end(_outcome(request, FinishReason.LENGTH))
        finish = asyncio.run(stream.next_event())
        assert isinstance(finish, Finish)
        yield finished_event(finish)


def _row(request: Request, index: int) -> TokenRow:
    logprobs = None if request.params.logprobs is None else TokenLogprobs(-index, (TokenLogprob(IDS[index], -index),))
    exits = (1 / (index + 2), 1 - 1 / (index + 2)) if request.params.exit_probabilities else ()
    return TokenRow(
        request.request_id, 1, len(request.prompt_ids) + index, IDS[index], request.params.loops, None, logprobs, exits
    )


def _outcome(request: Request, reason: FinishReason) -> Outcome:
    return Outcome(
        ending=Ending.FINISHED,
        reason=reason,
        detail="",
        usage=Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=request.params.max_tokens),
        timing=Timing(queued_s=0.001, ttft_s=0.002, total_s=0.003),
        route=Route("prefill-0", "decode-0"),
        stats=None,
    )


@contextlib.contextmanager
def serving(servicer: ScriptedCoordinator, port: int = 0) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options())
    loopline_pb2_grpc.add_LooplineServicer_to_server(servicer, server)
    bound = bind(server, "127.0.0.1", port)
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(0).wait(LIMIT_S)


@pytest.fixture(params=["blocking", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def events_of(flavour: str, address: str, *, resume: bool = True, **options: Any) -> list[Event]:
    """All events of one answer of len(IDS) tokens."""
    options = {"max_tokens": len(IDS), "deadline_s": LIMIT_S} | options
    if flavour == "blocking":
        with Client(address, resume=resume) as client:
            return list(client.generate("hello", **options))

    async def collect() -> list[Event]:
        async with AsyncClient(address, resume=resume) as client:
            return [event async for event in client.generate("hello", **options)]

    return asyncio.run(collect())


def whole(events: list[Event]) -> Completion:
    """What the user has; checks the order of events."""
    assert isinstance(events[0], Accepted) and isinstance(events[-1], Finished)
    assert all(isinstance(event, Chunk) for event in events[1:-1])
    completion = Completion()
    for event in events:
        completion = completion.after(event)
    return completion


def check_undisturbed(servicer: ScriptedCoordinator, events: list[Event], num_calls: int) -> Completion:
    found = whole(events)
    assert (found.token_ids, found.text) == (IDS, ANSWER)
    assert found.finished is not None and found.accepted is not None
    assert found.finished.reason is FinishReason.LENGTH
    assert found.finished.usage == Usage(prompt_tokens=5, completion_tokens=len(IDS))
    assert 0 < found.finished.timing.ttft_s <= found.finished.timing.total_s < LIMIT_S
    assert len(servicer.requests) == num_calls
    return found


@pytest.mark.parametrize("breaks_after", [BEFORE_ACCEPTED, *range(len(IDS) + 1)])
def test_wherever_it_breaks_the_answer_goes_on(breaks_after: int, flavour: str) -> None:
    """Among the places are the middles of three characters of several bytes, and the moment before Finished."""
    servicer = ScriptedCoordinator(breaks_after)
    with serving(servicer) as address:
        found = check_undisturbed(servicer, events_of(flavour, address, logprobs=1, exit_probabilities=True), 2)
    assert [token.logprobs for token in found.tokens] == [
        TokenLogprobs(-index, (TokenLogprob(token_id, -index),)) for index, token_id in enumerate(IDS)
    ]
    exits = [token.exit_probabilities for token in found.tokens]
    assert exits == [(1 / (index + 2), 1 - 1 / (index + 2)) for index in range(len(IDS))]
    first, second = servicer.requests
    assert list(second.delivered_token_ids) == list(IDS[: max(0, breaks_after)])
    assert (second.text, second.sampling.max_tokens) == (first.text, first.sampling.max_tokens)
    assert not first.sampling.HasField("seed")
    assert found.accepted is not None
    if breaks_after != BEFORE_ACCEPTED:
        assert second.sampling.seed == found.accepted.seed
    assert 0 < second.deadline_s < first.deadline_s == LIMIT_S


@pytest.mark.parametrize("script", [(2, 2), (1, 4), (BEFORE_ACCEPTED, BEFORE_ACCEPTED, 3, 4), (0, 0, len(IDS))])
def test_it_may_break_again(script: tuple[int, ...], flavour: str) -> None:
    servicer = ScriptedCoordinator(*script)
    with serving(servicer) as address:
        check_undisturbed(servicer, events_of(flavour, address, seed=9), len(script) + 1)
    assert all(request.sampling.seed == 9 for request in servicer.requests)


@pytest.mark.parametrize("breaks_after", range(len(IDS)))
@pytest.mark.parametrize("stop", ["😀 th", "the e", "e x"])
def test_a_stop_string_is_found_across_the_break(breaks_after: int, stop: str, flavour: str) -> None:
    servicer = ScriptedCoordinator(breaks_after)
    with serving(servicer) as address:
        found = whole(events_of(flavour, address, stop=(stop,)))
        undisturbed = whole(events_of(flavour, address, stop=(stop,)))
    assert (found.token_ids, found.text) == (undisturbed.token_ids, undisturbed.text)
    assert found.text == ANSWER.partition(stop)[0]
    assert found.finish_reason is undisturbed.finish_reason


def test_an_answer_that_ends_in_half_a_character_has_it_once(flavour: str) -> None:
    texts = []
    for script in ((), (2,), (1, 2)):
        servicer = ScriptedCoordinator(*script)
        with serving(servicer) as address:
            texts.append(whole(events_of(flavour, address, max_tokens=2)).text)
    assert texts == ["a\ufffd"] * 3


def test_what_the_user_had_before_counts(flavour: str) -> None:
    servicer = ScriptedCoordinator(6)
    with serving(servicer) as address:
        found = whole(events_of(flavour, address, delivered_token_ids=IDS[:4]))
    assert (found.token_ids, found.text) == (IDS[4:], ANSWER[2:])  # the third byte of the euro sign is yet to come
    assert list(servicer.requests[1].delivered_token_ids) == list(IDS[:6])


def test_a_coordinator_that_comes_back_at_its_port_is_found(flavour: str) -> None:
    """A broken connection, then nobody there, then another server."""
    found: list[Event] = []
    has_tokens, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedCoordinator):
        def Generate(self, message: Any, context: Any) -> Iterator[Any]:
            for number, event in enumerate(super().Generate(message, context)):
                yield event
                if number == 4:
                    has_tokens.set()
                    go_on.wait(LIMIT_S)

    def read() -> None:
        found.extend(events_of(flavour, address))

    reader = threading.Thread(target=read)
    with serving(Slow()) as address:
        reader.start()
        assert has_tokens.wait(LIMIT_S)
        threading.Timer(0.2, go_on.set).start()  # the server's own end waits for its handlers
    servicer = ScriptedCoordinator()
    with serving(servicer, int(address.rpartition(":")[2])):
        reader.join(LIMIT_S)
        check_undisturbed(servicer, found, 1)


@pytest.mark.parametrize("refusal", ["UNAVAILABLE RequestRefused", "RESOURCE_EXHAUSTED Overloaded"])
def test_a_coordinator_that_leaves_or_is_full_after_a_break_is_asked_again(refusal: str, flavour: str) -> None:
    servicer = ScriptedCoordinator(3, refusal)
    with serving(servicer) as address:
        check_undisturbed(servicer, events_of(flavour, address), 3)


@pytest.mark.parametrize(
    ("script", "kind", "num_calls"),
    [
        (("UNAVAILABLE WorkerLost",), WorkerLost, 1),
        ((2, "UNAVAILABLE WorkerLost"), WorkerLost, 2),
        (("RESOURCE_EXHAUSTED Overloaded",), Overloaded, 1),
        ((2, "INVALID_ARGUMENT InvalidRequest"), InvalidRequest, 2),
    ],
)
def test_what_the_cluster_gave_up_is_not_asked_for_again(
    script: tuple[int | str, ...], kind: type[LooplineError], num_calls: int, flavour: str
) -> None:
    servicer = ScriptedCoordinator(*script)
    with serving(servicer) as address, pytest.raises(kind, match="the reason") as caught:
        events_of(flavour, address)
    assert type(caught.value) is kind
    assert len(servicer.requests) == num_calls


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ((2,), WorkerLost),
        ((BEFORE_ACCEPTED,), CoordinatorUnreachable),
        (("UNAVAILABLE RequestRefused",), RequestRefused),
    ],
)
def test_without_resuming_the_first_break_is_the_end(
    script: tuple[int | str, ...], kind: type[LooplineError], flavour: str
) -> None:
    servicer = ScriptedCoordinator(*script)
    with serving(servicer) as address, pytest.raises(kind) as caught:
        events_of(flavour, address, resume=False)
    assert type(caught.value) is kind
    assert len(servicer.requests) == 1


def test_the_deadline_ends_the_waiting(flavour: str) -> None:
    servicer = ScriptedCoordinator(*[2] * 1000)
    with serving(servicer) as address, pytest.raises(DeadlineExceeded, match="2 tokens were delivered"):
        events_of(flavour, address, deadline_s=0.5)
    with pytest.raises(CoordinatorUnreachable, match=r"127.0.0.1:1;"):
        events_of(flavour, "127.0.0.1:1", deadline_s=0.3)


class Gone(grpc.RpcError):
    """What gRPC raises when nobody is there."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class Refused(Gone):
    """A full queue that says when to come again."""

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((ERROR_KEY, "Overloaded"), ("grpc-retry-pushback-ms", self._hint))


@pytest.mark.parametrize(("hint", "hint_s", "pause_s"), [("2500", 2.5, 2.5), ("1", 0.001, 0.1), ("-1", None, 0.1)])
def test_a_full_queue_is_asked_again_when_it_said(hint: str, hint_s: float | None, pause_s: float) -> None:
    answer = _answer(True)
    answer.next_call(100.0)
    with pytest.raises(Overloaded) as caught:  # it was never let in: the user decides
        answer.pause_s(Refused(hint), 100.0)
    assert caught.value.retry_after_s == hint_s
    answer.take(Accepted("r", 1, 5), 100.0)
    assert answer.pause_s(Refused(hint), 100.0) == pause_s


@pytest.mark.parametrize(("is_known", "patience_s"), [(False, 5.0), (True, 15.0)])
def test_without_a_deadline_patience_has_an_end(is_known: bool, patience_s: float) -> None:
    answer, now_s = _answer(is_known), 100.0
    with pytest.raises(CoordinatorUnreachable):
        while True:
            answer.next_call(now_s)
            pause_s = answer.pause_s(Gone(), now_s)
            assert 0 < pause_s <= 1.0
            now_s += pause_s
    assert now_s == pytest.approx(100.0 + patience_s)


def test_patience_begins_anew_with_every_token_and_not_with_every_call() -> None:
    answer, now_s = _answer(True), 0.0
    chunk = Chunk((Token(5, 4),), "")
    for _ in range(3):
        answer.next_call(now_s)
        answer.take(Accepted("r", 1, 5), now_s)
        answer.take(chunk, now_s)
        now_s += answer.pause_s(Gone(), now_s) + 10.0
    assert list(answer.next_call(now_s).delivered_token_ids) == [5, 5, 5]
    assert answer.take(chunk, now_s) is chunk
    with pytest.raises(WorkerLost, match=r"did not come back in 15 s; 4 tokens were delivered"):
        while True:  # a request that kills the coordinator again and again
            now_s += answer.pause_s(Gone(), now_s)
            answer.next_call(now_s)
            assert answer.take(Accepted("r", 1, 5), now_s) is None


def _answer(is_known: bool) -> Answer:
    return Answer(RequestOptions(prompt="x"), "", None, "host:1", now_s=100.0, resume=True, is_known=is_known)
