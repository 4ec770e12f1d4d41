"""When what ends: deadlines of a worker's requests, on an injected clock. Deadlines travel as remaining time."""

import heapq

from loopline.clock import Clock
from loopline.identity import HandoffKey


class Deadlines:
    """A heap of (time, key). Entries are not removed early: who asks passes over keys that it no longer knows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, HandoffKey]] = []

    def add(self, key: HandoffKey, remaining_s: float) -> None:
        heapq.heappush(self._heap, (self._clock.now_s() + remaining_s, key))

    def take_expired(self) -> list[HandoffKey]:
        """Keys whose time has come, earliest first; each is given once."""
        expired = []
        now_s = self._clock.now_s()
        while self._heap and self._heap[0][0] <= now_s:
            expired.append(heapq.heappop(self._heap)[1])
        return expired
