"""The timer that looks for what workers should have said and have not; what that means is the tracker's to know.
One event loop, like the dispatcher, which starts it with every request.
"""

import asyncio
from collections.abc import Callable, Iterable

from coordinator.effects import Effect
from coordinator.registry import Registry
from coordinator.tracker import Tracker

_LOOKS = 5  # in a reply timeout


class ReplyWatch:
    """Runs while there are requests. A look that is late by more than a period shows that this process stood still:
    nobody is blamed for what was not read meanwhile."""

    def __init__(
        self,
        tracker: Tracker,
        registry: Registry,
        carry_out: Callable[[Iterable[Effect]], None],
        reply_timeout_s: float,
    ) -> None:
        self._tracker = tracker
        self._registry = registry
        self._carry_out = carry_out
        self._period_s = reply_timeout_s / _LOOKS
        self._due_s: float | None = None  # None: not running

    def start(self) -> None:
        """Look from now on, until no request is left; nothing happens where it runs."""
        if self._due_s is None:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self._period_s
        loop.call_at(self._due_s, self._on_time)

    def _on_time(self) -> None:
        due_s, self._due_s = self._due_s, None
        if not len(self._tracker):
            return
        if due_s is None or asyncio.get_running_loop().time() - due_s > self._period_s:
            self._tracker.excuse()
        else:
            self._carry_out(self._tracker.look(self._registry.books()))
        if len(self._tracker):
            self.start()
