"""Calls between workers: a channel for each peer, the tasks that wait for answers, and answers that the engine thread
gives to a call.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import grpc.aio

from loopline.errors import PeerLost
from loopline.identity import Peer, WorkerId
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import DEFAULT_MAX_MESSAGE_BYTES, open_channel

logger = logging.getLogger(__name__)
_MAX_GONE = 1024
_GRACE_S = 15.0
"""Longer than calls between workers take, but for fetches: a channel that closes cancels none of them. A fetch from a
worker that is gone fails anyway."""
T = TypeVar("T")


class PeerCalls:
    """Owned by the event loop; `start` may be called from any thread.

    Invariant: a worker that was dropped gets no channel again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        credentials: Credentials = NO_CREDENTIALS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """`credentials` are shown to every peer."""
        self._loop = loop
        self._credentials = credentials
        self._max_message_bytes = max_message_bytes
        self._channels: dict[str, grpc.aio.Channel] = {}  # by worker uuid: an address may get another owner
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def stub(self, peer: Peer) -> Any:
        """The peer service of a worker; event loop only. Raises PeerLost for one that was dropped."""
        uuid = peer.worker.uuid
        if uuid in self._gone:
            raise PeerLost(f"{peer.name} is gone")
        if uuid not in self._channels:
            self._channels[uuid] = open_channel(peer.address, self._credentials, self._max_message_bytes)
        return cluster_pb2_grpc.PeeringStub(self._channels[uuid])  # type: ignore[no-untyped-call]

    def start(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call in the background; any thread. What it raises is logged."""
        try:
            self._loop.call_soon_threadsafe(self._start, call)
        except RuntimeError:  # the loop has closed: the process is ending
            call.close()

    def drop(self, worker: WorkerId) -> None:
        """That worker's process is proven gone: its calls end as they will, and no new one begins. Event loop only."""
        self._gone[worker.uuid] = None
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)
        channel = self._channels.pop(worker.uuid, None)
        if channel is not None:
            self._start(channel.close(_GRACE_S))

    async def close(self) -> None:
        """End every call and channel; nothing may be started afterwards."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a call to another worker failed", exc_info=error)


def describe(error: Exception) -> str:
    """One line about a failed call."""
    return f"{error.code().name} {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


class Answer(Generic[T]):
    """One value that another thread gives to a call which waits for it on the event loop. Later ones are dropped."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()

    def give(self, value: T) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self._set_once, value)

    async def wait(self, limit_s: float) -> T:
        """The value; TimeoutError if there is none by then."""
        async with asyncio.timeout(limit_s):
            return await self._future

    def _set_once(self, value: T) -> None:
        if not self._future.done():
            self._future.set_result(value)
