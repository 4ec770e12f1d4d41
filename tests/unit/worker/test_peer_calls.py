"""Calls between workers, against a scripted peer on this machine's loopback."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from loopline.errors import PeerLost
from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import CloseState, Commit, CommitAnswer, HandoffClosed, TokenRow
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import bind, server_options
from loopline.worker.events import CommitAnswered, CommitUndelivered, PrefixAnswered, WriterClosed
from loopline.worker.peer_calls import Answer, PeerCalls
from loopline.worker.writers import Writers
from prefill_worker.service import DecodePeers

KEY = HandoffKey("r", 1)
COMMIT = Commit(KEY, WorkerId("w", 1), 1, TokenRow("r", 1, 3, 7, 4), ())
LIMIT_S = 20.0
FETCH_LIMIT_S = 30.0
REGION = RegionManifest(0, 4, 64, "DRAM", 0, 4)
Reply = Callable[[Any], Coroutine[Any, Any, Any]]


class ScriptedPeer(cluster_pb2_grpc.PeeringServicer):
    """Answers each call with the next reply of the script."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.num_calls = 0
        self.server = grpc.aio.server(options=server_options())
        cluster_pb2_grpc.add_PeeringServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.peer = Peer(WorkerId("peer", 1), "peer-0", f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}")

    async def CloseHandoff(self, request: Any, context: Any) -> Any:
        return await self._reply(context)

    async def FetchPrefix(self, request: Any, context: Any) -> Any:
        return await self._reply(context)

    async def CommitHandoff(self, request: Any, context: Any) -> Any:
        return await self._reply(context)

    async def _reply(self, context: Any) -> Any:
        self.num_calls += 1
        return await self.script.pop(0)(context)


def say(record: object) -> Reply:
    async def reply(context: Any) -> Any:
        return convert.to_proto(record)

    return reply


def abort(code: grpc.StatusCode) -> Reply:
    async def reply(context: Any) -> Any:
        await context.abort(code, "as the script says")

    return reply


async def raises(context: Any) -> Any:
    raise RuntimeError("a bug of the peer")


class Bench:
    """Both kinds of caller, the events that they post, and a peer."""

    def __init__(self) -> None:
        self.peer = ScriptedPeer()
        self.calls = PeerCalls(asyncio.get_running_loop())
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.writers = Writers(self.events.put_nowait, self.calls)
        self.decode_peers = DecodePeers(self._unused, self.events.put_nowait, self._unused, self.calls)

    def _unused(self, *_: object) -> Any:
        raise AssertionError("not called here")

    async def ask(self) -> None:
        await self.writers._ask(KEY, self.peer.peer)


