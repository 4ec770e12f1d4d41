"""The prefill worker's gRPC side: pairing with decode workers, delivering commits, asking for prefixes, answering
CloseHandoff."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from kvtransfer.commands import Command, ConnectPeer, PeerConnectFailed
from loopline.errors import PeerLost
from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import Cause, Peer, WorkerId
from loopline.messages import Commit, CommitAnswer, Connect, Connected
from loopline.telemetry.logs import about
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.worker.events import CommitAnswered, CommitUndelivered, PrefixAnswered
from loopline.worker.peer_calls import PeerCalls, describe
from loopline.worker.writers import answer_close

logger = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 10.0
_COMMIT_LIMIT_S = 10.0
_COMMIT_RETRY_S = 0.1
_ANSWER_S = 5.0
"""How long after its limit a fetch's answer may come: the decode worker keeps to the limit too, and says so."""


class PrefillPeering(cluster_pb2_grpc.PeeringServicer):
    """Answers decode workers."""

    def __init__(self, identity: Callable[[], WorkerId], to_engine: Callable[[object], None]) -> None:
        self._identity = identity
        self._to_engine = to_engine

    async def CloseHandoff(self, request: Any, context: Any) -> Any:
        """Of a handoff that this worker writes."""
        return await answer_close(request, context, self._identity(), self._to_engine)


class DecodePeers:
    """Calls to decode workers; failures become events of the engine thread or transfer thread."""

    def __init__(
        self,
        make_connect: Callable[[], Connect],
        to_engine: Callable[[object], None],
        to_transfer: Callable[[Command], None],
        calls: PeerCalls,
    ) -> None:
        self._make_connect = make_connect
        self._to_engine = to_engine
        self._to_transfer = to_transfer
        self._calls = calls

    def connect(self, peer: Peer) -> None:
        """Pair with a decode worker; any thread."""
        self._calls.start(self._connect(peer))

    def deliver_commit(self, peer: Peer, commit: Commit) -> None:
        """Bring a commit to its decode worker; any thread."""
        self._calls.start(self._deliver(peer, commit))

    def ask_prefix(self, peer: Peer, fetch: FetchPrefix) -> None:
        """Have a decode worker push what it has cached; any thread."""
        self._calls.start(self._ask_prefix(peer, fetch))

    async def _ask_prefix(self, peer: Peer, fetch: FetchPrefix) -> None:
        """However it ends, the engine thread hears of it, and by then has given up itself what is late."""
        sent = PrefixSent(fetch.key, peer.worker, cause=Cause.PEER_LOST, detail=f"{peer.name} was not asked")
        try:
            answer = await self._calls.stub(peer).FetchPrefix(
                convert.to_proto(fetch), timeout=fetch.limit_s + _ANSWER_S
            )
            sent = convert.from_proto(PrefixSent, answer)
        except (grpc.aio.AioRpcError, PeerLost, ValueError) as error:
            is_late = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            cause = Cause.TRANSFER_TIMEOUT if is_late else Cause.PEER_LOST
            sent = replace(sent, cause=cause, detail=f"{peer.name}: {describe(error)}")
        finally:
            self._to_engine(PrefixAnswered(sent))

    async def _connect(self, peer: Peer) -> None:
        try:
            answer = await self._calls.stub(peer).ConnectPeer(
                convert.to_proto(self._make_connect()), timeout=_CONNECT_TIMEOUT_S, wait_for_ready=True
            )
            connected = convert.from_proto(Connected, answer)
        except (grpc.aio.AioRpcError, PeerLost, ValueError) as error:
            text = f"no answer at {peer.address}, its advertised address: {describe(error)}"
            self._to_engine(PeerConnectFailed(peer, text))
            return
        if connected.peer.worker.uuid != peer.worker.uuid:
            self._to_engine(PeerConnectFailed(peer, f"another worker answers at {peer.address}"))
            return
        self._to_transfer(ConnectPeer(peer, connected.agent_metadata, connected.region))

    async def _deliver(self, peer: Peer, commit: Commit) -> None:
        """Whatever happens, the engine thread hears how it ended: without an answer the request would wait for ever."""
        event: CommitAnswered | CommitUndelivered
        try:
            answer = await self._commit(peer, commit)
            event = CommitAnswered(commit.key, answer.cause, peer.name)
            if answer.cause is not None:
                text, about_it = "commit of generation %d was ignored by %s: %s", about(commit.key.request_id)
                logger.info(text, commit.key.generation, peer.name, answer.cause.value, extra=about_it)
        except (grpc.aio.AioRpcError, PeerLost, ValueError) as error:
            event = CommitUndelivered(commit.key, f"{peer.name}: {describe(error)}")
        except Exception as error:
            logger.exception("a commit could not be sent to %s", peer.name, extra=about(commit.key.request_id))
            event = CommitUndelivered(commit.key, f"{peer.name}: {error!r}")
        self._to_engine(event)

    async def _commit(self, peer: Peer, commit: Commit) -> CommitAnswer:
        """The same commit may come twice, so a connection that broke under the call costs another one."""
        request = convert.to_proto(commit)
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + _COMMIT_LIMIT_S
        while True:
            left_s = max(give_up_at_s - loop.time(), _COMMIT_RETRY_S)
            try:
                answer = await self._calls.stub(peer).CommitHandoff(request, timeout=left_s, wait_for_ready=True)
                return convert.from_proto(CommitAnswer, answer)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or loop.time() >= give_up_at_s:
                    raise
            await asyncio.sleep(_COMMIT_RETRY_S)  # a pause between attempts, not scheduling
