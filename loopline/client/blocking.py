"""The blocking client."""

import time
from collections.abc import Generator, Sequence
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
from loopline.wire.channel import open_blocking_channel


class Client:
    """A blocking client; may be shared by threads. `address` is HOST:PORT of the coordinator."""

    def __init__(self, address: str, *, resume: bool = True, credentials: Credentials = NO_CREDENTIALS) -> None:
        """`resume`: an answer that breaks because the coordinator goes away is asked for again, and goes on.

        Raises ConfigError for a token that would be sent to another machine without TLS.
        """
        self.address = address
        self._resume = resume
        self._is_known = False  # somebody has answered at the address
        self._channel = open_blocking_channel(address, credentials)
        self._stub: Any = loopline_pb2_grpc.LooplineStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(
        self,
        prompt: str | Sequence[int] | Chat,
        *,
        label: str = "",
        deadline_s: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Generator[Event, None, None]:
        """Stream one answer; closing the iterator cancels the request.

        Of the requests that wait those of a higher `priority`, -10 to 10, go first.

        The call is made when the first event is asked for. Where the coordinator goes away it is made again, until the
        deadline, and the answer goes on: no token comes twice and none is missing. Raises the error of
        `loopline.errors` that its status means.
        """
        return self.stream(make_options(prompt, options), label=label, deadline_s=deadline_s, priority=priority)

    def stream(
        self, options: RequestOptions, *, label: str = "", deadline_s: float | None = None, priority: int = 0
    ) -> Generator[Event, None, None]:
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
                for message in call:
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
            time.sleep(pause_s)  # back-off

    def complete(
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
        for event in self.generate(prompt, label=label, deadline_s=deadline_s, priority=priority, **options):
            completion = completion.after(event)
        return completion

    def model(self) -> ModelInfo:
        """What is served."""
        return record_of(ModelInfo, self._call("GetModel", loopline_pb2.GetModelRequest()))

    def status(self) -> ClusterStatus:
        """The workers and the queue."""
        return record_of(ClusterStatus, self._call("GetStatus", loopline_pb2.GetStatusRequest()))

    def wait_serving(self, timeout_s: float) -> None:
        """Return when a request could run. Raises CoordinatorUnreachable or DeadlineExceeded after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                if self.status().serving:
                    return
            except CoordinatorUnreachable:
                if time.monotonic() >= end_s:
                    raise
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(f"the cluster at {self.address} does not serve after {timeout_s:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, request: Any) -> Any:
        try:
            answer = getattr(self._stub, name)(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_of(error, self.address, False) from error
        self._is_known = True
        return answer