def with_bench(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.peer.server.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(bench)
        finally:
            await bench.calls.close()
            await bench.peer.server.stop(0)

    asyncio.run(main())


def a_fetch(bench: Bench) -> FetchPrefix:
    return FetchPrefix(KEY, bench.peer.peer, b"", REGION, 0, (), FETCH_LIMIT_S)


def test_a_dropped_worker_gets_no_channel_again() -> None:
    async def test(bench: Bench) -> None:
        bench.calls.stub(bench.peer.peer)
        bench.calls.drop(bench.peer.peer.worker)
        assert not bench.calls._channels
        with pytest.raises(PeerLost, match="peer-0 is gone"):
            bench.calls.stub(bench.peer.peer)

    with_bench(test)


def test_what_a_call_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        ended = asyncio.Event()

        async def broken() -> None:
            try:
                raise RuntimeError("a bug of ours")
            finally:
                ended.set()

        bench.calls.start(broken())
        await ended.wait()

    with_bench(test)
    assert "a bug of ours" in caplog.text


def test_an_answer_is_given_once_and_from_any_thread() -> None:
    async def test(bench: Bench) -> None:
        answer: Answer[int] = Answer()
        with pytest.raises(TimeoutError):
            await answer.wait(0.0)
        other: Answer[int] = Answer()
        await asyncio.to_thread(other.give, 1)
        await asyncio.to_thread(other.give, 2)
        assert await other.wait(LIMIT_S) == 1

    with_bench(test)


def test_a_writer_is_asked_until_it_has_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of failure leaves the question open, is logged once, and the next question is asked."""
    caplog.set_level("INFO")

    async def test(bench: Bench) -> None:
        bench.peer.script = [
            abort(grpc.StatusCode.UNAVAILABLE),
            raises,
            abort(grpc.StatusCode.FAILED_PRECONDITION),
            say(HandoffClosed(KEY, CloseState.PENDING)),
            say(HandoffClosed(KEY, CloseState.CLOSED)),
        ]
        for _ in range(5):
            assert bench.events.empty()
            await bench.ask()
        assert bench.events.get_nowait() == WriterClosed(KEY, bench.peer.peer.worker, CloseState.CLOSED)

    with_bench(test)
    assert caplog.text.count("does not answer CloseHandoff") == 1
    assert caplog.text.count("answers CloseHandoff again") == 1


def test_one_question_at_a_time() -> None:
    async def test(bench: Bench) -> None:
        asked, over = asyncio.Event(), asyncio.Event()

        async def slow(context: Any) -> Any:
            asked.set()
            await over.wait()
            return convert.to_proto(HandoffClosed(KEY, CloseState.CLOSED))

        bench.peer.script = [slow]
        bench.writers.ask_close(KEY, bench.peer.peer)
        await asked.wait()
        for _ in range(5):
            await bench.ask()
        over.set()
        assert isinstance(await bench.events.get(), WriterClosed)
        assert bench.peer.num_calls == 1
        assert not bench.writers._asking

    with_bench(test)


def test_a_gone_writer_is_not_asked() -> None:
    async def test(bench: Bench) -> None:
        bench.calls.drop(bench.peer.peer.worker)
        bench.writers.forget(bench.peer.peer.worker)
        await bench.ask()
        assert bench.events.empty() and not bench.peer.num_calls

    with_bench(test)


def test_a_commit_is_sent_again_over_a_broken_connection() -> None:
    async def test(bench: Bench) -> None:
        bench.peer.script = [abort(grpc.StatusCode.UNAVAILABLE), say(CommitAnswer())]
        bench.decode_peers.deliver_commit(bench.peer.peer, COMMIT)
        assert await bench.events.get() == CommitAnswered(KEY, None, "peer-0")
        assert bench.peer.num_calls == 2

    with_bench(test)


def test_a_refused_commit_is_told() -> None:
    async def test(bench: Bench) -> None:
        bench.peer.script = [say(CommitAnswer(Cause.INCOMPLETE))]
        bench.decode_peers.deliver_commit(bench.peer.peer, COMMIT)
        assert await bench.events.get() == CommitAnswered(KEY, Cause.INCOMPLETE, "peer-0")

    with_bench(test)


def test_an_undelivered_commit_is_told() -> None:
    async def test(bench: Bench) -> None:
        bench.peer.script = [raises]
        bench.decode_peers.deliver_commit(bench.peer.peer, COMMIT)
        assert isinstance(await bench.events.get(), CommitUndelivered)
        bench.calls.drop(bench.peer.peer.worker)
        bench.decode_peers.deliver_commit(bench.peer.peer, COMMIT)
        assert isinstance(await bench.events.get(), CommitUndelivered)

    with_bench(test)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, Cause.TRANSFER_TIMEOUT),
        (grpc.StatusCode.UNAVAILABLE, Cause.PEER_LOST),
        (grpc.StatusCode.INTERNAL, Cause.PEER_LOST),
    ],
)
def test_a_fetch_that_is_not_answered_says_whether_it_was_late(code: grpc.StatusCode, cause: Cause) -> None:
    async def test(bench: Bench) -> None:
        bench.peer.script.append(abort(code))
        await bench.decode_peers._ask_prefix(bench.peer.peer, a_fetch(bench))
        answered = bench.events.get_nowait()
        assert isinstance(answered, PrefixAnswered) and answered.sent.cause is cause
        assert code.name in answered.sent.detail

    with_bench(test)


def test_a_fetch_is_asked_for_until_the_decode_worker_has_said_that_it_is_late() -> None:
    async def test(bench: Bench) -> None:
        late = PrefixSent(KEY, bench.peer.peer.worker, cause=Cause.TRANSFER_TIMEOUT, detail="not pushed in time")
        left_s = []

        async def reply(context: Any) -> Any:
            left_s.append(context.time_remaining())
            return convert.to_proto(late)

        bench.peer.script.append(reply)
        await bench.decode_peers._ask_prefix(bench.peer.peer, a_fetch(bench))
        assert bench.events.get_nowait() == PrefixAnswered(late)
        assert left_s[0] > FETCH_LIMIT_S

    with_bench(test)
