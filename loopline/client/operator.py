"""The operator's client: changes what a running cluster keeps. Blocking; the `loopline` command uses it."""

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from loopline.client.blocking import Client
from loopline.client.convert import CALL_TIMEOUT_S, error_of, record_of
from loopline.client.records import ClusterStatus
from loopline.errors import OperatorError
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire._generated.loopline.v1 import operations_pb2, operations_pb2_grpc
from loopline.wire.channel import open_blocking_channel


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Workers that the launcher was to keep before, and is to keep now."""

    prefill_before: int
    decode_before: int
    unified_before: int
    prefill: int
    decode: int
    unified: int


@dataclass(frozen=True, kw_only=True)
class DrainOrdered:
    """The life that drains, its limit, and whether its launcher starts the worker again."""

    uuid: str
    limit_s: float
    returns: bool


class Operator:
    """`address` is HOST:PORT of the coordinator. Calls raise OperatorError with the coordinator's reason, or the errors
    of Client.
    """

    def __init__(self, address: str, *, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Where the cluster has a token, `credentials` need it: a client's does not do."""
        self.address = address
        self._client = Client(address, credentials=credentials)
        self._channel = open_blocking_channel(address, credentials)
        self._stub: Any = operations_pb2_grpc.OperationsStub(self._channel)  # type: ignore[no-untyped-call]

    def status(self) -> ClusterStatus:
        """See Client.status."""
        return self._client.status()

    def scale(self, *, prefill: int | None = None, decode: int | None = None, unified: int | None = None) -> Scaled:
        """Have the launcher keep so many workers, None: as many as now. Answered before they are there."""
        counts = {"prefill": prefill, "decode": decode, "unified": unified}
        return record_of(Scaled, self._call("Scale", operations_pb2.ScaleRequest, **counts))

    def drain(self, worker: str, *, limit_s: float | None = None) -> DrainOrdered:
        """Have the worker of that name finish within the limit (None: the configuration's) and leave. Answered before
        it has."""
        answer = self._call("DrainWorker", operations_pb2.DrainWorkerRequest, worker=worker, limit_s=limit_s)
        return record_of(DrainOrdered, answer)

    def close(self) -> None:
        self._channel.close()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, kind: Any, **values: Any) -> Any:
        try:
            request = kind(**values)
        except ValueError as error:
            raise OperatorError(f"{values}: {error}") from error
        try:
            return getattr(self._stub, name)(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_of(error, self.address, False) from error
