"""What a worker process was told about its own end. Owned by its event loop."""

import asyncio
import logging

logger = logging.getLogger(__name__)


class Orders:
    """Invariant: draining once, for good; the first order to drain sets the limit."""

    def __init__(self, drain_limit_s: float) -> None:
        """`drain_limit_s`: for drains that name no limit."""
        self._default_limit_s = drain_limit_s
        self._limit_s = drain_limit_s
        self.wants_restart = False
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self._was_signalled = False

    @property
    def is_draining(self) -> bool:
        return self._drain.is_set()

    def terminate(self) -> None:
        """A signal. The first: drain, which may be going on by order already. The second: stop at once."""
        if self._was_signalled:
            self.stop()
        self._was_signalled = True
        self.drain(self._default_limit_s)

    def drain(self, limit_s: float) -> None:
        """Take nothing new, finish what runs within the limit, then leave."""
        if not self.is_draining:
            logger.info("draining for at most %g s", limit_s)
            self._limit_s = limit_s
            self._drain.set()

    def restart(self, reason: str) -> None:
        """Drain, and leave with the wish to be started again; nothing where the worker leaves already."""
        if not self.is_draining:
            logger.warning("%s", reason)
            self.wants_restart = True
            self.drain(self._default_limit_s)

    def stop(self) -> None:
        """Leave now."""
        self._stop.set()

    async def wait_drain(self) -> float:
        """Until a drain was ordered; its limit in seconds."""
        await self._drain.wait()
        return self._limit_s

    async def wait_stop(self) -> None:
        await self._stop.wait()
