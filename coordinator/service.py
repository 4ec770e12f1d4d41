"""gRPC servicers: the public API, and the workers' side. They convert and wait; the dispatcher decides.

A Generate call holds exactly one request: whatever ends the call first ends the request.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coordinator.dispatcher import Dispatcher
from coordinator.duplex import own_faults, until_one_ends
from coordinator.effects import Ending, Outcome
from coordinator.fleet import Fleet, LauncherStream
from coordinator.intake import Intake, Submission
from coordinator.registry import LossReason, Refused
from coordinator.render import (
    accepted_event,
    chunk_event,
    ending_error,
    error_status,
    finished_event,
    status_message,
)
from coordinator.streams import Finish, Tokens, WorkerStream
from loopline.errors import LooplineError, NotRead, OperatorError, Overloaded
from loopline.identity import WorkerId
from loopline.launcher_messages import LauncherReport
from loopline.messages import Register, Rejected
from loopline.request import Route, Timing, Usage
from loopline.telemetry.logs import about
from loopline.telemetry.traces import TRACEPARENT
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2, cluster_pb2_grpc, loopline_pb2, loopline_pb2_grpc

_LOG = logging.getLogger(__name__)
MOST_WRITE_S = 60.0
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class ModelCard:
    """What GetModel says besides limits."""

    name: str
    dtype: str


class LooplineServicer(loopline_pb2_grpc.LooplineServicer):
    """The public API."""

    def __init__(
        self, dispatcher: Dispatcher, fleet: Fleet, intake: Intake, card: ModelCard, most_write_s: float = MOST_WRITE_S
    ) -> None:
        """`most_write_s`: how long the transport may take for one event."""
        self._most_write_s = most_write_s
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._intake = intake
        self._card = card

    async def Generate(self, message: Any, context: Context) -> None:
        """Accepted, then chunks, then Finished; a failure is the call's status.

        Written to the context and not yielded: a client that goes away cancels this coroutine wherever it waits.
        """
        try:
            clock = asyncio.get_running_loop()
            arrived_s, call_s = clock.time(), context.time_remaining()
            submission = await self._read(message)
            request, deadline_s = submission.request, submission.deadline_s
            left_s = arrived_s + (deadline_s if call_s is None else min(deadline_s, call_s)) - clock.time()
            if submission.whole is not None:
                await self._end_whole(submission, context)
                return
            traceparent = str(dict(context.invocation_metadata() or ()).get(TRACEPARENT, ""))
            stream = self._dispatcher.submit(request, left_s, submission.decoder, submission.priority, traceparent)
        except LooplineError as error:
            if isinstance(error, Overloaded):
                self._dispatcher.metrics.refused()
            refusal, metadata = error_status(error)
            await context.abort(refusal, str(error), metadata)
        text = "accepted: %d prompt tokens, at most %d new ones, label %r"
        numbers = len(request.prompt_ids), request.params.max_tokens
        _LOG.info(text, *numbers, message.label, extra=about(request.request_id))
        try:
            await self._write(context, accepted_event(request))
            while isinstance(event := await stream.next_event(), Tokens):
                await self._write(context, chunk_event(event))
            failure = ending_error(event.outcome)
            if failure is None:
                await self._write(context, finished_event(event))
        except NotRead as error:
            self._dispatcher.not_read(request.request_id, str(error))
            failure = error
        finally:
            self._dispatcher.cancel(request.request_id)
        if failure is not None:
            status, metadata = error_status(failure)
            with contextlib.suppress(TimeoutError):  # the status comes behind what was not taken
                async with asyncio.timeout(self._most_write_s):
                    await context.abort(status, str(failure), metadata)

    async def _read(self, message: Any) -> Submission:
        """In a thread, which goes on to its end if the client leaves: until then the request has its place."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._dispatcher.hold_place())
            reading = asyncio.ensure_future(asyncio.to_thread(self._intake.resolve, message))
            held = stack.pop_all()

        def give_back(done: "asyncio.Future[Submission]") -> None:
            held.close()
            if not done.cancelled():
                done.exception()  # whoever waits has it; nobody may wait any more

        reading.add_done_callback(give_back)
        return await asyncio.shield(reading)

    async def _end_whole(self, submission: Submission, context: Context) -> None:
        """The client has all tokens and missed the end, of a coordinator that went away: say it again."""
        assert submission.whole is not None
        request, decoder = submission.request, submission.decoder
        outcome = Outcome(
            ending=Ending.FINISHED,
            reason=submission.whole,
            detail="",
            usage=Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=len(request.generated_ids)),
            timing=Timing(),
            route=Route(),
            stats=None,
        )
        await self._write(context, accepted_event(request))
        await self._write(context, finished_event(Finish(outcome, None if decoder is None else decoder.finish())))

    async def _write(self, context: Context, message: Any) -> None:
        """Give the transport one event. It takes no more while the client does not read; NotRead where that lasts."""
        try:
            async with asyncio.timeout(self._most_write_s):
                await context.write(message)
        except TimeoutError:
            text = f"the client has taken nothing for {self._most_write_s:g} s; its request was ended"
            raise NotRead(text) from None

    async def GetModel(self, message: Any, context: Context) -> Any:
        intake, spec = self._intake, self._intake.spec
        snapshot = self._dispatcher.membership()
        return loopline_pb2.Model(
            name=self._card.name,
            family=spec.family.value,
            dtype=self._card.dtype,
            vocab_size=spec.vocab_size,
            context_tokens=spec.context_tokens,
            default_loops=min(spec.default_loops, intake.max_loops),
            max_loops=intake.max_loops,
            has_tokenizer=intake.codec is not None,
            has_chat_template=intake.codec is not None and intake.codec.has_chat_template,
            kv_bytes_per_token=max((view.capacity.token_bytes for view in snapshot.workers), default=0),
            arena_tokens=snapshot.arena_tokens() or 0,
            stop_token_ids=spec.stop_ids,
        )

    async def GetStatus(self, message: Any, context: Context) -> Any:
        dispatcher = self._dispatcher
        return status_message(
            dispatcher.snapshot(),
            queued=dispatcher.num_queued,
            running=dispatcher.num_running,
            serving=dispatcher.readiness.serving,
            epoch=dispatcher.epoch,
            launcher=self._fleet.launcher,
        )


