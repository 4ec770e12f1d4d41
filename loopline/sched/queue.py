"""Requests that wait for blocks, or for another's prefix, first come first served; those that were preempted stand in
front.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from loopline.sched.entry import Entry


class WaitingQueue:
    """Bounded FIFO with removal by id. Invariant: an id is in it at most once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._token_loops = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def token_loops(self) -> int:
        """Work that waits, counted to each request's most tokens."""
        return self._token_loops

    def push(self, entry: Entry) -> bool:
        """Put at the end; False if the queue is full."""
        if len(self._entries) >= self._limit:
            return False
        self._entries[entry.request.request_id] = entry
        self._token_loops += entry.token_loops_left()
        return True

    def put_back(self, entry: Entry, in_front: bool) -> None:
        """Put before all others, or behind them; never refused, because it was let in already."""
        self._entries[entry.request.request_id] = entry
        self._entries.move_to_end(entry.request.request_id, last=not in_front)
        self._token_loops += entry.token_loops_left()

    def first(self, count: int) -> Iterator[Entry]:
        """The entries whose turn is next; none is taken out."""
        return iter(list(islice(self._entries.values(), count)))

    def remove(self, request_id: str) -> Entry | None:
        """Take one out, wherever it stands; None if it is not here."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._token_loops -= entry.token_loops_left()
        return entry
