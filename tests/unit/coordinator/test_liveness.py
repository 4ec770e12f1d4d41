"""The event loop, the leases and the names: what is slow, late or broken here must not look like a worker's fault."""

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from coordinator.dispatcher import Dispatcher
from loopline.identity import WorkerId
from loopline.messages import PeerGone, Rejected, WorkerMessage
from loopline.text import TextCodec, load_text
from loopline.wire._generated.loopline.v1 import loopline_pb2
from tests.unit.coordinator.builders import heartbeat
from tests.unit.coordinator.cluster import MODEL, WAIT_S, ScriptedCluster, ScriptedWorker, until
from tests.unit.coordinator.test_service import Answer, message, run


class HeldCodec(TextCodec):
    """Encodes only when the test lets it."""

    def __init__(self, codec: TextCodec) -> None:
        self.__dict__ |= codec.__dict__
        self.asked, self.gate = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.asked.set()
        assert self.gate.wait(WAIT_S)
        return super().encode(text)


class BrokenDispatcher(Dispatcher):
    """Has a bug."""

    def on_message(self, worker: WorkerId, message: WorkerMessage, coordinator_epoch: int) -> None:
        raise KeyError("a bug of ours")


async def beat(*workers: ScriptedWorker) -> None:
    while True:
        for worker in workers:
            await worker.send(heartbeat())
        await asyncio.sleep(0.02)


def test_encoding_a_prompt_does_not_stop_the_event_loop() -> None:
    plain = load_text(MODEL)
    assert plain is not None
    codec = HeldCodec(plain)

    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        answer = Answer(cluster, message())
        await until(codec.asked.is_set, "it is being encoded")
        ids = loopline_pb2.GenerateRequest(
            token_ids=loopline_pb2.TokenIds(ids=[1, 2]), sampling=loopline_pb2.SamplingParams(max_tokens=3)
        )
        assert len((await Answer(cluster, ids).whole()).ids) == 3  # meanwhile
        codec.gate.set()
        assert len((await answer.whole()).ids) == 4

    run(script, codec=codec)


def test_workers_are_not_lost_because_this_process_stood_still(caplog: pytest.LogCaptureFixture) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, decode = await cluster.pair()
        beating = asyncio.ensure_future(beat(prefill, decode))
        time.sleep(2.0)  # noqa: ASYNC251 - that is the point
        until_s = time.monotonic() + 2.0
        await until(lambda: time.monotonic() > until_s, "more than a lease has passed")
        assert cluster.dispatcher.readiness.serving
        assert not prefill.heard_of(PeerGone) and not decode.heard_of(PeerGone)
        beating.cancel()

    with caplog.at_level(logging.WARNING):
        run(script, lease_s=1.5)
    assert "the event loop stood still" in caplog.text


def test_a_bug_in_a_workers_stream_is_logged_as_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair()
        cluster.dispatcher.__class__ = BrokenDispatcher
        await decode.send(heartbeat())
        await until(lambda: decode.ended.is_set(), "its stream ends")

    with caplog.at_level(logging.WARNING):
        run(script)
    assert "a bug of ours" in caplog.text and "Traceback" in caplog.text
    assert "this coordinator failed on its stream, which is a bug" in caplog.text


def test_a_name_in_use_is_rejected() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        await cluster.pair()
        twin = cluster.attach("decode-0", epoch=1)
        await until(lambda: bool(twin.heard_of(Rejected)), "Rejected")
        assert "has joined before" in twin.heard_of(Rejected)[0].reason
        namesake = cluster.attach("decode-0", uuid="another")
        await until(lambda: bool(namesake.heard_of(Rejected)), "Rejected")
        assert namesake.heard_of(Rejected)[0].retry and not twin.heard_of(Rejected)[0].retry

    run(script)


def test_the_kind_of_an_error_reaches_the_client() -> None:
    async def kind_of(cluster: ScriptedCluster, request: Any) -> str:
        answer = Answer(cluster, request)
        await answer.status()
        return str(dict(await answer.call.trailing_metadata())["loopline-error"])

    async def script(cluster: ScriptedCluster) -> None:
        assert await kind_of(cluster, message(max_tokens=3000)) == "RequestTooLarge"
        assert await kind_of(cluster, message(max_tokens=0)) == "InvalidRequest"
        assert await kind_of(cluster, message(deadline_s=0.05)) == "DeadlineExceeded"
        waiting = Answer(cluster, message())
        await until(lambda: cluster.dispatcher.num_queued == 1, "the queue is full")
        assert await kind_of(cluster, message()) == "Overloaded"
        await cluster.dispatcher.drain(0.0)
        await waiting.status()
        assert dict(await waiting.call.trailing_metadata())["loopline-error"] == "RequestRefused"

    run(script, queue_limit=1)
