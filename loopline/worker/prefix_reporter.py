"""What a worker says of its prefix cache: nothing until it is asked, then all of it, then what changes. Engine thread.

The index numbers its changes; a report may be lost or come too late, and the coordinator sees the gap and asks again.
"""

from collections.abc import Callable, Sequence

from loopline.kv.prefix_index import PrefixIndex
from loopline.messages import CUT_DIGEST_BYTES, PrefixReport

_PAUSE_S = 0.05  # between two reports of a busy engine
_PART_DIGESTS = 4_096  # in one message: well under the least limit of a message's size


class PrefixReporter:
    """Invariant: every report follows the one before it, or is whole."""

    def __init__(self, index: PrefixIndex, send: Callable[[PrefixReport], None]) -> None:
        self._index = index
        self._send = send
        self._is_asked = False
        self._next_s = 0.0

    def ask(self) -> None:
        """Say all that is cached now, and go on from there."""
        self._is_asked = True
        self._index.take_deltas()  # so that the state of this moment has a number
        number, digests = self._index.snapshot()
        self._report(number, digests, (), is_whole=True)

    def stop(self) -> None:
        """Say nothing more until asked again: nobody listens."""
        self._is_asked = False

    def maybe_report(self, now_s: float, busy: bool) -> None:
        """Say what has changed, if anything has; a `busy` engine says it a few times a second."""
        if not self._is_asked or (busy and now_s < self._next_s):
            return
        delta = self._index.take_deltas()
        if delta is not None:
            self._next_s = now_s + _PAUSE_S
            self._report(delta.number, delta.published, delta.evicted, is_whole=False)

    def _report(self, number: int, published: Sequence[bytes], evicted: Sequence[bytes], *, is_whole: bool) -> None:
        """In as many parts as it takes; first what went, so that a full cache has room for what came."""
        changes = [(digest, False) for digest in evicted] + [(digest, True) for digest in published]
        num_parts = max(1, -(-len(changes) // _PART_DIGESTS))
        for part in range(num_parts):
            some = changes[part * _PART_DIGESTS : (part + 1) * _PART_DIGESTS]
            came = b"".join(digest[:CUT_DIGEST_BYTES] for digest, is_there in some if is_there)
            went = b"".join(digest[:CUT_DIGEST_BYTES] for digest, is_there in some if not is_there)
            self._send(PrefixReport(number, is_whole, part, num_parts, came, went))
