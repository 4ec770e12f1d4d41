"""When what ends, and when it is asked for again: deadlines of a worker's requests, on an injected clock. Deadlines
travel as remaining time.
"""

import heapq
from collections.abc import Callable

from loopline.clock import Clock
from loopline.identity import HandoffKey

ASK_AGAIN_S = 1.0
"""How often writers are asked again to close what they have not closed."""
_SWEEP_FIRST = 256


class Deadlines:
    """A heap of (time, key). A key that its owner no longer knows is never given out, and leaves with a sweep.

    Invariant: at most twice as many entries as there were live keys at the last sweep, and never fewer than
    `_SWEEP_FIRST` before the first.
    """

    def __init__(self, clock: Clock, is_live: Callable[[HandoffKey], bool]) -> None:
        """`is_live` says whether a key's request still runs here."""
        self._clock = clock
        self._is_live = is_live
        self._heap: list[tuple[float, HandoffKey]] = []
        self._sweep_at = _SWEEP_FIRST

    def __len__(self) -> int:
        """Entries, ended ones included."""
        return len(self._heap)

    def add(self, key: HandoffKey, remaining_s: float) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._sweep_at = max(_SWEEP_FIRST, 2 * len(self._heap))
        heapq.heappush(self._heap, (self._clock.now_s() + remaining_s, key))

    def take_expired(self) -> list[HandoffKey]:
        """Live keys whose time has come, earliest first; each is given once."""
        expired = []
        now_s = self._clock.now_s()
        while self._heap and self._heap[0][0] <= now_s:
            _, key = heapq.heappop(self._heap)
            if self._is_live(key):
                expired.append(key)
        return expired
