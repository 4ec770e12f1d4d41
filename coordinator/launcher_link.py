"""A launcher's stream to its coordinator: it says what it keeps, and hears what it should keep.

Whatever starts workers, on this machine or over many, implements `Keeper`; `stay_attached` does the rest.
"""

import asyncio
import contextlib
import logging
from typing import Any, Protocol

import grpc
import grpc.aio

from coordinator.duplex import own_faults, until_one_ends
from loopline.launcher_messages import LauncherReport, Wanted, WorkerCounts
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import open_channel

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.2
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class Keeper(Protocol):
    """Whoever starts workers and keeps them running. On one event loop; neither call waits."""

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever `report` would say something new; cleared by the link."""
        ...

    def report(self, revision: int) -> LauncherReport:
        """What it keeps now. `revision`: of the last wish that it was told, to be sent along."""
        ...

    def want(self, counts: WorkerCounts) -> None:
        """Start workers that are missing, tell those too many to leave, and do not start these again."""
        ...


async def stay_attached(
    address: str, keeper: Keeper, stopping: asyncio.Event, credentials: Credentials = NO_CREDENTIALS
) -> None:
    """Be attached to the coordinator at HOST:PORT, again and again, until `stopping`. What the coordinator says of a
    stream that it does not take is logged."""
    said = ""
    async with open_channel(address, credentials) as channel:
        while not stopping.is_set():
            reason = await _first(_attach_once(channel, keeper), stopping)
            if reason and reason != said:
                _LOG.info("not attached to %s: %s", address, reason)
            said = reason or said
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await stopping.wait()


async def _first(work: Any, stopping: asyncio.Event) -> str:
    """What `work` returns; "" if `stopping` comes first."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return str(tasks[0].result()) if tasks[0].done() else ""
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _attach_once(channel: grpc.aio.Channel, keeper: Keeper) -> str:
    """One life of the stream; why it ended."""
    stub: Any = cluster_pb2_grpc.ClusterStub
    call = stub(channel).AttachLauncher()
    revision = 0

    async def read() -> None:
        nonlocal revision
        while (message := await call.read()) is not _EOF:
            wanted = convert.from_proto(Wanted, message)
            keeper.want(wanted.counts)
            revision = wanted.revision
            keeper.changed.set()

    async def write() -> None:
        while True:
            keeper.changed.clear()
            await call.write(convert.to_proto(keeper.report(revision)))
            await keeper.changed.wait()

    try:
        ends = await until_one_ends(read(), write())
    finally:
        call.cancel()
    for fault in own_faults(ends):
        raise fault
    for end in ends:
        if isinstance(end, grpc.aio.AioRpcError):
            return f"{end.code().name} {end.details()}"
    return "its stream ended"
