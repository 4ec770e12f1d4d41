"""The client for asyncio: `blocking`, with await."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from loopline.client.convert import (
    CALL_TIMEOUT_S,
    POLL_S,
    error_of,
    event_of,
    make_options,
    record_of,
)
from loopline.client.records import ClusterStatus, Completion, Event, ModelInfo
from loopline.client.resume import Answer
from loopline.errors import CoordinatorUnreachable, DeadlineExceeded
from loopline.intake import Chat, RequestOptions
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import open_channel


class AsyncClient:
    """The same for asyncio: `generate` is an asynchronous generator. To be made and used in one event loop."""

    def __init__(self, address: str, *, resume: bool = True, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`resume`: an answer that breaks because the coordinator goes away is asked for again, and goes on.

        Raises ConfigError for a token that would be sent to another machine without TLS.
        """
        self.address = address
        self._resume = resume
        self._is_known = False  # somebody has answered at the address
        self._channel = open_channel(address, credentials)
        self._stub: Any = loopline_pb2_grpc.LooplineStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | Sequence[int] | Chat,
        *,
        label: str = "",
        deadline_s: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[Event, None]:
        """See Client.generate. Use `contextlib.aclosing` where the answer may not be read to its end."""
        return self.stream(make_options(prompt, options), label=label, deadline_s=deadline_s, priority=priority)

    async def stream(
        self, options: RequestOptions, *, label: str = "", deadline_s: float | None = None, priority: int = 0
    ) -> AsyncGenerator[Event, None]:
        """`generate` with the options as one record."""
        answer = Answer(
            options,
            label,
            deadline_s,
            self.address,
            priority=priority,
            now_s=time.monotonic(),
            resume=self._resume,
            is_known=self._is_known,
        )
        while True:
            call = self._stub.Generate(answer.next_call(time.monotonic()))
            try:
                async for message in call:
                    event = answer.take(event_of(message), time.monotonic())
                    if event is not None:
                        yield event
                return
            except grpc.RpcError as error:
                if answer.is_finished:  # only the status was lost
                    return
                pause_s = answer.pause_s(error, time.monotonic())
            finally:
                self._is_known = self._is_known or answer.is_known
                call.cancel()
            await asyncio.sleep(pause_s)  # back-off

    async def complete(
        self,
        prompt: str | Sequence[int] | Chat,
        *,
        label: str = "",
        deadline_s: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Completion:
        """One whole answer."""
        completion = Completion()
        events_of = self.generate(prompt, label=label, deadline_s=deadline_s, priority=priority, **options)
        async with contextlib.aclosing(events_of) as events:
            async for event in events:
                completion = completion.after(event)
        return completion

    async def model(self) -> ModelInfo:
        """What is served."""
        return record_of(ModelInfo, await self._call("GetModel", loopline_pb2.GetModelRequest()))

    async def status(self) -> ClusterStatus:
        """The workers and the queue."""
        return record_of(ClusterStatus, await self._call("GetStatus", loopline_pb2.GetStatusRequest()))

    async def wait_serving(self, timeout_s: float) -> None:
        """See Client.wait_serving."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                if (await self.status()).serving:
                    return
            except CoordinatorUnreachable:
                if time.monotonic() >= end_s:
                    raise
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(f"the cluster at {self.address} does not serve after {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, name: str, request: Any) -> Any:
        try:
            answer = await getattr(self._stub, name)(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_of(error, self.address, False) from error
        self._is_known = True
        return answer
