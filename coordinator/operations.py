"""The operator's calls: scale, drain. They ask the fleet and the dispatcher, and are answered at once."""

import logging
from typing import Any

import grpc.aio

from coordinator.dispatcher import Dispatcher
from coordinator.fleet import Fleet
from coordinator.render import error_status
from loopline.errors import OperatorError
from loopline.wire._generated.loopline.v1 import operations_pb2, operations_pb2_grpc

_LOG = logging.getLogger(__name__)
_MOST_LIMIT_S = 86_400.0
Context = grpc.aio.ServicerContext[Any, Any]


class OperationsServicer(operations_pb2_grpc.OperationsServicer):
    """What cannot be done ends the call with the reason; nothing has changed then."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet, drain_limit_s: float) -> None:
        """`drain_limit_s`: for drains that name no limit."""
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._drain_limit_s = drain_limit_s

    async def Scale(self, message: Any, context: Context) -> Any:
        prefill = message.prefill if message.HasField("prefill") else None
        decode = message.decode if message.HasField("decode") else None
        unified = message.unified if message.HasField("unified") else None
        try:
            before, after = self._fleet.scale(prefill, decode, unified)
        except OperatorError as error:
            await context.abort(*_status(error))
        _LOG.info("scaled from %s to %s", before, after)
        return operations_pb2.ScaleAnswer(
            prefill_before=before.prefill,
            decode_before=before.decode,
            unified_before=before.unified,
            prefill=after.prefill,
            decode=after.decode,
            unified=after.unified,
        )

    async def DrainWorker(self, message: Any, context: Context) -> Any:
        limit_s = message.limit_s if message.HasField("limit_s") else self._drain_limit_s
        try:
            if not 0 <= limit_s <= _MOST_LIMIT_S:  # false for NaN
                raise OperatorError(f"limit_s is {limit_s:g}; allowed: 0 to {_MOST_LIMIT_S:g}")
            worker = self._dispatcher.drain_worker(message.worker, limit_s)
        except OperatorError as error:
            await context.abort(*_status(error))
        _LOG.info("worker %s drains for at most %g s", message.worker, limit_s)
        return operations_pb2.DrainWorkerAnswer(
            uuid=worker.uuid, limit_s=limit_s, returns=self._fleet.returns(message.worker)
        )


def _status(error: OperatorError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    code, metadata = error_status(error)
    return code, str(error), metadata
