"""The decode worker's gRPC side: answering prefill workers' connects and commits, asking writers to close."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from loopline.errors import PeerLost
from loopline.identity import HandoffKey, Peer, WorkerId
from loopline.messages import (
    CloseHandoff,
    CloseState,
    Commit,
    CommitAnswer,
    Connect,
    Connected,
    HandoffClosed,
)
from loopline.telemetry.logs import about
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.worker.events import CommitReceived, WriterClosed
from loopline.worker.peer_calls import Answer, PeerCalls, describe

logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_COMMIT_LIMIT_S = 10.0


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
        commit = convert.from_proto(Commit, request)
        answer: Answer[CommitAnswer] = Answer()
        self._to_engine(CommitReceived(commit, answer.give))
        try:
            return convert.to_proto(await answer.wait(_COMMIT_LIMIT_S))
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine does not answer")


class Writers:
    """Asks writers to close given-up handoffs.

    Owned by the event loop. One call answers one question or fails; the engine thread asks again for as long as its
    books lack the answer. Invariant: one call at a time for each handoff.
    """

    def __init__(self, to_engine: Callable[[object], None], calls: PeerCalls) -> None:
        self._to_engine = to_engine
        self._calls = calls
        self._asking: set[HandoffKey] = set()
        self._silent: set[str] = set()  # uuids of writers whose last answer was none

    def ask_close(self, key: HandoffKey, writer: Peer) -> None:
        """Ask, unless the question is under way; any thread. A final answer comes to the engine thread as
        WriterClosed."""
        self._calls.start(self._ask(key, writer))

    def forget(self, worker: WorkerId) -> None:
        """That worker's process is proven gone; event loop only."""
        self._silent.discard(worker.uuid)

    async def _ask(self, key: HandoffKey, writer: Peer) -> None:
        if key in self._asking:
            return
        self._asking.add(key)
        try:
            request = convert.to_proto(CloseHandoff(key, writer.worker))
            answer = await self._calls.stub(writer).CloseHandoff(request, timeout=_CLOSE_TIMEOUT_S)
            closed = convert.from_proto(HandoffClosed, answer)
        except PeerLost:
            return  # the books hear of it from the coordinator too
        except (grpc.aio.AioRpcError, ValueError) as error:
            if writer.worker.uuid not in self._silent:
                self._silent.add(writer.worker.uuid)
                text = "%s does not answer CloseHandoff: %s"
                logger.warning(text, writer.name, describe(error), extra=about(key.request_id))
            return
        finally:
            self._asking.discard(key)
        if writer.worker.uuid in self._silent:
            self._silent.discard(writer.worker.uuid)
            logger.info("%s answers CloseHandoff again", writer.name)
        if closed.state is not CloseState.PENDING:
            self._to_engine(WriterClosed(key, writer.worker, closed.state))
