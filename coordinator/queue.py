"""Requests that wait for workers: first in, first out, bounded; recovered ones go before new ones. No I/O."""

from bisect import insort
from collections.abc import Iterator

from loopline.errors import Overloaded


class RequestQueue:
    """Request ids in the order in which they should be tried.

    Recovered requests come first, among themselves by arrival. They were let in once: the bound does not hold for them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._recovered: list[tuple[int, str]] = []  # (order of arrival, request id)
        self._new: dict[str, None] = {}  # in order

    def __len__(self) -> int:
        return len(self._recovered) + len(self._new)

    def __iter__(self) -> Iterator[str]:
        """A copy in order, so that the caller may remove while it walks."""
        return iter([request_id for _, request_id in self._recovered] + list(self._new))

    def require_room(self) -> None:
        """Raise Overloaded where `put` would."""
        if len(self) >= self.limit:
            raise Overloaded(f"{len(self)} requests are waiting; the queue's limit is {self.limit}")

    def put(self, request_id: str) -> None:
        """Append a new request. Raises Overloaded with both numbers."""
        self.require_room()
        self._new[request_id] = None

    def put_back(self, request_id: str, order: int) -> None:
        """Queue a request that was let in before, ahead of new ones."""
        insort(self._recovered, (order, request_id))

    def remove(self, request_id: str) -> None:
        """Take it out, wherever it stands; nothing happens where it is not queued."""
        self._new.pop(request_id, None)
        self._recovered = [entry for entry in self._recovered if entry[1] != request_id]
