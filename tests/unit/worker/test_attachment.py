"""The stream to the coordinator, against a scripted coordinator on this machine's loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from loopline.errors import AccessRefused, CoordinatorUnreachable, OperatorError
from loopline.identity import BlockCounts, Capacity, Fingerprint, Peer, Role, WorkerId, WorkerLoad
from loopline.messages import (
    CoordinatorMessage,
    Drain,
    Heartbeat,
    Register,
    Rejected,
    StepTokens,
    Welcome,
    WorkerMessage,
)
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import bind, server_options
from loopline.worker.attachment import Attachment

LIMIT_S = 20.0
LEASE_S = 60.0
LOAD = WorkerLoad(0, False, 0, 0, 0, 0, BlockCounts(1, 0, 0, 0, 1), (), ())


class ScriptedCoordinator(cluster_pb2_grpc.ClusterServicer):
    """Each stream is given to the next function of the script."""

    def __init__(self) -> None:
        self.script: list[Callable[[Any, AsyncIterator[WorkerMessage]], Coroutine[Any, Any, None]]] = []
        self.registered: list[Register] = []
        self.server = grpc.aio.server(options=server_options())
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"

    async def Attach(self, messages: AsyncIterator[Any], context: Any) -> None:
        async def said() -> AsyncIterator[WorkerMessage]:
            async for envelope in messages:
                yield convert.unwrap_worker_message(envelope)[0]

        worker = said()
        register = await anext(worker)
        assert isinstance(register, Register)
        self.registered.append(register)
        await self.script.pop(0)(context, worker)


async def say(context: Any, message: CoordinatorMessage, epoch: int = 5) -> None:
    await context.write(convert.wrap_coordinator_message(message, epoch))


async def welcome(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
    """Takes the worker in and leaves it at once."""
    await say(context, Welcome(5, LEASE_S))


async def reject(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
    await say(context, Rejected("a worker named w is alive", retry=True))


async def reject_for_good(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
    await say(context, Rejected("not this one"))


class Bench:
    """An attachment to a scripted coordinator, and what it told its worker."""

    def __init__(self) -> None:
        self.coordinator = ScriptedCoordinator()
        self.epoch = 0
        self.told: asyncio.Queue[CoordinatorMessage | str] = asyncio.Queue()
        self.attachment = Attachment(self.coordinator.address, self._register, lambda: Heartbeat(LOAD, False))

    def _register(self) -> Register:
        self.epoch += 1
        peer = Peer(WorkerId("w", self.epoch), "w", "here:1")
        return Register(peer, Role.DECODE, 1, Fingerprint(()), Capacity(16, 1, 1, 1))

    async def run(self, timeout_s: float = LIMIT_S) -> None:
        await self.attachment.run(timeout_s, self.told.put_nowait, lambda: self.told.put_nowait("lost"))


def with_bench(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.coordinator.server.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                await test(bench)
        finally:
            await bench.coordinator.server.stop(0)

    asyncio.run(main())


def step(number: int) -> StepTokens:
    return StepTokens(number, ())


def test_messages_go_both_ways_and_another_epochs_are_ignored() -> None:
    async def test(bench: Bench) -> None:
        heard: asyncio.Queue[WorkerMessage] = asyncio.Queue()

        async def talk(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await say(context, Welcome(5, LEASE_S))
            await say(context, Drain(1.0), epoch=4)
            await say(context, Drain(2.0))
            async for message in worker:
                heard.put_nowait(message)

        bench.coordinator.script = [talk]
        running = asyncio.create_task(bench.run())
        assert await bench.told.get() == Drain(2.0)
        await asyncio.to_thread(bench.attachment.send, step(1))
        assert isinstance(await heard.get(), Heartbeat)
        assert await heard.get() == step(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_bench(test)


def test_finish_writes_everything_and_ends_the_stream() -> None:
    """However slowly the coordinator reads: the last tokens are never lost."""

    async def test(bench: Bench) -> None:
        heard: list[WorkerMessage] = []

        async def listen(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await say(context, Welcome(5, LEASE_S))
            await say(context, Drain(1.0))
            async for message in worker:
                heard.append(message)
                await asyncio.sleep(0.001)  # slower than the worker sends

        bench.coordinator.script = [listen]
        running = asyncio.create_task(bench.run())
        await bench.told.get()

        def send_all() -> None:
            for number in range(300):
                bench.attachment.send(step(number))

        await asyncio.to_thread(send_all)
        await bench.attachment.finish(LIMIT_S)
        assert [message for message in heard if isinstance(message, StepTokens)] == [step(n) for n in range(300)]
        await running

    with_bench(test)


def test_finish_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bench: Bench) -> None:
        over = asyncio.Event()

        async def deaf(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await say(context, Welcome(5, LEASE_S))
            await say(context, Drain(1.0))
            await over.wait()

        bench.coordinator.script = [deaf]
        running = asyncio.create_task(bench.run())
        await bench.told.get()
        await bench.attachment.finish(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        over.set()

    with_bench(test)
    assert "were not taken" in caplog.text


def test_finish_without_a_stream_returns_at_once() -> None:
    async def test(bench: Bench) -> None:
        await bench.attachment.finish(LIMIT_S)

    with_bench(test)


def test_a_broken_stream_is_told_and_made_anew_as_the_next_life() -> None:
    async def test(bench: Bench) -> None:
        bench.coordinator.script = [welcome, welcome]
        running = asyncio.create_task(bench.run())
        assert await bench.told.get() == "lost"
        assert await bench.told.get() == "lost"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [register.peer.worker.epoch for register in bench.coordinator.registered] == [1, 2]

    with_bench(test)


def test_a_dead_writer_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be sent is logged and costs the stream: a worker that only listens would look alive and be dumb."""

    async def test(bench: Bench) -> None:
        async def listen(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await say(context, Welcome(5, LEASE_S))
            await say(context, Drain(1.0))
            async for _ in worker:
                pass

        bench.coordinator.script = [listen, listen]
        running = asyncio.create_task(bench.run())
        assert await bench.told.get() == Drain(1.0)
        bench.attachment.send("not a message")  # type: ignore[arg-type]
        assert await bench.told.get() == "lost"
        assert await bench.told.get() == Drain(1.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_bench(test)
    assert "is given up" in caplog.text


def test_nothing_of_an_old_life_is_sent_in_a_new_one() -> None:
    async def test(bench: Bench) -> None:
        heard: asyncio.Queue[WorkerMessage] = asyncio.Queue()

        async def listen(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await say(context, Welcome(5, LEASE_S))
            await say(context, Drain(1.0))
            async for message in worker:
                heard.put_nowait(message)

        bench.coordinator.script = [welcome, listen]
        running = asyncio.create_task(bench.run())
        assert await bench.told.get() == "lost"
        bench.attachment.send(step(1))
        assert await bench.told.get() == Drain(1.0)
        bench.attachment.send(step(2))
        while not isinstance(message := await heard.get(), StepTokens):
            pass
        assert message == step(2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_bench(test)


def test_a_rejection_that_passes_is_waited_out() -> None:
    """An earlier life of the same name is alive until its lease lapses."""

    async def test(bench: Bench) -> None:
        bench.coordinator.script = [reject, reject, welcome]
        running = asyncio.create_task(bench.run())
        assert await bench.told.get() == "lost"
        assert len(bench.coordinator.registered) == 3
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with_bench(test)


def test_a_rejection_that_lasts_ends_the_worker_with_its_reason() -> None:
    async def test(bench: Bench) -> None:
        bench.coordinator.script = [reject] * 50
        with pytest.raises(OperatorError, match="a worker named w is alive"):
            await bench.run(timeout_s=0.3)
        assert len(bench.coordinator.registered) > 1

    with_bench(test)


def test_a_rejection_for_good_ends_the_worker_at_once() -> None:
    async def test(bench: Bench) -> None:
        bench.coordinator.script = [reject_for_good]
        with pytest.raises(OperatorError, match="not this one"):
            await bench.run()

    with_bench(test)


def test_nobody_there_is_named() -> None:
    async def test(bench: Bench) -> None:
        await bench.coordinator.server.stop(0)
        with pytest.raises(CoordinatorUnreachable, match=bench.coordinator.address):
            await bench.run(timeout_s=0.1)

    with_bench(test)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED])
def test_a_refused_token_ends_the_worker_at_once(code: grpc.StatusCode) -> None:
    async def test(bench: Bench) -> None:
        async def refuse(context: Any, worker: AsyncIterator[WorkerMessage]) -> None:
            await context.abort(code, "a token is missing")

        bench.coordinator.script += [refuse]
        with pytest.raises(AccessRefused, match=r"a token is missing; security\.cluster_token_file must have"):
            await bench.run()
        assert len(bench.coordinator.registered) == 1

    with_bench(test)
