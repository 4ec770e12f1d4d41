"""What a launcher says to its coordinator, and asks of it, besides the stream of `launcher_link`."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coordinator.background import Background
from coordinator.hung import HungLooks
from coordinator.processes import Process
from loopline.identity import WorkerState
from loopline.security import Credentials
from loopline.wire._generated.loopline.v1 import cluster_pb2, cluster_pb2_grpc, loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import open_channel

_LOG = logging.getLogger(__name__)
_CALL_S = 2.0
_RETRY_S = 0.2


@dataclass(frozen=True)
class Ended:
    """A worker process that can write no more. `pid` None: nobody heard it; `exit_status` None: nobody saw it."""

    name: str
    uuid: str
    pid: int | None
    exit_status: int | None


class Coordinator:
    """The coordinator at an address, as its launcher speaks to it until it stops."""

    def __init__(self, address: str, credentials: Credentials, background: Background) -> None:
        self._address = address
        self._credentials = credentials
        self._background = background

    async def report(self, ended: Ended) -> None:
        """The proof that this process can write no more: said until it is answered, or until all is stopped."""
        stub: Any = cluster_pb2_grpc.ClusterStub
        message = cluster_pb2.WorkerExit(pid=ended.pid, exit_status=ended.exit_status, name=ended.name, uuid=ended.uuid)
        async with open_channel(self._address, self._credentials) as channel:
            while not self._background.is_stopping:
                try:
                    await stub(channel).ReportExit(message, timeout=_CALL_S, wait_for_ready=True)
                    return
                except grpc.aio.AioRpcError as error:
                    _LOG.warning("the end of %s cannot be reported yet: %s", ended.name, error.code())
                await self._background.unless_stopped(_RETRY_S)

    async def kill_hung(self, workers: Callable[[], Mapping[str, Process]], lease_s: float) -> None:
        """Kill a worker that is lost, or that has joined once and is not there under a later coordinator, and does not
        come back: its writes must be proven to have ended. `workers`: the living ones, by uuid."""
        looks = HungLooks(lease_s)
        stub: Any = loopline_pb2_grpc.LooplineStub
        async with open_channel(self._address, self._credentials) as channel:
            while not await self._background.unless_stopped(lease_s):
                try:
                    status = await stub(channel).GetStatus(loopline_pb2.GetStatusRequest(), timeout=_CALL_S)
                except grpc.aio.AioRpcError:
                    continue
                there = {row.uuid: WorkerState(row.state) for row in status.workers}
                living = workers()
                for uuid in looks.look(there, living):
                    _LOG.warning("worker %s (pid %d) is hung: killed", living[uuid].name, living[uuid].pid)
                    living[uuid].kill()
