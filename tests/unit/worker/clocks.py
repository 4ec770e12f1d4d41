"""A clock that the test owns."""


class OwnClock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s
