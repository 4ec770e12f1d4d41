"""The worker's one stream to its coordinator: Register, then reports up and commands down, until either side ends.

Runs on asyncio; `send` and `beat` may be called from any thread. When the stream breaks the worker is told (it gives up
its requests), and it joins again as its next life; what was queued for the old stream is dropped.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from loopline.errors import AccessRefused, CoordinatorUnreachable, OperatorError
from loopline.messages import CoordinatorMessage, Heartbeat, Register, Rejected, Welcome, WorkerMessage
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import DEFAULT_MAX_MESSAGE_BYTES, open_channel
from loopline.worker.peer_calls import describe

logger = logging.getLogger(__name__)
_RETRY_FIRST_S = 0.2
_RETRY_MOST_S = 0.5  # a coordinator that starts again should have its workers back at once
_BEATS_PER_LEASE = 3
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it

Stream = grpc.aio.StreamStreamCall[Any, Any]
OnMessage = Callable[[CoordinatorMessage], None]


@dataclass(frozen=True)
class _Finish:
    """Stands in the outbox behind the last message of the process."""


class Attachment:
    """Invariant: at most one stream at a time; nothing queued before a stream was welcomed is sent on it."""

    def __init__(
        self,
        address: str,
        register: Callable[[], Register],
        heartbeat: Callable[[], Heartbeat],
        credentials: Credentials = NO_CREDENTIALS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """`register` makes the first message of the worker's next life; both run on the event loop that this is made
        on. `credentials` are shown to the coordinator."""
        self._address = address
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._last_failure = ""
        self._register = register
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[WorkerMessage | _Finish] = asyncio.Queue()
        self._is_finishing = False
        self._is_detached = asyncio.Event()
        self._is_detached.set()

    def send(self, message: WorkerMessage) -> None:
        """Queue a message; any thread. Dropped if the stream breaks first."""
        self._from_any_thread(lambda: self._outbox.put_nowait(message))

    def beat(self) -> None:
        """Send a heartbeat soon; any thread."""
        self._from_any_thread(lambda: self._outbox.put_nowait(self._heartbeat()))

    async def run(self, timeout_s: float, on_message: OnMessage, on_lost: Callable[[], None]) -> None:
        """Stay attached until cancelled, or until `finish` has ended the stream.

        Raises CoordinatorUnreachable if the first attempt does not succeed within `timeout_s`, AccessRefused at once
        where the coordinator does not take this worker's token, and OperatorError with the coordinator's reason where
        it rejects this worker; for a reason that may pass by itself, only when that has lasted for `timeout_s`.
        """
        silent_since_s: float | None = self._loop.time()  # None: it has been welcomed
        rejected_since_s: float | None = None
        delay_s = _RETRY_FIRST_S
        async with open_channel(self._address, self._credentials, self._max_message_bytes) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
            while not self._is_finishing:
                answer = await self._attach_once(stub, on_message)
                now_s = self._loop.time()
                if isinstance(answer, Welcome):
                    silent_since_s = rejected_since_s = None
                    delay_s = _RETRY_FIRST_S
                    logger.info("the stream to %s is over", self._address)
                    on_lost()
                elif isinstance(answer, Rejected):
                    if rejected_since_s is None:
                        rejected_since_s = now_s
                        logger.info("rejected: %s", answer.reason)
                    if not answer.retry or now_s - rejected_since_s >= timeout_s:
                        raise OperatorError(f"the coordinator at {self._address} rejects this worker: {answer.reason}")
                elif silent_since_s is not None and now_s - silent_since_s >= timeout_s:
                    raise CoordinatorUnreachable(
                        f"no coordinator answers at {self._address} (tried for {timeout_s:g} s){self._last_failure}"
                    )
                await asyncio.sleep(delay_s)  # a pause between attempts, not scheduling
                delay_s = min(delay_s * 2, _RETRY_MOST_S)

    async def finish(self, limit_s: float) -> None:
        """Write everything that was queued until now, end the stream and wait for its end, all within `limit_s`.
        Nothing is sent afterwards, and `run` returns."""
        self._is_finishing = True
        self._loop.call_soon(self._outbox.put_nowait, _Finish())  # behind what other threads have handed over
        try:
            async with asyncio.timeout(limit_s):
                await self._is_detached.wait()
        except TimeoutError:
            logger.warning("the last messages to %s were not taken within %g s", self._address, limit_s)

    async def _attach_once(
        self, stub: cluster_pb2_grpc.ClusterStub, on_message: OnMessage
    ) -> CoordinatorMessage | None:
        """One life of the stream; the coordinator's answer to Register, None if it gave none."""
        call = stub.Attach()
        try:
            await call.write(convert.wrap_worker_message(self._register(), 0))
            envelope = await call.read()
            if envelope is _EOF:
                return None
            answer, epoch = convert.unwrap_coordinator_message(envelope)
            if isinstance(answer, Welcome):
                await self._keep(call, answer.lease_s / _BEATS_PER_LEASE, epoch, on_message)
            return answer
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ValueError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSALS:
                raise AccessRefused(
                    f"the coordinator at {self._address} refuses this worker: {error.details()}; "
                    "security.cluster_token_file must have the same token for both"
                ) from error
            self._last_failure = f"; {describe(error)}"
            logger.info("no stream to %s: %s", self._address, describe(error))
            return None
        finally:
            call.cancel()

    async def _keep(self, call: Stream, beat_s: float, epoch: int, on_message: OnMessage) -> None:
        """Read and write until the stream ends or either of the two fails. Raises nothing of theirs: it is logged."""
        self._drop_queued()
        self._is_detached.clear()
        reader = asyncio.create_task(self._read(call, epoch, on_message))
        writer = asyncio.create_task(self._write(call, epoch, beat_s))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and writer.exception() is None:  # it has finished: now the coordinator ends the stream
                await asyncio.wait((reader,))
        finally:
            for task in (reader, writer):
                task.cancel()
            ends = await asyncio.gather(reader, writer, return_exceptions=True)
            self._is_detached.set()
            for error in ends:
                if isinstance(error, grpc.aio.AioRpcError | asyncio.InvalidStateError):
                    logger.info("the stream to %s ended: %s", self._address, describe(error))
                elif isinstance(error, Exception):
                    logger.error("the stream to %s is given up", self._address, exc_info=error)

    async def _read(self, call: Stream, coordinator_epoch: int, on_message: OnMessage) -> None:
        while True:
            envelope: Any = await call.read()
            if envelope is _EOF:
                return
            try:
                message, epoch = convert.unwrap_coordinator_message(envelope)
            except ValueError as error:
                logger.warning("ignored a message of the coordinator: %s", error)
                continue
            if epoch == coordinator_epoch:
                on_message(message)

    async def _write(self, call: Stream, coordinator_epoch: int, beat_s: float) -> None:
        """Send what is queued, and a heartbeat at least every `beat_s`; returns after the last message of all."""
        next_beat_s = self._loop.time()
        while True:
            message = await self._next_message(next_beat_s)
            if isinstance(message, _Finish):
                await call.done_writing()
                return
            if isinstance(message, Heartbeat):
                next_beat_s = self._loop.time() + beat_s
            await call.write(convert.wrap_worker_message(message, coordinator_epoch))

    async def _next_message(self, beat_at_s: float) -> WorkerMessage | _Finish:
        wait_s = beat_at_s - self._loop.time()
        if wait_s <= 0:
            return self._heartbeat()
        try:
            return await asyncio.wait_for(self._outbox.get(), wait_s)
        except TimeoutError:
            return self._heartbeat()

    def _drop_queued(self) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()

    def _from_any_thread(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop has closed: the process is ending
            logger.debug("a message came after the end of the event loop")
