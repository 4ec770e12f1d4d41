"""What pushes have cost; the sender counts, in the transfer thread, and a scrape reads from its own thread."""

from collections import Counter
from enum import StrEnum

from loopline.telemetry.metrics import Histogram

_PUSH_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class PushResult(StrEnum):
    """How a push that was to be posted ended."""

    DONE = "done"
    FAILED = "failed"  # could not be posted, or its handle ended in an error
    LATE = "late"  # not terminal by its deadline; how it ends afterwards does not count


class PushCounts:
    """Counts since the worker's start."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.num_bytes = 0  # of those that are done
        self.seconds = Histogram(_PUSH_S)  # of those that are done, from the post on

    def done(self, num_bytes: int, taken_s: float) -> None:
        self.results[PushResult.DONE] += 1
        self.num_bytes += num_bytes
        self.seconds.observe(taken_s)

    def failed(self) -> None:
        self.results[PushResult.FAILED] += 1

    def late(self) -> None:
        self.results[PushResult.LATE] += 1
