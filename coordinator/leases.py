"""The timer behind the workers' leases: says when one has run out. Lives on the event loop."""

import asyncio
import logging
from collections.abc import Callable

from loopline.clock import Clock

_LOG = logging.getLogger(__name__)
_LATE_PART = 0.1  # of a lease: a timer that is later than this shows that the event loop stood still
_GRACE_PART = 1 / 3  # of a lease: the time from one heartbeat of a worker to its next


class LeaseTimer:
    """Invariant: while a worker is alive one timer runs, and it is due no later than the first lease's end."""

    def __init__(
        self, clock: Clock, lease_s: float, next_expiry_s: Callable[[], float | None], on_expired: Callable[[], None]
    ) -> None:
        """`next_expiry_s`: when the first lease runs out by `clock`, None without workers; `on_expired`: called when
        that moment has come and heartbeats had time to be read."""
        self._clock = clock
        self._lease_s = lease_s
        self._next_expiry_s = next_expiry_s
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def arm(self) -> None:
        """Look again at when the first lease runs out; to be called when a worker has joined."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry_s = self._next_expiry_s()
        if expiry_s is not None:
            self._start(max(0.0, expiry_s - self._clock.now_s()))

    def _start(self, delay_s: float) -> None:
        self._due_s = self._clock.now_s() + delay_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        """A late timer: this process was not listening. Heartbeats may be waiting, and get time to come in."""
        late_s = self._clock.now_s() - self._due_s
        if late_s > _LATE_PART * self._lease_s:
            _LOG.warning("the event loop stood still for %.1f s: leases are looked at again soon", late_s)
            self._start(_GRACE_PART * self._lease_s)
            return
        self._on_expired()
        self.arm()
