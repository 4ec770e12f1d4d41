"""The clients' streams of all requests that have not ended, and the timers of their deadlines. One event loop, like the
dispatcher, which owns the table. No gRPC here."""

import asyncio
from collections.abc import Callable

from coordinator.effects import Outcome
from coordinator.streams import ClientStream
from loopline.text import TextStream


class Clients:
    """By request id. Invariant: who has a stream has a timer."""

    def __init__(self, most_unread: int, on_deadline: Callable[[str], None]) -> None:
        """`most_unread`: tokens that a stream keeps. `on_deadline` is called with the request id."""
        self._most_unread = most_unread
        self._on_deadline = on_deadline
        self._streams: dict[str, ClientStream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __getitem__(self, request_id: str) -> ClientStream:
        return self._streams[request_id]

    def ids(self) -> list[str]:
        """A copy."""
        return list(self._streams)

    def open(self, request_id: str, deadline_s: float, decoder: TextStream | None) -> ClientStream:
        """A new stream; its deadline is counted from now."""
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_at(loop.time() + deadline_s, self._on_deadline, request_id)
        self._streams[request_id] = stream = ClientStream(decoder, self._most_unread)
        self._none.clear()
        return stream

    def end(self, request_id: str, outcome: Outcome) -> None:
        """Its last event; the stream is the reader's alone from now on."""
        self._timers.pop(request_id).cancel()
        self._streams.pop(request_id).end(outcome)
        if not self._streams:
            self._none.set()

    async def wait_none(self) -> None:
        """Until every request has ended."""
        await self._none.wait()
