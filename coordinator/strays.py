"""Handoffs that a worker has and nobody needs. Pure."""

from collections.abc import Callable, Mapping

from coordinator.effects import Effect, Send
from coordinator.life import Books
from loopline.identity import Cause, HandoffKey, WorkerId
from loopline.messages import Cancel


class Strays:
    """Remembers one look: what is on its way to a worker or from it is no stray, so it takes two to be one."""

    def __init__(self) -> None:
        self._seen: set[tuple[WorkerId, HandoffKey]] = set()

    def cancel(self, books: Mapping[WorkerId, Books], is_needed: Callable[[HandoffKey], bool]) -> list[Effect]:
        """Once more a Cancel for each that was there at the last look, too."""
        found = {(worker, key) for worker, own in books.items() for key in own.keys if not is_needed(key)}
        again = sorted(found & self._seen)
        self._seen = found
        return [Send(worker, Cancel(key, Cause.STALE)) for worker, key in again]
