"""Both clients against a scripted server behind real gRPC: events, cancel, statuses, waiting."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from loopline.client import Accepted, AsyncClient, Chat, Chunk, Client, Completion, Event, Finished, RequestOptions
from loopline.client.convert import event_of
from loopline.errors import (
    CoordinatorUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    LooplineError,
    NoTokenizer,
    Overloaded,
    PeerError,
    RequestRefused,
    RequestTooLarge,
    WorkerLost,
)
from loopline.identity import BudgetCounts
from loopline.messages import HandoffStats
from loopline.request import FinishReason, InitialState, Route, Timing, TokenLogprob, Usage
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import ERROR_KEY, server_options
from loopline.wire.convert import to_proto


class ScriptedServer(loopline_pb2_grpc.LooplineServicer):
    """Answers as told by the label: "fail CODE", "fail CODE KIND", "late CODE" (after the first event), "endless".

    Any other label is answered in full.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.cancelled = threading.Event()
        self.looks_until_serving = 0

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        if request.label.startswith("fail "):
            code, *kind = request.label.removeprefix("fail ").split()
            context.set_trailing_metadata(tuple((ERROR_KEY, name) for name in kind))
            context.abort(grpc.StatusCode[code], "the reason")
        yield loopline_pb2.GenerateEvent(
            accepted=loopline_pb2.Accepted(request_id="r1", seed=2**64 - 1, prompt_tokens=3)
        )
        token = loopline_pb2.Token(id=7, depth=2, logprob=-0.5, exit_probabilities=(0.25, 0.75))
        token.top_logprobs.add(token_id=7, logprob=-0.5)
        yield loopline_pb2.GenerateEvent(chunk=loopline_pb2.Chunk(tokens=[token], text="hé"))
        if request.label.startswith("late "):
            context.abort(grpc.StatusCode[request.label.removeprefix("late ")], "the reason")
        while request.label == "endless" and not self.cancelled.wait(0.01):
            yield loopline_pb2.GenerateEvent(chunk=loopline_pb2.Chunk(text="x"))
        yield loopline_pb2.GenerateEvent(chunk=loopline_pb2.Chunk(tokens=[loopline_pb2.Token(id=8, depth=4)]))
        finished = loopline_pb2.Finished(reason=loopline_pb2.FINISH_REASON_LENGTH, text="!", has_text=True)
        finished.usage.completion_tokens = 2
        finished.route.decode = "d0"
        yield loopline_pb2.GenerateEvent(finished=finished)

    def GetModel(self, request: Any, context: Any) -> Any:
        return loopline_pb2.Model(name="m", vocab_size=320, stop_token_ids=[1, 2])

    def GetStatus(self, request: Any, context: Any) -> Any:
        self.looks_until_serving -= 1
        status = loopline_pb2.Status(serving=self.looks_until_serving < 0, queued=1)
        worker = status.workers.add(name="d0", role="decode", pid=12, handoffs={"reserved": 2})
        worker.blocks.free, worker.blocks.total = 3, 5
        worker.links.add(peer="p0", transport="tcp", bytes_per_s=1e9, is_slow=True)
        worker.budget.MergeFrom(
            loopline_pb2.BudgetCounts(in_flight_bytes=1, limit_bytes=2, num_waiting=3, waited_s=0.5)
        )
        status.workers.add(name="d1", role="decode")
        return status


@pytest.fixture
def server() -> Iterator[tuple[ScriptedServer, str]]:
    servicer = ScriptedServer()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options())
    loopline_pb2_grpc.add_LooplineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(0).wait(5)


