"""What is kept away from for a while because something failed there. Pure: moments come in.

Nobody has to be forgiven: a hold ends by itself, and the next one is longer only where what fails next was begun soon
after, however long it took to fail. What fails while it is held was begun before and says nothing new.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST_HOLD_S = 1.0
MOST_HOLD_S = 30.0
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class _Hold:
    began_s: float
    length_s: float

    @property
    def until_s(self) -> float:
        return self.began_s + self.length_s


class Holds(Generic[T]):
    """Invariant: every hold ends, at most `most_s` after the failure that began it."""

    def __init__(self, first_s: float = FIRST_HOLD_S, most_s: float = MOST_HOLD_S) -> None:
        """Seconds that a hold lasts at first, and at most; as long after its end the next one is short again."""
        self._first_s = first_s
        self._most_s = most_s
        self._holds: dict[T, _Hold] = {}

    def failed(self, what: T, now_s: float, begun_s: float | None = None) -> float | None:
        """Hold it from now on; for how long, or None where it is held already. `begun_s`: when that which failed was
        begun, if it took its time to fail: it was tried again then, and not just now."""
        last = self._holds.get(what)
        length_s = self._first_s
        if last is not None:
            if now_s < last.until_s:
                return None
            is_new = begun_s is not None and begun_s >= last.began_s
            tried_s = begun_s if begun_s is not None and is_new else now_s
            if tried_s < last.until_s + self._most_s:
                length_s = min(2 * last.length_s, self._most_s)
        self._holds[what] = _Hold(now_s, length_s)
        return length_s

    def has(self, what: T, now_s: float) -> bool:
        """Whether it is held at this moment."""
        last = self._holds.get(what)
        return last is not None and now_s < last.until_s

    def at(self, now_s: float) -> Iterator[T]:
        """All that is held at this moment."""
        return (what for what, hold in self._holds.items() if now_s < hold.until_s)

    def forget(self, is_meant: Callable[[T], bool]) -> None:
        """These have never failed."""
        self._holds = {what: hold for what, hold in self._holds.items() if not is_meant(what)}
