"""CloseHandoff between workers, on the event loop: asking writers to close what was given up here, and answering
whoever asks that of this worker.
"""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from loopline.errors import PeerLost
from loopline.identity import HandoffKey, Peer, WorkerId
from loopline.messages import CloseHandoff, CloseState, HandoffClosed
from loopline.telemetry.logs import about
from loopline.wire import convert
from loopline.worker.events import CloseAsked, WriterClosed
from loopline.worker.peer_calls import Answer, PeerCalls, describe

logger = logging.getLogger(__name__)
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_POLL_S = 5.0


async def answer_close(request: Any, context: Any, me: WorkerId, to_engine: Callable[[object], None]) -> Any:
    """Long poll: answers when nothing of the handoff can be written any more, or PENDING after a while.

    A process answers for itself alone: that another one, once at this address, has closed is not ours to say.
    """
    close = convert.from_proto(CloseHandoff, request)
    if close.writer.uuid != me.uuid:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, f"this is worker {me.uuid}, not the writer {close.writer.uuid}"
        )
    answer: Answer[HandoffClosed] = Answer()
    to_engine(CloseAsked(close, answer.give))
    try:
        closed = await answer.wait(_CLOSE_POLL_S)
    except TimeoutError:
        closed = HandoffClosed(close.key, CloseState.PENDING)
    return convert.to_proto(closed)


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
