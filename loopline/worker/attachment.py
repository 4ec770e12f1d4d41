"""The worker's one stream to its coordinator: Register, then reports up and commands down, until either side ends.

Runs on asyncio; `send` and `beat` may be called from any thread. When the stream breaks everything that was queued
for it is dropped, the worker is told (it gives up its requests), and it joins again as the next epoch.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from loopline.errors import CoordinatorUnreachable, OperatorError
from loopline.messages import CoordinatorMessage, Heartbeat, Register, Rejected, Welcome, WorkerMessage
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import open_channel

logger = logging.getLogger(__name__)
_RETRY_FIRST_S = 0.2
_RETRY_MOST_S = 2.0


class Attachment:
    """Invariant: at most one stream at a time; a message is sent on the stream of the epoch that it was made in."""

    def __init__(
        self,
        address: str,
        register: Callable[[int], Register],
        heartbeat: Callable[[], Heartbeat],
        on_message: Callable[[CoordinatorMessage], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`register` makes the first message for an epoch; the other callables run on the event loop."""
        self._address = address
        self._register = register
        self._heartbeat = heartbeat
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[WorkerMessage] = asyncio.Queue()
        self._coordinator_epoch = 0
        self._epoch = 0

    def send(self, message: WorkerMessage) -> None:
        """Queue a message; any thread. Dropped if the stream breaks first."""
        self._from_any_thread(lambda: self._outbox.put_nowait(message))

    def beat(self) -> None:
        """Send a heartbeat soon; any thread."""
        self._from_any_thread(lambda: self._outbox.put_nowait(self._heartbeat()))

    async def run(self, first_timeout_s: float) -> None:
        """Stay attached until cancelled.

        Raises CoordinatorUnreachable if the first attempt does not succeed within `first_timeout_s`, OperatorError with
        the coordinator's reason if it rejects this worker.
        """
        give_up_at: float | None = self._loop.time() + first_timeout_s
        delay_s = _RETRY_FIRST_S
        async with open_channel(self._address) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
            while True:
                joined = await self._attach_once(stub)
                if joined:
                    give_up_at, delay_s = None, _RETRY_FIRST_S
                    self._drop_queued()
                    self._on_lost()
                elif give_up_at is not None and self._loop.time() >= give_up_at:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {self._address} (tried for {first_timeout_s:g} s)"
                    )
                await asyncio.sleep(delay_s)  # a pause between attempts, not scheduling
                delay_s = min(delay_s * 2, _RETRY_MOST_S)

    async def _attach_once(self, stub: cluster_pb2_grpc.ClusterStub) -> bool:
        """One life of the stream; returns whether it was welcomed."""
        self._epoch += 1
        call = stub.Attach()
        welcomed = False
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(convert.wrap_worker_message(self._register(self._epoch), 0))
            async for envelope in call:
                try:
                    message, epoch = convert.unwrap_coordinator_message(envelope)
                except ValueError as error:
                    logger.warning("ignored a message of the coordinator: %s", error)
                    continue
                if isinstance(message, Rejected):
                    raise OperatorError(f"the coordinator at {self._address} rejects this worker: {message.reason}")
                if isinstance(message, Welcome):
                    self._coordinator_epoch, welcomed = epoch, True
                    writer = asyncio.create_task(self._write(call, message.lease_s / 3))
                elif epoch == self._coordinator_epoch:
                    self._on_message(message)
        except grpc.aio.AioRpcError as error:
            logger.info("the stream to %s ended: %s %s", self._address, error.code().name, error.details())
        except asyncio.InvalidStateError:
            logger.info("the stream to %s ended before it began", self._address)
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        return welcomed

    async def _write(self, call: "grpc.aio.StreamStreamCall[Any, Any]", beat_s: float) -> None:
        """Send what is queued, and a heartbeat at least every `beat_s`."""
        next_beat = self._loop.time()
        while True:
            wait_s = next_beat - self._loop.time()
            message: WorkerMessage
            if wait_s <= 0:
                message = self._heartbeat()
            else:
                try:
                    message = await asyncio.wait_for(self._outbox.get(), wait_s)
                except TimeoutError:
                    message = self._heartbeat()
            if isinstance(message, Heartbeat):
                next_beat = self._loop.time() + beat_s
            await call.write(convert.wrap_worker_message(message, self._coordinator_epoch))

    def _drop_queued(self) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def _from_any_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has closed: the process is ending
            logger.debug("a message came after the end of the event loop")
