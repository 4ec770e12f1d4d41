"""Time as a value that is handed in, so that a test can own it. Nothing else in the project calls `time` directly
where a decision hangs on the answer."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds; its zero means nothing."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
