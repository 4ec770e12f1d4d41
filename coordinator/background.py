"""What a launcher has running beside each other: its tasks, the first failure among them, and the end of them all."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from loopline.errors import LooplineError, OperatorError

_LOG = logging.getLogger(__name__)
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 10.0
_SETTLED_S = 30.0  # after a life this long the backoff starts over
T = TypeVar("T")


class Background:
    """On one event loop. Invariant: the first failure is kept, unless `stopping` came before it."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """Set by whoever owns this."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._failure: LooplineError | None = None

    @property
    def is_stopping(self) -> bool:
        return self.stopping.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a task has not ended."""
        return bool(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it; an error of it is a failure."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    async def until_quiet(self) -> None:
        """Until all tasks that there are now have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def fail(self, failure: LooplineError) -> None:
        if self._failure is None and not self.is_stopping:
            self._failure = failure
            self._failed.set()

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; raises the failure if that comes first."""
        loop = asyncio.get_running_loop()
        wanted, failed = loop.create_task(work), loop.create_task(_wait(self._failed))
        try:
            await asyncio.wait((wanted, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return await wanted
        finally:
            wanted.cancel()
            failed.cancel()
            await asyncio.gather(wanted, failed, return_exceptions=True)

    async def until_stopping(self) -> None:
        """Until `stopping`; raises the failure if that comes first."""
        await self.unless_failed(_wait(self.stopping))

    async def unless_stopped(self, limit_s: float) -> bool:
        """Wait that long, or until `stopping`: then True."""
        return await wait_at_most(self.stopping, limit_s)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, OperatorError):
                self.fail(error)
                return
            _LOG.error("a task of the launcher's own failed", exc_info=error)
            self.fail(OperatorError(f"the launcher failed: {error}"))


class Backoff:
    """How long to wait before a process is started again: longer each time, until one has lived for long."""

    def __init__(self) -> None:
        self._next_s = _BACKOFF_FIRST_S

    def after(self, life_s: float, *, was_told: bool = False) -> float:
        """Seconds, after a life that long; `was_told`: it ended by order."""
        if was_told or life_s >= _SETTLED_S:
            self._next_s = _BACKOFF_FIRST_S
        now_s, self._next_s = self._next_s, min(2 * self._next_s, _BACKOFF_MOST_S)
        return now_s


async def wait_at_most(event: asyncio.Event, limit_s: float) -> bool:
    """Whether it is set by then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None if the event is set first, and then `work` is cancelled."""
    if event.is_set():
        work.close()
        return None
    loop = asyncio.get_running_loop()
    wanted, other = loop.create_task(work), loop.create_task(_wait(event))
    try:
        await asyncio.wait((wanted, other), return_when=asyncio.FIRST_COMPLETED)
        return wanted.result() if wanted.done() else None
    finally:
        wanted.cancel()
        other.cancel()
        await asyncio.gather(wanted, other, return_exceptions=True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