class ClusterServicer(cluster_pb2_grpc.ClusterServicer):
    """The workers' and launchers' side."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet

    async def Attach(self, messages: AsyncIterator[Any], context: Context) -> None:
        """One worker's stream, from Register to its loss; it ends when either side is done with the other."""
        register = await self._first_message(context)
        stream = self._dispatcher.join(register)
        if isinstance(stream, Refused):
            _LOG.warning("worker %s was rejected: %s", register.peer.name, stream.reason)
            rejected = Rejected(stream.reason, stream.retry)
            await context.write(convert.wrap_coordinator_message(rejected, self._dispatcher.epoch))
            return
        worker = register.peer.worker
        why = ""
        try:
            ends = await until_one_ends(self._write_commands(stream, context), self._read_messages(worker, context))
            for fault in own_faults(ends):
                why = "this coordinator failed on its stream, which is a bug"
                _LOG.error("the stream of worker %s failed here", register.peer.name, exc_info=fault)
        finally:
            self._dispatcher.lose(worker, LossReason.STREAM, why)

    async def ReportExit(self, message: Any, context: Context) -> Any:
        how = (
            f"ended with exit status {message.exit_status}"
            if message.HasField("exit_status")
            else "is proven to be gone"
        )
        _LOG.warning("%s (pid %s) %s", message.name, message.pid if message.HasField("pid") else "unknown", how)
        if not message.uuid:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "uuid is empty; needed: who the process was")
        self._dispatcher.on_ended((message.uuid,))
        return cluster_pb2.WorkerExitAnswer()

    async def AttachLauncher(self, messages: AsyncIterator[Any], context: Context) -> None:
        """One launcher's stream, from its first report on; it ends when either side does or it is replaced."""
        try:
            report = convert.from_proto(LauncherReport, await context.read())
            stream = self._fleet.attach(report)
            self._dispatcher.on_ended(report.ended)
        except OperatorError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except (ValueError, AttributeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a launcher's report: {error}")
        try:
            ends = await until_one_ends(self._write_wanted(stream, context), self._read_reports(stream, context))
            for fault in own_faults(ends):
                _LOG.error("the stream of the launcher for %s failed here", report.place, exc_info=fault)
        finally:
            self._fleet.detach(stream)

    async def _first_message(self, context: Context) -> Register:
        envelope = await context.read()
        if isinstance(envelope, cluster_pb2.WorkerMessage) and envelope.HasField("register"):
            try:
                return convert.from_proto(Register, envelope.register)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker's first message must be Register")

    async def _write_commands(self, stream: WorkerStream, context: Context) -> None:
        while (message := await stream.next_message()) is not None:
            await context.write(convert.wrap_coordinator_message(message, self._dispatcher.epoch))

    async def _write_wanted(self, stream: LauncherStream, context: Context) -> None:
        while (wanted := await stream.next_wanted()) is not None:
            await context.write(convert.to_proto(wanted))

    async def _read_reports(self, stream: LauncherStream, context: Context) -> None:
        while (report := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            taken = convert.from_proto(LauncherReport, report)
            self._fleet.take(stream, taken)
            self._dispatcher.on_ended(taken.ended)

    async def _read_messages(self, worker: WorkerId, context: Context) -> None:
        while (envelope := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            try:
                message, epoch = convert.unwrap_worker_message(envelope)
            except ValueError as error:
                _LOG.warning("ignored from %s: %s", worker, error)
                self._dispatcher.count_garbage()
            else:
                self._dispatcher.on_message(worker, message, epoch)
