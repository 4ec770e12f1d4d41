"""The two kinds of streams that the coordinator keeps open: one per worker, one per client. No gRPC here.

Both are written by the dispatcher without waiting and read by one gRPC handler.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto

from coordinator.effects import Ending, Outcome
from loopline.messages import CoordinatorMessage, TokenRow
from loopline.request import FinishReason
from loopline.text import TextStream

_MOST_ROWS = 256
"""In one event: what was kept for a client that read late must not pass the limit on messages."""


class WorkerStream:
    """Commands for one worker, in order. What it was given bounds them; one that stops reading loses its lease."""

    def __init__(self) -> None:
        self._messages: deque[CoordinatorMessage] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def send(self, message: CoordinatorMessage) -> None:
        if not self._closed:
            self._messages.append(message)
            self._changed.set()

    def close(self) -> None:
        """End the stream after what was sent so far."""
        self._closed = True
        self._changed.set()

    async def next_message(self) -> CoordinatorMessage | None:
        """The next command, or None at the end."""
        while not self._messages:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()


@dataclass(frozen=True)
class Tokens:
    """New tokens and the text that they completed; the text may lag behind."""

    rows: tuple[TokenRow, ...]
    text: str


@dataclass(frozen=True)
class Finish:
    """The last event. `text`: what the detokenizer still held back; None where there is no tokenizer."""

    outcome: Outcome
    text: str | None


class Taken(Enum):
    """What a token made of its stream."""

    OPEN = auto()
    STOPPED = auto()  # its text completed a stop string, so the request should end
    UNREAD = auto()  # more tokens wait than are kept, so the request should end


class ClientStream:
    """One request's events for its client. Whoever writes never waits.

    A slow reader finds everything since its last read in one `Tokens`: the buffer holds rows, never events. Past
    `most_unread` of them the request should end, so no more follow than were on their way. Nothing comes after a stop
    string but the end.
    """

    def __init__(self, decoder: TextStream | None, most_unread: int) -> None:
        self._decoder = decoder
        self._most_unread = most_unread
        self._rows: list[TokenRow] = []
        self._text: list[str] = []
        self._outcome: Outcome | None = None
        self._changed = asyncio.Event()

    @property
    def _stopped(self) -> bool:
        return self._decoder is not None and self._decoder.stopped

    @property
    def num_unread(self) -> int:
        """Tokens that wait for the reader."""
        return len(self._rows)

    def push(self, row: TokenRow) -> Taken:
        """Take a token; a stop string or a full buffer is said once or more, until `end`."""
        if row.token_id is None or self._stopped:
            return Taken.OPEN
        self._rows.append(row)
        if self._decoder is not None:
            self._text.append(self._decoder.push((row.token_id,)))
        self._changed.set()
        if self._stopped:
            return Taken.STOPPED
        return Taken.UNREAD if len(self._rows) > self._most_unread else Taken.OPEN

    def end(self, outcome: Outcome) -> None:
        """The request is over. Where the last token completed a stop string, that is the reason."""
        if self._stopped and outcome.ending is Ending.FINISHED:
            outcome = replace(outcome, reason=FinishReason.STOP)
        self._outcome = outcome
        self._changed.set()

    async def next_event(self) -> Tokens | Finish:
        """Wait for something new. After Finish there is nothing to wait for."""
        while not self._rows and self._outcome is None:
            self._changed.clear()
            await self._changed.wait()
        if self._rows:
            event = Tokens(tuple(self._rows[:_MOST_ROWS]), "".join(self._text[:_MOST_ROWS]))
            del self._rows[:_MOST_ROWS], self._text[:_MOST_ROWS]
            return event
        assert self._outcome is not None  # the loop above ended by it
        return Finish(self._outcome, None if self._decoder is None else self._decoder.finish())
