"""The coordinator's records -> the public API's messages and statuses. No I/O."""

import math
from typing import Any

import grpc

from coordinator.effects import Ending, Outcome
from coordinator.snapshot import ClusterSnapshot, WorkerView
from coordinator.streams import Finish, Tokens
from loopline.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LooplineError,
    NotRead,
    OperatorError,
    Overloaded,
    RequestError,
    RequestRefused,
    RequestTooLarge,
    WorkerLost,
)
from loopline.identity import Role, WorkerState
from loopline.launcher_messages import LauncherReport
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import loopline_pb2
from loopline.wire.channel import ERROR_KEY, RETRY_KEY

_REASONS = {
    FinishReason.STOP: loopline_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: loopline_pb2.FINISH_REASON_LENGTH,
}
_ENDINGS: dict[Ending, type[LooplineError]] = {
    Ending.CANCELLED: RequestRefused,  # nobody is there to read it
    Ending.DEADLINE: DeadlineExceeded,
    Ending.UNREAD: NotRead,
    Ending.GIVEN_UP: WorkerLost,
    Ending.LEAVING: RequestRefused,
    Ending.TOO_LARGE: RequestTooLarge,
    Ending.INVALID: InvalidRequest,
}
Metadata = tuple[tuple[str, str], ...]


def error_status(error: LooplineError) -> tuple[grpc.StatusCode, Metadata]:
    """The status of a request that was not taken or did not finish by itself, and its trailing metadata."""
    kind: Metadata = ((ERROR_KEY, type(error).__name__),)
    if isinstance(error, RequestError):
        return grpc.StatusCode.INVALID_ARGUMENT, kind
    if isinstance(error, Overloaded):
        hint = () if error.retry_after_s is None else ((RETRY_KEY, str(math.ceil(1000 * error.retry_after_s))),)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, (*kind, *hint)
    if isinstance(error, DeadlineExceeded):
        return grpc.StatusCode.DEADLINE_EXCEEDED, kind
    if isinstance(error, NotRead):
        return grpc.StatusCode.ABORTED, kind
    if isinstance(error, RequestRefused):
        return grpc.StatusCode.UNAVAILABLE, kind
    if isinstance(error, OperatorError):
        return grpc.StatusCode.FAILED_PRECONDITION, kind
    return grpc.StatusCode.INTERNAL, kind


def ending_error(outcome: Outcome) -> LooplineError | None:
    """The error of a request that ended otherwise than by itself; None: a Finished event says it all."""
    kind = _ENDINGS.get(outcome.ending)
    return None if kind is None else kind(outcome.detail)


def accepted_event(request: Request) -> Any:
    return loopline_pb2.GenerateEvent(
        accepted=loopline_pb2.Accepted(
            request_id=request.request_id, seed=request.params.seed, prompt_tokens=len(request.prompt_ids)
        )
    )


def chunk_event(event: Tokens) -> Any:
    return loopline_pb2.GenerateEvent(
        chunk=loopline_pb2.Chunk(tokens=[_token(row) for row in event.rows], text=event.text)
    )


def finished_event(event: Finish) -> Any:
    outcome = event.outcome
    assert outcome.reason is not None  # it FINISHED
    usage, timing, route = outcome.usage, outcome.timing, outcome.route
    finished = loopline_pb2.Finished(
        reason=_REASONS[outcome.reason],
        text=event.text or "",
        has_text=event.text is not None,
        usage=loopline_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        timing=loopline_pb2.Timing(queued_s=timing.queued_s, ttft_s=timing.ttft_s, total_s=timing.total_s),
        route=loopline_pb2.Route(
            prefill=route.prefill, decode=route.decode, earlier=route.earlier, prefix_source=route.prefix_source
        ),
    )
    if outcome.stats is not None:
        finished.handoff.CopyFrom(convert.to_proto(outcome.stats))
    return loopline_pb2.GenerateEvent(finished=finished)


def status_message(
    snapshot: ClusterSnapshot,
    *,
    queued: int,
    running: int,
    serving: bool,
    epoch: int,
    launcher: LauncherReport | None = None,
) -> Any:
    return loopline_pb2.Status(
        launcher=None if launcher is None else _launcher(launcher),
        workers=[_worker(view, snapshot) for view in snapshot.workers],
        queued=queued,
        running=running,
        serving=serving,
        epoch=epoch,
    )


def waits_for(view: WorkerView, snapshot: ClusterSnapshot) -> str:
    """Why a worker that has joined takes no request yet; empty for others."""
    if view.state is not WorkerState.STARTING:
        return ""
    role = Role.DECODE if view.role is Role.PREFILL else Role.PREFILL
    others = [other for other in snapshot.with_role(role) if other.state is not WorkerState.DRAINING]
    if not others:
        return f"a {role.value} worker"
    if any(other.group == view.group for other in others):
        failure = f" (the last try failed: {view.link_failure})" if view.link_failure else ""
        return f"a warm link with a {role.value} worker{failure}"
    difference = view.group.first_difference(others[0].group)
    return f"a {role.value} worker with the same KV ({others[0].peer.name} differs in {difference})"


def _launcher(report: LauncherReport) -> Any:
    return loopline_pb2.Launcher(
        place=report.place,
        restarts=report.restarts,
        prefill=report.wanted.prefill,
        decode=report.wanted.decode,
        unified=report.wanted.unified,
        workers=[
            loopline_pb2.LaunchedWorker(
                name=worker.name, role=worker.role.value, leaving=worker.leaving, waits_for=worker.waits_for
            )
            for worker in report.workers
        ],
    )


def _token(row: TokenRow) -> Any:
    token = loopline_pb2.Token(id=row.token_id, depth=row.depth, exit_probabilities=row.exit_probabilities)
    if row.logprobs is not None:
        token.logprob = row.logprobs.chosen
        token.top_logprobs.extend(convert.to_proto(entry) for entry in row.logprobs.top)
    return token


def _worker(view: WorkerView, snapshot: ClusterSnapshot) -> Any:
    message = loopline_pb2.Worker(
        name=view.peer.name,
        role=view.role.value,
        state=view.state.value,
        pid=view.pid,
        address=view.peer.address,
        uuid=view.worker.uuid,
        epoch=view.worker.epoch,
        heartbeat_age_s=view.heartbeat_age_s,
        metrics_address=view.metrics_address,
        waits_for=waits_for(view, snapshot),
        links=[
            loopline_pb2.Link(
                peer=link.decode_name, transport=link.transport, bytes_per_s=link.bytes_per_s, is_slow=link.is_slow
            )
            for link in view.links
        ],
    )
    load = view.load
    if load is not None:
        message.running, message.waiting, message.step = load.running, load.waiting, load.step
        message.blocks.CopyFrom(convert.to_proto(load.blocks))
        message.handoffs.update(dict(load.handoffs))
        message.ignored.update(dict(load.ignored))
        if load.budget is not None:
            message.budget.CopyFrom(convert.to_proto(load.budget))
    return message
