"""What a bad line does to packets: it delays all and loses some. Pure: moments come in, packets go out."""

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Impairment:
    """`loss`: part of the packets that are lost, each by itself; `delay_s`: of every one that is not; `is_cut`: none
    comes through, nor does what is on its way."""

    loss: float = 0.0
    delay_s: float = 0.0
    is_cut: bool = False


class Line:
    """One direction of a cable.

    Invariants: packets leave in the order in which they came, and none before its delay is over; which ones are lost
    depends on the seed and on how many have come, and on nothing else.
    """

    def __init__(self, seed: int, limit: int = 4096) -> None:
        """`limit`: most packets on their way; one that comes on top of them is lost, as in a full queue of a router."""
        self.impairment = Impairment()
        self.num_lost = 0
        self._random = random.Random(seed)
        self._limit = limit
        self._waiting: deque[tuple[float, bytes]] = deque()  # with the moment when it may leave

    def __len__(self) -> int:
        """Packets on their way."""
        return len(self._waiting)

    def put(self, packet: bytes, now_s: float) -> None:
        """It enters the line."""
        is_unlucky = self._random.random() < self.impairment.loss
        if is_unlucky or self.impairment.is_cut or len(self._waiting) >= self._limit:
            self.num_lost += 1
            return
        due_s = now_s + self.impairment.delay_s
        if self._waiting:  # a delay that has become shorter passes nobody
            due_s = max(due_s, self._waiting[-1][0])
        self._waiting.append((due_s, packet))

    def take(self, now_s: float) -> list[bytes]:
        """What arrives by now, in order. A cut line drops it."""
        if self.impairment.is_cut:
            self.num_lost += len(self._waiting)
            self._waiting.clear()
        arrived = []
        while self._waiting and self._waiting[0][0] <= now_s:
            arrived.append(self._waiting.popleft()[1])
        return arrived

    def next_s(self) -> float | None:
        """When the next packet may leave, None where there is none."""
        return self._waiting[0][0] if self._waiting else None
