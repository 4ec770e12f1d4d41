"""Who is gone past for a while because something failed there: workers, and links between two. Pure: moments come in.

A fault of one link says nothing of its workers: they go on with others. Nobody has to be forgiven: a hold ends by
itself, and the next one is longer only where it comes soon after. What fails while it is avoided was given before and
says nothing new.
"""

from dataclasses import dataclass

from coordinator.snapshot import Avoided
from loopline.identity import WorkerId

FIRST_HOLD_S = 1.0
MOST_HOLD_S = 30.0
Fault = tuple[WorkerId, ...]
"""One worker, or the two ends of a link: (prefill, decode)."""


@dataclass(frozen=True)
class _Hold:
    length_s: float
    until_s: float


class Avoidance:
    """Invariant: every hold ends, at most MOST_HOLD_S after the fault that began it."""

    def __init__(self, first_hold_s: float = FIRST_HOLD_S, most_hold_s: float = MOST_HOLD_S) -> None:
        self._first_hold_s = first_hold_s
        self._most_hold_s = most_hold_s
        self._holds: dict[Fault, _Hold] = {}

    def failed(self, fault: Fault, now_s: float) -> float | None:
        """Avoid a worker or a link from now on; for how long, or None where it is avoided already."""
        last = self._holds.get(fault)
        length_s = self._first_hold_s
        if last is not None:
            if now_s < last.until_s:
                return None
            if now_s < last.until_s + self._most_hold_s:
                length_s = min(2 * last.length_s, self._most_hold_s)
        self._holds[fault] = _Hold(length_s, now_s + length_s)
        return length_s

    def at(self, now_s: float) -> Avoided:
        """Who is avoided at this moment."""
        if not self._holds:
            return Avoided()
        held = [fault for fault, hold in self._holds.items() if now_s < hold.until_s]
        return Avoided(
            workers=frozenset(fault[0] for fault in held if len(fault) == 1),
            links=frozenset((fault[0], fault[1]) for fault in held if len(fault) > 1),
        )

    def forget(self, worker: WorkerId) -> None:
        """It is gone for good."""
        self._holds = {fault: hold for fault, hold in self._holds.items() if worker not in fault}
