"""Calls from one worker to others: a channel for each address, and the tasks that wait for answers."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc.aio

from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import open_channel


class PeerCalls:
    """Owned by the event loop; `start` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def stub(self, address: str) -> Any:
        """The peer service of the worker at HOST:PORT; event loop only."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return cluster_pb2_grpc.PeeringStub(self._channels[address])  # type: ignore[no-untyped-call]

    def start(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call in the background; any thread."""
        self._loop.call_soon_threadsafe(self._start, call)

    def _start(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
