"""One worker under its supervisor, as a launcher sees it."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from coordinator.processes import OutOfSight, open_log, tail_of
from coordinator.ray_calls import ActorUnavailableError, RayCalls, RayError, words_of
from coordinator.ray_supervisor import Started, Trace
from coordinator.starters import Order

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0
_LAST_WORDS_S = 5.0  # for the rest of a log after the end of its process
_KILL_S = 10.0  # for a supervisor to kill its worker, then for Ray to kill the supervisor
Prove = Callable[[Trace], Awaitable[None]]


class RayProcess:
    """See Process: a worker under its supervisor. Its log is copied to this machine as it is written."""

    def __init__(
        self,
        order: Order,
        host_name: str,
        started: Started,
        actor: Any,
        calls: RayCalls,
        prove: Prove,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`prove` waits until a process of a machine is proven to have ended; `on_lost` is called before anybody else
        hears that it is out of sight."""
        self.name = order.name
        self.pid = started.pid
        self._host_name = host_name
        self._log_path = order.log_path
        self._started = started
        self._actor = actor
        self._calls = calls
        self._prove = prove
        self._on_lost = on_lost
        self._end: asyncio.Future[int | OutOfSight] = asyncio.get_running_loop().create_future()
        self._is_killed = False
        self._tasks: set[asyncio.Task[None]] = set()
        keep(self._tasks, self._watch())

    @property
    def is_alive(self) -> bool:
        """See Process."""
        return not self._end.done()

    @property
    def machine(self) -> str:
        """Where its process id means something; "" if it has ended too soon to be asked."""
        return self._started.seat.machine if self._started.seat is not None else ""

    async def reap(self) -> int | OutOfSight:
        """See Process."""
        return await asyncio.shield(self._end)

    async def wait(self) -> None:
        """See Process."""
        await asyncio.wait((self._end,))

    def terminate(self) -> None:
        """See Process."""
        keep(self._tasks, self._tell("terminate"))

    def kill(self) -> None:
        """See Process. Where its supervisor does not answer the supervisor is killed, and the worker goes with it."""
        if not self._is_killed:
            self._is_killed = True
            keep(self._tasks, self._kill())

    def describe_end(self) -> str:
        """See Process."""
        end = self._end.result()
        how = f"nobody saw its end: {end.why}" if isinstance(end, OutOfSight) else f"ended with exit status {end}"
        return f"{self.name} on {self._host_name} {how}; {tail_of(self._log_path)}"

    async def has_seen_the_end_of(self, trace: Trace) -> bool:
        """Ask its supervisor, on whose machine the traced process is."""
        try:
            return bool(await self._actor.end_and_look.remote(trace))
        except RayError:
            return False

    async def close(self) -> None:
        """Watch it no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        copying = asyncio.ensure_future(self._copy_log())
        try:
            end = await self._seen_end()
            await asyncio.wait((copying,), timeout=_LAST_WORDS_S)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        self._set_end(end)  # first: what Ray does about the supervisor is of no matter to anybody
        await self._calls.kill(self._actor)

    async def _seen_end(self) -> int | OutOfSight:
        while True:
            try:
                return int(await self._actor.wait.remote())
            except ActorUnavailableError:  # it may come back
                await asyncio.sleep(_RETRY_S)  # paces a question that is answered at once
            except RayError as error:
                return self._lost(words_of(error))

    def _lost(self, why: str) -> OutOfSight:
        return OutOfSight(why, self._proven)

    async def _proven(self) -> None:
        if self._started.seat is not None:
            await self._prove(Trace(self._started.seat))

    def _set_end(self, end: int | OutOfSight) -> None:
        if not self._end.done():
            if isinstance(end, OutOfSight):
                self._on_lost()
            self._end.set_result(end)

    async def _copy_log(self) -> None:
        offset = 0
        with open_log(self._log_path) as log, contextlib.suppress(RayError):
            log.write(f"--- {self.name} on {self._host_name}, pid {self.pid}\n".encode())
            while chunk := await self._actor.read_log.remote(offset):
                log.write(chunk)
                log.flush()
                offset += len(chunk)

    async def _tell(self, order: str) -> None:
        with contextlib.suppress(RayError):
            await getattr(self._actor, order).remote()

    async def _kill(self) -> None:
        keep(self._tasks, self._tell("kill"))
        await asyncio.wait((self._end,), timeout=_KILL_S)
        if self.is_alive:
            keep(self._tasks, self._calls.kill(self._actor))
            await asyncio.wait((self._end,), timeout=_KILL_S)
            self._set_end(self._lost("its supervisor does not answer and was killed"))


def keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Run it in the background; `tasks` keeps it alive, and says its failure in the log."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(lambda done: _on_done(tasks, done))


def _on_done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("a task of the launcher's own failed", exc_info=task.exception())
