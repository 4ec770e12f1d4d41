"""More than the workers can take: who waits, who is refused, and who does not read."""

import asyncio
from typing import Any

import grpc
import pytest

from loopline.client import AsyncClient
from loopline.errors import DeadlineExceeded, InvalidRequest, NotRead, Overloaded
from loopline.messages import Cancel, Reserve
from loopline.telemetry.metrics import registry_of
from loopline.wire._generated.loopline.v1 import loopline_pb2_grpc
from loopline.wire.channel import channel_options
from tests.unit.coordinator.cluster import ScriptedCluster, ScriptedWorker, token_at, until
from tests.unit.coordinator.test_service import Answer, message, run

NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # the client's window: 1 KiB a stream


def order_of(decode: ScriptedWorker, accepted: dict[str, str]) -> list[str]:
    """Our names of the requests, in the order in which the worker was asked for blocks; `accepted`: by request id."""
    asked = [reserve.key.request_id for reserve in decode.heard_of(Reserve)]
    return [accepted[request_id] for request_id in asked if request_id in accepted]


def test_a_higher_priority_goes_first() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        wanted = {"first": 0, "second": 0, "background": -3, "urgent": 2}
        answers = {}
        for name, priority in wanted.items():
            answers[name] = Answer(cluster, message(priority=priority))
            await until(lambda: cluster.dispatcher.num_queued == len(answers), "it waits")
        _, decode = await cluster.pair(max_running=1)
        for answer in answers.values():
            assert len((await answer.whole()).ids) == 4
        ids = {answer.events[0].accepted.request_id: name for name, answer in answers.items()}
        assert order_of(decode, ids) == ["urgent", "first", "second", "background"]
        with pytest.raises(InvalidRequest, match="priority is 11; allowed: -10 to 10"):
            await AsyncClient(cluster.address).complete("hello", priority=11)

    run(script)


def test_the_client_learns_when_to_come_again() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        waiting = Answer(cluster, message())
        await until(lambda: cluster.dispatcher.num_queued == 1, "it waits")
        async with AsyncClient(cluster.address) as client:
            with pytest.raises(Overloaded, match="try again in 1 s") as caught:
                await client.complete("hello")
        assert caught.value.retry_after_s == 1.0
        waiting.call.cancel()
        await cluster.until_idle()

    run(script, queue_limit=1)


def test_a_request_that_is_being_read_takes_a_place() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        dispatcher = cluster.dispatcher
        with dispatcher.hold_place(), dispatcher.hold_place():
            code, _ = await Answer(cluster, message()).status()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, _ = await Answer(cluster, message(max_tokens=0)).status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # and has left its place
        waiting = [Answer(cluster, message()) for _ in range(2)]
        await until(lambda: dispatcher.num_queued == 2, "both wait")
        for answer in waiting:
            answer.call.cancel()
        await cluster.until_idle()

    run(script, queue_limit=2)


def test_the_deadline_of_the_call_is_one_of_the_request() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair(pause_at=2)
        call = cluster.stub.Generate(message(max_tokens=50, deadline_s=15.0), timeout=5.0)
        await until(lambda: any(one.request.params.max_tokens == 50 for one in decode.heard_of(Reserve)), "Reserve")
        reserve = decode.heard_of(Reserve)[-1]
        assert 0 < reserve.deadline_s < 5.0
        call.cancel()
        await cluster.until_idle()
        call = cluster.stub.Generate(message(max_tokens=50), timeout=1.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await cluster.until_idle()
        await until(lambda: len(decode.heard_of(Cancel)) >= 2, "Cancel")
        with pytest.raises(DeadlineExceeded):
            async with AsyncClient(cluster.address) as client:
                await client.complete("hello", deadline_s=1e-6)

    run(script)


async def wide_pair(cluster: ScriptedCluster, **options: Any) -> ScriptedWorker:
    """A pair with blocks for the whole context; the decode worker, which has the options."""
    cluster.attach("prefill-0", total_blocks=4096)
    decode = cluster.attach("decode-0", total_blocks=4096, **options)
    await until(lambda: cluster.dispatcher.readiness.serving, "serving")
    return decode


async def read_slowly(address: str, max_tokens: int, go_on: asyncio.Event) -> Any:
    """Take two events, then nothing until `go_on`; the status and the tokens that came."""
    options: Any = [*channel_options(), *NARROW]
    stub: Any = loopline_pb2_grpc.LooplineStub
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = stub(channel).Generate(message(max_tokens=max_tokens))
        ids = [token.id for _ in range(2) for token in (await call.read()).chunk.tokens]
        await go_on.wait()
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                ids += [token.id for token in event.chunk.tokens]
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            return error.code(), error.details(), metadata["loopline-error"], ids
        return grpc.StatusCode.OK, "", "", ids


def test_a_client_that_does_not_read_is_ended_and_hinders_nobody() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        decode = await wide_pair(cluster, max_running=16)
        go_on = asyncio.Event()
        slow = asyncio.ensure_future(read_slowly(cluster.address, 600, go_on))
        others = [Answer(cluster, message(max_tokens=100)) for _ in range(7)]
        for answer in others:
            await answer.whole()
            assert answer.ids == [token_at(position) for position in range(5, 105)], answer.failure
        await cluster.until_idle()  # without the slow one's help
        await until(lambda: not decode.held and bool(decode.heard_of(Cancel)), "Cancel")
        go_on.set()
        code, details, name, ids = await slow
        assert (code, name) == (grpc.StatusCode.ABORTED, NotRead.__name__)
        assert details.startswith("the client has left more than 100 tokens unread; ")
        assert details.endswith(f"{len(ids)} tokens were delivered")
        assert ids == [token_at(position) for position in range(5, 5 + len(ids))] and 100 < len(ids) < 600

    run(script, unread_tokens=100)


def test_a_client_that_reads_late_has_all() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await wide_pair(cluster)
        go_on = asyncio.Event()
        slow = asyncio.ensure_future(read_slowly(cluster.address, 900, go_on))
        await until(lambda: cluster.dispatcher.num_running > 0, "it runs")
        await cluster.until_idle()
        go_on.set()
        code, _, _, ids = await slow
        assert code is grpc.StatusCode.OK and ids == [token_at(position) for position in range(5, 905)]

    run(script)


def test_a_client_that_takes_nothing_for_too_long_is_ended() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        decode = await wide_pair(cluster, pause_at=500)
        go_on = asyncio.Event()
        slow = asyncio.ensure_future(read_slowly(cluster.address, 600, go_on))
        await until(lambda: bool(decode.heard_of(Cancel)), "its request is cancelled")
        await cluster.until_idle()
        go_on.set()
        code, details, name, ids = await slow
        assert (code, name) == (grpc.StatusCode.ABORTED, NotRead.__name__)
        assert details == "the client has taken nothing for 0.3 s; its request was ended"
        assert ids == [token_at(position) for position in range(5, 5 + len(ids))]
        ended = registry_of(cluster.dispatcher.metrics.collect).get_sample_value
        assert ended("loopline_requests_total", {"ending": "unread"}) == 1
        assert ended("loopline_requests_total", {"ending": "cancelled"}) == 0

    run(script, most_write_s=0.3)
