"""The budget of bytes in flight: which push may be posted now, and whose turn it is. Pure: no I/O, no clock. A prefill
worker's sender owns one budget, adds every push to it and posts what `take` gives.

    add ---> a queue per peer ---- take: its turn, and room ----> in flight ---- ended: done, failed or late ---> gone
                    '------------- drop: its handoff was closed --------------------------------------------------^

Room is counted per peer first, so that a peer whose pushes never end keeps the rest of the budget free for others, and
then in all. Peers take turns, one push each. A peer that is full by itself is skipped; one whose push is too large for
what is left in all may be passed over `MAX_PASSES` times, then nothing is posted before it.
"""

from collections import deque
from dataclasses import dataclass

from kvtransfer.commands import Push
from loopline.errors import InvariantBroken
from loopline.identity import BudgetCounts, HandoffKey
from loopline.settings import TransferSettings

MAX_PASSES = 8
"""How many pushes of others may be posted before one that waits for room in all and not for its own peer."""


@dataclass(frozen=True)
class BudgetLimits:
    """All in bytes. `peer_bytes` is the part of `total_bytes` that one peer may have in flight; `push_bytes` the most
    that one push should carry (a block that is larger is a push of its own)."""

    total_bytes: int
    peer_bytes: int
    push_bytes: int

    @classmethod
    def of(cls, settings: TransferSettings) -> "BudgetLimits":
        """A push is never so large that it does not fit beside one peer that uses its whole share."""
        total = settings.in_flight_limit_bytes
        peer = max(1, int(total * settings.peer_share))
        return cls(total, peer, min(settings.max_push_bytes, peer, (total - peer) or total))


@dataclass(frozen=True)
class WaitingPush:
    """A push that is to be posted. `peer` is an agent's name; `since_s` when it came."""

    command: Push
    peer: str
    num_bytes: int
    since_s: float


class PushBudget:
    """Invariants: bytes in flight never pass a limit, to one peer or in all, except by one push that was posted while
    nothing was in flight there; pushes to one peer are posted in the order in which they came; a push that waits is
    passed over a bounded number of times, whatever comes after it.

    Written by one thread; `total`, `by_peer` and `counts` may be read by any.
    """

    def __init__(self, limits: BudgetLimits, max_passes: int = MAX_PASSES) -> None:
        self.limits = limits
        self._max_passes = max_passes
        self.total = 0
        self.by_peer: dict[str, int] = {}
        self._queues: dict[str, deque[WaitingPush]] = {}  # no empty ones; in order of turns
        self._passed: dict[str, int] = {}  # peer -> how often its first push was passed over for the limit in all
        self._num_waiting = 0
        self._waited_s = 0.0

    # ---- queries

    def counts(self) -> BudgetCounts:
        return BudgetCounts(self.total, self.limits.total_bytes, self._num_waiting, self._waited_s)

    def waits(self, key: HandoffKey) -> bool:
        """Does a push of this handoff wait?"""
        return any(push.command.key == key for queue in self._queues.values() for push in queue)

    @property
    def is_full(self) -> bool:
        """Would a further push to any peer have to wait?"""
        return self.total >= self.limits.total_bytes

    def crowded(self) -> frozenset[str]:
        """Peers to which a further push would have to wait, whatever its size."""
        full = [peer for peer, num_bytes in self.by_peer.items() if num_bytes >= self.limits.peer_bytes]
        return frozenset((*full, *self._queues))

    # ---- moves

    def add(self, push: WaitingPush) -> None:
        """A push is to be posted when its turn comes."""
        self._queues.setdefault(push.peer, deque()).append(push)
        self._num_waiting += 1

    def take(self, now_s: float) -> WaitingPush | None:
        """The push to post now; it is in flight from here on. None: nothing waits, or nothing of it may be posted."""
        passed: list[str] = []
        for peer, queue in self._queues.items():
            num_bytes, in_flight = queue[0].num_bytes, self.by_peer.get(peer, 0)
            if in_flight and in_flight + num_bytes > self.limits.peer_bytes:
                continue
            if not self.total or self.total + num_bytes <= self.limits.total_bytes:
                for other in passed:
                    self._passed[other] = self._passed.get(other, 0) + 1
                return self._post(peer, now_s)
            if self._passed.get(peer, 0) >= self._max_passes:
                return None
            passed.append(peer)
        return None

    def ended(self, peer: str, num_bytes: int) -> None:
        """A push that was taken is terminal, could not be posted, or is past its deadline. Raises InvariantBroken for
        more bytes than are in flight there."""
        left = self.by_peer.get(peer, 0) - num_bytes
        if left < 0:
            raise InvariantBroken(f"{num_bytes} bytes to {peer} ended and {left + num_bytes} are in flight")
        self.total -= num_bytes
        self.by_peer[peer] = left
        if not left:
            del self.by_peer[peer]

    def drop(self, key: HandoffKey, now_s: float) -> list[WaitingPush]:
        """Forget what waits of this and older generations of the request, and return it in the order of posting."""
        dropped: list[WaitingPush] = []
        for peer, queue in list(self._queues.items()):
            gone = [push for push in queue if _is_through(push.command.key, key)]
            if not gone:
                continue
            if gone[0] is queue[0]:
                self._passed.pop(peer, None)
            left = deque(push for push in queue if not _is_through(push.command.key, key))
            if left:
                self._queues[peer] = left
            else:
                del self._queues[peer]
            dropped += gone
        for push in dropped:
            self._leave_queue(push, now_s)
        return dropped

    # ---- inside

    def _post(self, peer: str, now_s: float) -> WaitingPush:
        """Take the first push of this peer, whose next turn is after everybody else's."""
        queue = self._queues.pop(peer)
        push = queue.popleft()
        if queue:
            self._queues[peer] = queue
        self._passed.pop(peer, None)
        self._leave_queue(push, now_s)
        self.total += push.num_bytes
        self.by_peer[peer] = self.by_peer.get(peer, 0) + push.num_bytes
        return push

    def _leave_queue(self, push: WaitingPush, now_s: float) -> None:
        self._num_waiting -= 1
        self._waited_s += max(0.0, now_s - push.since_s)


def _is_through(key: HandoffKey, last: HandoffKey) -> bool:
    return key.request_id == last.request_id and key.generation <= last.generation
