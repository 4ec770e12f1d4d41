"""Requests that wait for workers: bounded, by priority, recovered ones ahead. No I/O; moments come in.

No call costs more than the logarithm of the number that waits.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator

from loopline.errors import Overloaded

HEAD_START_S = 30.0
"""What one level of priority is worth: as if the request had come so much earlier. It is also the bound on starvation:
nobody is passed by a request that came more than this, times the difference of priorities, later."""
_RATE_WINDOW_S = 1.0  # a rate is of no shorter time: the first requests of a burst leave at once
_RATE_PLACES = 64
_UNKNOWN_RETRY_S = 1.0
_LEAST_RETRY_S = 0.01
_MOST_RETRY_S = 60.0
_SPARE = 64
_Rank = tuple[bool, float, int]  # new; moment less head start (recovered: its order); a number that no other has


class RequestQueue:
    """Request ids in the order in which they should be tried.

    Recovered requests come first, among themselves by arrival. They were let in once: the bound does not hold for them.
    Of the others a higher priority goes first, within the bound on starvation; one priority is first in, first out.
    Invariant: `_heap` has the rank of everything that waits, and ranks of what left, which count for nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ranks: dict[str, _Rank] = {}  # of what waits
        self._heap: list[tuple[_Rank, str]] = []
        self._numbers = itertools.count()
        self._held = 0
        self._outflow = Outflow()

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[str]:
        """In order, each found when it is asked for: what it costs depends on how far the caller walks. What was given
        out may be removed meanwhile; nothing may be put."""
        self._drop_ended()
        heap = self._heap
        frontier = [(entry, 0) for entry in heap[:1]]
        while frontier:
            (rank, request_id), index = heapq.heappop(frontier)
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))
            if self._ranks.get(request_id) == rank:
                yield request_id

    def hold_place(self, now_s: float) -> None:
        """Keep a place for a request that is being read. Raises Overloaded where `put` would."""
        self.require_room(now_s)
        self._held += 1

    def give_place_back(self) -> None:
        """The request is to be put now, or never."""
        self._held -= 1

    def require_room(self, now_s: float) -> None:
        """Raise Overloaded, with when to come again, where `put` would."""
        waiting = len(self) + self._held
        if waiting >= self.limit:
            retry_s = self._outflow.next_retry_s(now_s, waiting)
            text = f"{waiting} requests are waiting; the queue's limit is {self.limit}; try again in {retry_s:.3g} s"
            raise Overloaded(text, retry_s)

    def put(self, request_id: str, now_s: float, priority: int = 0) -> None:
        """Queue a new request. Raises Overloaded with both numbers."""
        self.require_room(now_s)
        self._add(request_id, (True, now_s - HEAD_START_S * priority, next(self._numbers)), now_s)

    def put_back(self, request_id: str, order: int, now_s: float) -> None:
        """Queue a request that was let in before, ahead of new ones."""
        self._outflow.undo()
        self._add(request_id, (False, order, next(self._numbers)), now_s)

    def remove(self, request_id: str, now_s: float) -> None:
        """Take it out, wherever it stands; nothing happens where it is not queued."""
        if self._ranks.pop(request_id, None) is not None:
            self._outflow.leave(now_s, is_empty=not self._ranks)

    def _add(self, request_id: str, rank: _Rank, now_s: float) -> None:
        if not self._ranks:
            self._outflow.begin(now_s)
        self._drop_ended()
        self._ranks[request_id] = rank
        heapq.heappush(self._heap, (rank, request_id))

    def _drop_ended(self) -> None:
        """Those at the head, and all of them when they are more than half."""
        if len(self._heap) > 2 * len(self._ranks) + _SPARE:
            self._heap = [(rank, request_id) for request_id, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)


class Outflow:
    """How fast a queue that is not empty empties, and from it when who was refused should come again."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=_RATE_PLACES)  # the first: from when on the others count
        self._next_place_s = 0.0  # the moment that the last one who was refused was told

    def begin(self, now_s: float) -> None:
        """The queue was empty: what it did before says nothing about what holds it up."""
        self._moments.clear()
        self._moments.append(now_s)

    def leave(self, now_s: float, *, is_empty: bool) -> None:
        """A place is free again."""
        if is_empty:
            self._moments.clear()
        else:
            self._moments.append(now_s)

    def undo(self) -> None:
        """One that had left is back."""
        if len(self._moments) > 1:
            self._moments.pop()

    def next_retry_s(self, now_s: float, waiting: int) -> float:
        """Seconds after which to come again: each who asks is given the next place that will be free, and after as
        many as wait now it begins anew. So they come neither all at once nor when the workers have long been idle."""
        if len(self._moments) < 2:
            return _UNKNOWN_RETRY_S
        place_s = max(_RATE_WINDOW_S, now_s - self._moments[0]) / (len(self._moments) - 1)
        self._next_place_s = max(self._next_place_s, now_s) + place_s
        if self._next_place_s > now_s + min(_MOST_RETRY_S, waiting * place_s):
            self._next_place_s = now_s + place_s
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, self._next_place_s - now_s))