@pytest.fixture(params=["blocking", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _events(
    flavour: str, address: str, *arguments: Any, limit: float = math.inf, resume: bool = True, **options: Any
) -> list[Event]:
    """Events of one answer; with a limit the iterator is closed after so many."""
    found: list[Event] = []
    if flavour == "blocking":
        with (
            Client(address, resume=resume) as client,
            contextlib.closing(client.generate(*arguments, **options)) as events,
        ):
            for event in events:
                found.append(event)
                if len(found) >= limit:
                    break
        return found

    async def collect() -> None:
        async with (
            AsyncClient(address, resume=resume) as client,
            contextlib.aclosing(client.generate(*arguments, **options)) as events,
        ):
            async for event in events:
                found.append(event)
                if len(found) >= limit:
                    break

    asyncio.run(collect())
    return found


def test_events_come_in_order_and_whole(server: tuple[ScriptedServer, str], flavour: str) -> None:
    events = _events(flavour, server[1], "hi")
    assert [type(event) for event in events] == [Accepted, Chunk, Chunk, Finished]
    completion = Completion()
    assert (completion.finish_reason, completion.usage, completion.timing, completion.route) == (None,) * 4
    for event in events:
        completion = completion.after(event)
    assert completion.accepted == Accepted("r1", 2**64 - 1, 3)
    assert (completion.token_ids, completion.text, completion.finish_reason) == ((7, 8), "hé!", FinishReason.LENGTH)
    assert completion.tokens[0].logprobs is not None
    assert completion.tokens[0].logprobs.top == (TokenLogprob(7, -0.5),)
    assert completion.tokens[1].logprobs is None
    assert [token.exit_probabilities for token in completion.tokens] == [(0.25, 0.75), ()]
    assert completion.finished is not None
    assert (completion.finished.route.decode, completion.finished.usage.completion_tokens) == ("d0", 2)
    assert (completion.usage, completion.timing, completion.route) == (
        Usage(prompt_tokens=0, completion_tokens=2),
        Timing(),
        Route(decode="d0"),
    )
    assert completion.finished.handoff is None


@pytest.mark.parametrize("stats", [HandoffStats(1, 2, 3, "tcp", 0.5, 4, 5), HandoffStats(0, 0, 0, "", 0.0), None])
def test_a_handoff_is_there_if_there_was_one(stats: HandoffStats | None) -> None:
    """Also one that moved nothing."""
    message = loopline_pb2.GenerateEvent(finished=loopline_pb2.Finished(reason=loopline_pb2.FINISH_REASON_STOP))
    if stats is not None:
        message.finished.handoff.CopyFrom(to_proto(stats))
    event = event_of(message)
    assert isinstance(event, Finished)
    assert event.handoff == stats


def test_complete_is_all_events(server: tuple[ScriptedServer, str]) -> None:
    async def complete() -> Completion:
        async with AsyncClient(server[1]) as client:
            return await client.complete([1, 2])

    with Client(server[1]) as client:
        assert client.complete([1, 2]) == asyncio.run(complete())


def test_what_is_sent(server: tuple[ScriptedServer, str]) -> None:
    servicer, address = server
    with Client(address) as client:
        client.complete("é", label="l", deadline_s=2.5, seed=0, loops=3, stop=("a",), logit_bias={3: -1.5}, logprobs=0)
        client.complete((1, 2), initial_state=InitialState.ZEROS, exit_probabilities=True)
        client.complete(Chat((("user", "é"),)))
        list(client.stream(RequestOptions(prompt=())))
    text, ids, chat, empty = servicer.requests
    assert (text.text, text.deadline_s, text.sampling.seed, text.sampling.loops) == ("é".encode(), 2.5, 0, 3)
    assert text.sampling.HasField("seed")
    assert text.sampling.HasField("logprobs")
    assert (text.sampling.exit_probabilities, ids.sampling.exit_probabilities) == (False, True)
    assert (list(text.sampling.stop), dict(text.sampling.logit_bias)) == ([b"a"], {3: -1.5})
    assert (list(ids.token_ids.ids), ids.HasField("deadline_s"), ids.sampling.HasField("seed")) == (
        [1, 2],
        False,
        False,
    )
    assert ids.sampling.initial_state == loopline_pb2.INITIAL_STATE_ZEROS
    assert (chat.messages.messages[0].role, chat.messages.messages[0].content) == ("user", "é".encode())
    assert empty.WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize("options", [{"seed": 2**64}, {"max_tokens": 2**40}, {"stop": ("\ud800",)}, {"prompt": (-1,)}])
def test_what_cannot_be_sent_is_the_callers_fault(server: tuple[ScriptedServer, str], options: dict[str, Any]) -> None:
    with Client(server[1]) as client, pytest.raises(InvalidRequest):
        client.complete(**({"prompt": "x"} | options))


def test_closing_the_iterator_cancels(server: tuple[ScriptedServer, str], flavour: str) -> None:
    assert len(_events(flavour, server[1], "hi", label="endless", limit=3)) == 3
    assert server[0].cancelled.wait(10)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("fail INVALID_ARGUMENT", InvalidRequest),
        ("fail RESOURCE_EXHAUSTED", RequestTooLarge),
        ("fail RESOURCE_EXHAUSTED Overloaded", Overloaded),
        ("fail UNAVAILABLE", CoordinatorUnreachable),
        ("fail UNAVAILABLE RequestRefused", RequestRefused),
        ("fail UNAVAILABLE WorkerLost", WorkerLost),
        ("fail INVALID_ARGUMENT RequestTooLarge", RequestTooLarge),
        ("fail INVALID_ARGUMENT NoTokenizer", NoTokenizer),
        ("fail INVALID_ARGUMENT OfALaterVersion", InvalidRequest),
        ("late UNAVAILABLE", WorkerLost),
        ("late DEADLINE_EXCEEDED", DeadlineExceeded),
        ("late INTERNAL", PeerError),
    ],
)
def test_a_status_becomes_an_error_with_its_text(
    server: tuple[ScriptedServer, str], flavour: str, label: str, kind: type[LooplineError]
) -> None:
    with pytest.raises(LooplineError, match="the reason") as caught:
        _events(flavour, server[1], "hi", label=label, resume=False)
    assert type(caught.value) is kind


