"""The servicers and the dispatcher with scripted workers over loopback gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from loopline.client import AsyncClient
from loopline.errors import RequestRefused
from loopline.identity import Cause
from loopline.messages import Cancel, PeerGone, Reserve
from loopline.wire._generated.loopline.v1 import cluster_pb2, cluster_pb2_grpc, loopline_pb2
from loopline.wire.channel import open_channel
from tests.unit.coordinator.builders import heartbeat
from tests.unit.coordinator.cluster import WAIT_S, ScriptedCluster, scripted_cluster, text_of, token_at, until

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "ouro_fp32"  # a checkpoint without a tokenizer
Script = Callable[[ScriptedCluster], Awaitable[None]]


def run(script: Script, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(3 * WAIT_S), scripted_cluster(**options) as cluster:
            await script(cluster)

    asyncio.run(main())


def message(max_tokens: int = 4, text: bytes = b"hello", **fields: Any) -> Any:
    sampling = loopline_pb2.SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return loopline_pb2.GenerateRequest(text=text, sampling=sampling, **fields)


class Answer:
    """One Generate call, read in the background."""

    def __init__(self, cluster: ScriptedCluster, request: Any) -> None:
        self.call = cluster.stub.Generate(request)
        self.events: list[Any] = []
        self.failure: grpc.aio.AioRpcError | None = None
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.call:
                self.events.append(event)
        except grpc.aio.AioRpcError as error:
            self.failure = error
        except asyncio.CancelledError:
            pass

    async def whole(self) -> "Answer":
        async with asyncio.timeout(WAIT_S):
            await asyncio.shield(self.task)  # else it would end early and in silence
        return self

    async def status(self) -> tuple[grpc.StatusCode, str]:
        await self.whole()
        assert self.failure is not None
        return self.failure.code(), self.failure.details() or ""

    @property
    def ids(self) -> list[int]:
        return [token.id for event in self.events for token in event.chunk.tokens]

    @property
    def text(self) -> str:
        return "".join(event.chunk.text + event.finished.text for event in self.events)

    @property
    def finished(self) -> Any:
        assert self.failure is None, self.failure
        return self.events[-1].finished


def test_a_request_without_trouble() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        answer = await Answer(cluster, message(max_tokens=4, sampling={"seed": 7}, label="mine")).whole()
        accepted = answer.events[0].accepted
        assert (accepted.seed, accepted.prompt_tokens) == (7, 5)
        assert accepted.request_id not in ("", "mine")
        assert answer.ids == [token_at(position) for position in range(5, 9)]
        assert answer.text == text_of(range(5, 9))
        finished = answer.finished
        assert finished.reason == loopline_pb2.FINISH_REASON_LENGTH and finished.has_text
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 4)
        assert (finished.route.prefill, finished.route.decode) == ("prefill-0", "decode-0")
        assert finished.handoff.transport == "scripted"
        assert 0 <= finished.timing.queued_s <= finished.timing.ttft_s <= finished.timing.total_s

    run(script)


def test_serving_needs_a_token_through_a_pair() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        cluster.attach("prefill-0")
        decode = cluster.attach("decode-0", refusals=[Cause.NO_ROOM])
        await until(lambda: bool(decode.heard_of(Reserve)), "a probe")
        assert not cluster.dispatcher.readiness.serving
        await decode.send(heartbeat())
        await until(lambda: cluster.dispatcher.readiness.serving, "serving")
        status = await cluster.stub.GetStatus(loopline_pb2.GetStatusRequest())
        assert status.serving and [worker.state for worker in status.workers] == ["ready", "ready"]
        assert [link.peer for worker in status.workers for link in worker.links] == ["decode-0"]
        await decode.die()
        await until(lambda: not cluster.dispatcher.readiness.serving, "not serving")
        cluster.attach("decode-0", epoch=2)
        await until(lambda: cluster.dispatcher.readiness.serving, "serving again")

    run(script)


@pytest.mark.parametrize(
    ("request_message", "text"),
    [
        (loopline_pb2.GenerateRequest(), "the prompt is missing"),
        (message(text=b""), "text is empty"),
        (message(text=b"ab\xffc"), "text is not UTF-8: byte 2 is 0xff"),
        (loopline_pb2.GenerateRequest(token_ids=loopline_pb2.TokenIds()), "the prompt is empty"),
        (loopline_pb2.GenerateRequest(token_ids=loopline_pb2.TokenIds(ids=[1, 320])), r"token_ids[1] is token id 320"),
        (loopline_pb2.GenerateRequest(messages=loopline_pb2.ChatMessages()), "messages is empty"),
        (
            loopline_pb2.GenerateRequest(
                messages=loopline_pb2.ChatMessages(messages=[loopline_pb2.ChatMessage(role="user", content=b"\x80")])
            ),
            "messages[0].content is not UTF-8",
        ),
        (message(max_tokens=0), "max_tokens is 0"),
        (message(max_tokens=-5), "max_tokens is -5"),
        (message(sampling={"top_k": -1}), "top_k is -1"),
        (message(sampling={"temperature": float("nan")}), "temperature is nan"),
        (message(sampling={"top_p": 0.0}), "top_p is 0.0"),
        (message(sampling={"loops": 0}), "loops is 0; allowed: 1 to 4"),
        (message(sampling={"loops": 5}), "loops is 5; allowed: 1 to 4"),
        (message(sampling={"logprobs": 21}), "logprobs is 21"),
        (message(sampling={"exit_probabilities": True}), "the setting model.exit_gate is off"),
        (message(sampling={"initial_state": 9}), "initial_state is 9"),
        (message(sampling={"stop": [b"\xc3"]}), "stop[0] is not UTF-8"),
        (message(sampling={"stop": [b""]}), "a stop string has 0 characters"),
        (message(sampling={"stop_token_ids": [999]}), "stop_token_ids"),
        (message(sampling={"logit_bias": {400: 1.0}}), "logit_bias"),
        (message(deadline_s=0.0), "deadline_s is 0.0"),
        (message(deadline_s=float("inf")), "deadline_s is inf; allowed: above 0, at most 86400"),
        (message(deadline_s=float("nan")), "deadline_s is nan"),
        (message(deadline_s=86_400.5), "deadline_s is 86400.5"),
        (message(text=b"x" * 700_000), "the prompt has 700000 bytes; the model's context of 2048 tokens holds at most"),
        (
            loopline_pb2.GenerateRequest(token_ids=loopline_pb2.TokenIds(ids=[1] * 2049)),
            "prompt has 2049 token ids; the model's context is 2048",
        ),
        (message(delivered_token_ids=[97] * 3000), "delivered_token_ids has 3000 token ids"),
        (message(delivered_token_ids=[321]), "delivered_token_ids[0] is token id 321"),
        (message(max_tokens=2, delivered_token_ids=[97, 98, 99]), "3 tokens were already delivered"),
        (message(delivered_token_ids=[97, 98, 99], sampling={"stop": [b"b"]}), "go on behind a stop string"),
        (message(max_tokens=3000), "the model's context is 2048"),
        (message(max_tokens=1500), "the KV arena can hold at most 1024"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(request_message: Any, text: str) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        code, details = await Answer(cluster, request_message).status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and text in details
        await cluster.until_idle()  # the warm-up request may be about to end

    run(script)


def test_text_needs_a_tokenizer_and_token_ids_do_not() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        code, details = await Answer(cluster, message()).status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "no tokenizer" in details
        token_ids = loopline_pb2.TokenIds(ids=[1, 2, 3])
        stop = loopline_pb2.SamplingParams(stop=[b"x"])
        code, details = await Answer(cluster, loopline_pb2.GenerateRequest(token_ids=token_ids, sampling=stop)).status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "stop_token_ids" in details
        sampling = loopline_pb2.SamplingParams(max_tokens=3)
        answer = await Answer(cluster, loopline_pb2.GenerateRequest(token_ids=token_ids, sampling=sampling)).whole()
        assert len(answer.ids) == 3 and not answer.finished.has_text and answer.text == ""

    run(script, model=GOLDEN)


def test_closing_the_call_cancels_at_every_worker() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair(pause_at=2)
        answer = Answer(cluster, message(max_tokens=50))
        await until(lambda: len(answer.ids) >= 2, "two tokens")
        answer.call.cancel()
        await until(lambda: bool(decode.heard_of(Cancel)), "Cancel")
        await cluster.until_idle()
        assert decode.held == {}

    run(script)


def test_a_stop_string_cuts_the_text_and_cancels() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair(pause_at=8)
        answer = await Answer(cluster, message(max_tokens=50, sampling={"stop": [b"ij"]})).whole()
        assert answer.text == "fgh" and answer.finished.reason == loopline_pb2.FINISH_REASON_STOP
        assert answer.finished.usage.completion_tokens == 5
        await until(lambda: bool(decode.heard_of(Cancel)), "Cancel")

    run(script)


def test_a_full_queue_refuses_with_a_hint() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        waiting = [Answer(cluster, message()) for _ in range(2)]
        await until(lambda: cluster.dispatcher.num_queued == 2, "two wait")
        refused = Answer(cluster, message())
        assert await refused.status() == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "2 requests are waiting; the queue's limit is 2; try again in 1 s",
        )
        assert dict(await refused.call.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
        await cluster.pair()  # they waited for workers
        for answer in waiting:
            assert len((await answer.whole()).ids) == 4

    run(script, queue_limit=2)


def test_a_deadline_ends_it_in_the_queue_and_while_it_runs() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        code, details = await Answer(cluster, message(deadline_s=0.05)).status()
        assert (code, details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline passed; 0 tokens were delivered")
        _, decode = await cluster.pair(pause_at=2)
        answer = Answer(cluster, message(max_tokens=50, deadline_s=2.0))
        code, details = await answer.status()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and len(answer.ids) == 2 and "2 tokens" in details
        await until(lambda: bool(decode.heard_of(Cancel)), "Cancel")

    run(script)


@pytest.mark.parametrize("who", ["decode-0", "prefill-0"])
def test_a_lost_worker_is_replaced_in_the_middle_of_an_answer(who: str) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair(pause_at=3)
        answer = Answer(cluster, message(max_tokens=10))
        await until(lambda: len(answer.ids) >= 3, "three tokens")
        cluster.attach(who.replace("0", "1"))
        await cluster.workers[who].die()
        if who == "prefill-0":  # the decode worker has everything: it goes on by itself
            decode.go_on.set()
        await answer.whole()
        assert answer.ids == [token_at(position) for position in range(5, 15)]
        assert answer.text == text_of(range(5, 15))
        route = answer.finished.route
        if who == "decode-0":
            assert (route.decode, list(route.earlier)) == ("decode-1", ["decode-0"])
        else:
            assert (route.decode, list(route.earlier)) == ("decode-0", [])

    run(script)


def test_a_silent_worker_loses_its_lease_and_what_it_says_later_is_counted() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, decode = await cluster.pair()
        async with asyncio.timeout(WAIT_S):
            while not decode.ended.is_set():  # only the prefill worker speaks
                await prefill.send(heartbeat())
                await asyncio.sleep(0.02)
        assert any(gone.worker == decode.worker and not gone.proven for gone in prefill.heard_of(PeerGone))
        again = cluster.attach("decode-0", epoch=2)
        await until(lambda: cluster.dispatcher.readiness.serving, "serving again")
        await again.send(heartbeat(), epoch=12345)
        await until(lambda: cluster.dispatcher.ignored[Cause.STALE] >= 1, "counted")

    run(script, lease_s=1.5)


def test_a_reaped_process_is_told_as_proof(caplog: pytest.LogCaptureFixture) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, decode = await cluster.pair()
        stub: Any = cluster_pb2_grpc.ClusterStub
        async with open_channel(cluster.address) as channel:
            exit_of = partial(cluster_pb2.WorkerExit, pid=decode.register.pid, exit_status=-9, name="decode-0")
            await stub(channel).ReportExit(exit_of(uuid="another"))  # the same name and process id, elsewhere
            assert cluster.dispatcher.readiness.serving
            await stub(channel).ReportExit(exit_of(uuid=decode.register.peer.worker.uuid))
            await stub(channel).ReportExit(cluster_pb2.WorkerExit(name="decode-1", uuid="unheard of"))
        proven = PeerGone(decode.worker, proven=True)
        await until(lambda: proven in prefill.heard_of(PeerGone), "proof")
        assert not cluster.dispatcher.readiness.serving
        assert (
            "ended with exit status -9" in caplog.text and "decode-1 (pid unknown) is proven to be gone" in caplog.text
        )

    run(script)


def test_a_refusing_worker_is_skipped_until_its_heartbeat() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair()
        decode.refusals.append(Cause.NO_ROOM)
        answer = Answer(cluster, message())
        await until(lambda: not decode.refusals and cluster.dispatcher.num_queued == 1, "back in the queue")
        await decode.send(heartbeat())
        await answer.whole()
        assert len(answer.ids) == 4

    run(script)


@pytest.mark.parametrize("delivered", [[], [97]], ids=["new", "goes on"])
def test_what_was_taken_before_workers_joined_meets_their_arena(delivered: list[int]) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        answer = Answer(cluster, message(max_tokens=100, delivered_token_ids=delivered))
        await until(lambda: cluster.dispatcher.num_queued == 1, "it waits")
        cluster.attach("prefill-0")
        cluster.attach("decode-0", total_blocks=4)
        code, details = await answer.status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "the KV arena can hold at most 64" in details

    run(script)


def test_a_drain_lets_requests_finish_and_ends_the_rest() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair(pause_at=2)
        answer = Answer(cluster, message(max_tokens=4))
        await until(lambda: len(answer.ids) >= 2, "two tokens")
        drained = asyncio.ensure_future(cluster.dispatcher.drain(WAIT_S))
        await until(lambda: not cluster.dispatcher.readiness.serving, "draining")
        code, details = await Answer(cluster, message()).status()
        assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in details
        with pytest.raises(RequestRefused, match="shutting down") as caught:  # the client is answered, so no more
            await AsyncClient(cluster.address, resume=False).complete("hello")
        assert type(caught.value) is RequestRefused
        decode.go_on.set()
        assert len((await answer.whole()).ids) == 4
        await drained

    run(script)


def test_a_drain_has_a_limit() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair(pause_at=2)
        answer = Answer(cluster, message(max_tokens=40))
        await until(lambda: len(answer.ids) >= 2, "two tokens")
        await cluster.dispatcher.drain(0.05)
        code, details = await answer.status()
        assert code is grpc.StatusCode.UNAVAILABLE and "2 tokens were delivered" in details

    run(script)


def test_many_requests_share_the_workers() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair(max_running=2)
        cluster.attach("decode-1")
        answers = [Answer(cluster, message(max_tokens=6)) for _ in range(30)]
        for answer in answers:
            assert (await answer.whole()).ids == [token_at(position) for position in range(5, 11)]
        await cluster.until_idle()
        assert {answer.finished.route.decode for answer in answers} == {"decode-0", "decode-1"}

    run(script, queue_limit=30)


def test_the_model_card() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        card = await cluster.stub.GetModel(loopline_pb2.GetModelRequest())
        assert (card.name, card.vocab_size, card.max_loops, card.arena_tokens) == ("tiny", 320, 4, 0)
        await cluster.pair()
        card = await cluster.stub.GetModel(loopline_pb2.GetModelRequest())
        assert (card.arena_tokens, card.kv_bytes_per_token, card.has_tokenizer) == (1024, 1024, True)

    run(script)
