"""The decode worker's gRPC side: answering prefill workers' connects and commits, asking writers to close."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from loopline.identity import HandoffKey, Peer
from loopline.messages import (
    CloseHandoff,
    CloseState,
    Commit,
    CommitAnswer,
    Connect,
    Connected,
    HandoffClosed,
)
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.worker.events import CommitReceived, WriterClosed
from loopline.worker.peer_calls import PeerCalls

logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_RETRY_S = 0.5


class DecodePeering(cluster_pb2_grpc.PeeringServicer):
    """Answers prefill workers."""

    def __init__(self, make_connected: Callable[[], Connected], to_engine: Callable[[object], None]) -> None:
        self._make_connected = make_connected
        self._to_engine = to_engine

    async def ConnectPeer(self, request: Any, context: Any) -> Any:
        """Say how to write here; refused with the field's name if the writer would write other KV than ours."""
        connect = convert.from_proto(Connect, request)
        mine = self._make_connected()
        difference = mine.fingerprint.first_difference(connect.fingerprint)
        if difference is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"{mine.peer.name} and {connect.peer.name} differ in {difference}"
            )
        return convert.to_proto(mine)

    async def CommitHandoff(self, request: Any, context: Any) -> Any:
        """Take a commit; answered once the engine thread has looked at it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CommitAnswer] = loop.create_future()

        def answer(value: CommitAnswer) -> None:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(value))

        self._to_engine(CommitReceived(convert.from_proto(Commit, request), answer))
        return convert.to_proto(await future)


class Writers:
    """Asks writers to close given-up handoffs, again and again until they are terminal."""

    def __init__(self, to_engine: Callable[[object], None], calls: PeerCalls) -> None:
        self._to_engine = to_engine
        self._calls = calls
        self._gone: set[str] = set()

    def ask_close(self, key: HandoffKey, writer: Peer) -> None:
        """Start asking; any thread. The final answer comes to the engine thread as WriterClosed."""
        self._calls.start(self._ask(key, writer))

    def stop_asking(self, uuid: str) -> None:
        """That worker's process is proven gone; event loop only."""
        self._gone.add(uuid)

    async def _ask(self, key: HandoffKey, writer: Peer) -> None:
        request = convert.to_proto(CloseHandoff(key, writer.worker))
        while writer.worker.uuid not in self._gone:
            try:
                answer = await self._calls.stub(writer.address).CloseHandoff(request, timeout=_CLOSE_TIMEOUT_S)
                closed = convert.from_proto(HandoffClosed, answer)
            except (grpc.aio.AioRpcError, ValueError) as error:
                logger.info("%s does not answer CloseHandoff of %s: %s", writer.name, key, error)
                await asyncio.sleep(_CLOSE_RETRY_S)  # a pause between attempts, not scheduling
                continue
            if closed.state is not CloseState.PENDING:
                self._to_engine(WriterClosed(key, writer.worker, closed.state))
                return


def add_peering(server: grpc.aio.Server, servicer: DecodePeering) -> None:
    """Put the service on a server."""
    cluster_pb2_grpc.add_PeeringServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