def test_model_and_status(server: tuple[ScriptedServer, str]) -> None:
    async def look() -> tuple[Any, Any]:
        async with AsyncClient(server[1]) as client:
            return await client.model(), await client.status()

    with Client(server[1]) as client:
        model, status = client.model(), client.status()
    assert (model.name, model.vocab_size, model.stop_token_ids) == ("m", 320, (1, 2))
    worker = status.workers[0]
    assert (worker.name, worker.pid, worker.blocks.total, worker.handoffs) == ("d0", 12, 5, {"reserved": 2})
    assert (worker.links[0].transport, worker.links[0].is_slow) == ("tcp", True)
    assert (worker.budget, status.workers[1].budget) == (BudgetCounts(1, 2, 3, 0.5), None)
    assert asyncio.run(look()) == (model, status)


def test_waiting_ends_when_the_cluster_serves(server: tuple[ScriptedServer, str], flavour: str) -> None:
    servicer, address = server
    servicer.looks_until_serving = 3
    _wait_serving(flavour, address, 10)
    assert servicer.looks_until_serving < 0


def test_waiting_has_a_limit(server: tuple[ScriptedServer, str], flavour: str) -> None:
    servicer, address = server
    servicer.looks_until_serving = 1_000_000
    with pytest.raises(DeadlineExceeded, match="does not serve after"):
        _wait_serving(flavour, address, 0.2)
    with pytest.raises(CoordinatorUnreachable, match=r"127.0.0.1:1:"):
        _wait_serving(flavour, "127.0.0.1:1", 0.2)


def _wait_serving(flavour: str, address: str, timeout_s: float) -> None:
    async def wait() -> None:
        async with AsyncClient(address) as client:
            await client.wait_serving(timeout_s)

    if flavour == "asyncio":
        asyncio.run(wait())
        return
    with Client(address) as client:
        client.wait_serving(timeout_s)
