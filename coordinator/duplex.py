"""Both directions of one gRPC stream at once, for whoever is at either end of it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

_STREAM_ENDED = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError)  # what gRPC says of a call that is over


async def until_one_ends(*directions: Coroutine[Any, Any, None]) -> list[BaseException]:
    """Run them until the first has ended, then cancel the others: what each of them raised, but for the cancelling."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [end for end in ends if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError)]


def own_faults(ends: list[BaseException]) -> list[BaseException]:
    """Those that broke in this process, and do not only say that the stream is over."""
    return [end for end in ends if not isinstance(end, _STREAM_ENDED)]
