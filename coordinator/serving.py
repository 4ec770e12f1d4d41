"""Waiting for a coordinator: until it listens, until its cluster serves."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loopline.errors import OperatorError
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire.channel import open_channel

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_LISTEN_S = 120.0  # a busy machine takes its time to load


async def wait_serving(address: str, timeout_s: float, credentials: Credentials = NO_CREDENTIALS) -> None:
    """Until the coordinator at HOST:PORT reports SERVING, by its health service. Raises TimeoutError."""
    stub: Any = health_pb2_grpc.HealthStub
    async with asyncio.timeout(timeout_s), open_channel(address, credentials) as channel:
        while True:
            try:
                async for answer in stub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                _LOG.info("health of %s: %s", address, error.code())
            await asyncio.sleep(_POLL_S)


async def wait_for_address(listen_file: Path, limit_s: float = _LISTEN_S) -> str:
    """Until a coordinator has written there where it listens: HOST:PORT. Raises OperatorError: past the limit."""
    try:
        async with asyncio.timeout(limit_s):
            while (address := _read_address(listen_file)) is None:  # noqa: ASYNC110 - a file has no event to wait for
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise OperatorError(f"the coordinator does not listen after {limit_s:g} s: no {listen_file}") from None
    return address


def _read_address(listen_file: Path) -> str | None:
    """The file appears whole or not at all."""
    try:
        return str(json.loads(listen_file.read_text(encoding="utf-8"))["address"])
    except FileNotFoundError:
        return None
