"""Requests that wait for blocks, first come first served."""

from collections import OrderedDict

from loopline.request import Request


class WaitingQueue:
    """Bounded FIFO with removal by id. Invariant: an id is in it at most once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def push(self, request: Request) -> bool:
        """Put at the end; False if the queue is full."""
        if len(self._requests) >= self._limit:
            return False
        self._requests[request.request_id] = request
        return True

    def head(self) -> Request | None:
        """The request whose turn it is; it stays in the queue."""
        return next(iter(self._requests.values()), None)

    def pop_head(self) -> Request:
        """Take the request whose turn it is."""
        return self._requests.popitem(last=False)[1]

    def remove(self, request_id: str) -> bool:
        """Take one out, wherever it stands; False if it is not here."""
        return self._requests.pop(request_id, None) is not None

    def token_loops(self) -> int:
        """Work that waits, counted to each request's most tokens."""
        return sum(request.max_kv_tokens * request.params.loops for request in self._requests.values())
