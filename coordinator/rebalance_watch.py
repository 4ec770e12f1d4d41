"""The timer that looks whether a worker should change its role, and asks the launcher for it. One event loop, like the
dispatcher, whose state it reads; `coordinator.rebalance` decides.
"""

import asyncio
import logging

from coordinator.dispatcher import Dispatcher
from coordinator.fleet import Fleet
from coordinator.rebalance import Hold, Move, RebalancePolicy, take_sample
from loopline.clock import Clock

_LOG = logging.getLogger(__name__)
_MOST_PERIOD_S = 1.0
_LOOKS = 20  # in the patience, at least


class RebalanceWatch:
    """Looks from `start` to `stop`, time and again."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet, clock: Clock, patience_s: float) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._clock = clock
        self._policy = RebalancePolicy(patience_s)
        self._period_s = min(_MOST_PERIOD_S, patience_s / _LOOKS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._on_time)

    def stop(self) -> None:
        """Nothing is asked for after this."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self.start()  # first: if a look fails the next one comes all the same
        sample = take_sample(self._dispatcher.snapshot(), self._dispatcher.backlog(), self._fleet.launcher)
        match self._policy.observe(sample, self._clock.now_s()):
            case Move(to, before, after, evidence):
                counts = (before.prefill, before.decode, after.prefill, after.decode)
                what = "rebalance: %s was the bottleneck %s; from %d prefill and %d decode workers to %d and %d"
                _LOG.info(what, to, evidence, *counts)
                self._fleet.scale(after.prefill, after.decode)
                self._dispatcher.metrics.rebalanced(to)
            case Hold(to, obstacle, evidence):
                _LOG.info("rebalance: %s was the bottleneck %s; no worker moves: %s", to, evidence, obstacle)
