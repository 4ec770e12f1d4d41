"""When a worker has so much of its arena in quarantine that it had better start anew. Pure: the moment comes in.

A quarantine usually ends by itself: the push arrives, or its writer says that it has ended, or is proven gone. One that
lasts has a writer that nobody can prove gone, or a fault of ours; only this process's end makes those blocks usable.
"""

from loopline.identity import BlockCounts


class QuarantineWatch:
    """Invariant: says yes at most once, and never of a quarantine that was under the limit for a moment of the time."""

    def __init__(self, limit: float, patience_s: float) -> None:
        """`limit`: part of the arena's blocks, 0 to 1; `patience_s`: how long more than that may be in quarantine."""
        self._limit = limit
        self._patience_s = patience_s
        self._above_since_s: float | None = None
        self._is_over = False

    def is_over(self, blocks: BlockCounts, now_s: float) -> bool:
        """Whether the limit has now been passed for long enough; True once."""
        if self._is_over or blocks.quarantined <= self._limit * blocks.total:
            self._above_since_s = None
            return False
        if self._above_since_s is None:
            self._above_since_s = now_s
        self._is_over = now_s - self._above_since_s >= self._patience_s
        return self._is_over

    def describe(self, blocks: BlockCounts) -> str:
        """One line for the log."""
        return (
            f"{blocks.quarantined} of {blocks.total} blocks are in quarantine, and more than {self._limit:g} of them "
            f"have been for {self._patience_s:g} s: this worker drains and ends, to be started again"
        )
