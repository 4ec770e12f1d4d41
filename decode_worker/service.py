"""The decode worker's gRPC side: answering prefill workers' connects, commits, fetches and questions to close."""

from collections.abc import Callable
from typing import Any

import grpc

from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import Cause
from loopline.messages import Commit, CommitAnswer, Connect, Connected
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.worker.events import CommitReceived, FetchAsked
from loopline.worker.peer_calls import Answer
from loopline.worker.writers import answer_close

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

    async def FetchPrefix(self, request: Any, context: Any) -> Any:
        """Push cached blocks to the reader; answered when that has ended, well or not."""
        fetch = convert.from_proto(FetchPrefix, request)
        answer: Answer[PrefixSent] = Answer()
        self._to_engine(FetchAsked(fetch, answer.give))
        try:
            sent = await answer.wait(fetch.limit_s)
        except TimeoutError:
            me = self._make_connected().peer.worker
            sent = PrefixSent(fetch.key, me, cause=Cause.TRANSFER_TIMEOUT, detail="not pushed in time")
        return convert.to_proto(sent)

    async def CloseHandoff(self, request: Any, context: Any) -> Any:
        """Of a fetch that this worker writes."""
        return await answer_close(request, context, self._make_connected().peer.worker, self._to_engine)
