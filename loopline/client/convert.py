"""The public API's messages <-> the client's records, statuses -> errors. Both clients share it."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import grpc

from loopline.client.records import Accepted, Chunk, Event, Finished, Token
from loopline.errors import (
    AccessRefused,
    CoordinatorUnreachable,
    DeadlineExceeded,
    InvalidRequest,
    LooplineError,
    NoTokenizer,
    NotRead,
    OperatorError,
    Overloaded,
    PeerError,
    RequestRefused,
    RequestTooLarge,
    WorkerLost,
)
from loopline.intake import Chat, RequestOptions
from loopline.messages import HandoffStats
from loopline.request import FinishReason, InitialState, Route, Timing, TokenLogprob, TokenLogprobs, Usage
from loopline.wire._generated.loopline.v1 import loopline_pb2
from loopline.wire.channel import ERROR_KEY, RETRY_KEY

CALL_TIMEOUT_S = 10.0  # of the calls that answer at once
POLL_S = 0.05  # between two looks at a cluster that does not serve yet
_REASONS = {
    number: FinishReason(name.removeprefix("FINISH_REASON_").lower())
    for name, number in loopline_pb2.FinishReason.items()
    if number
}
_INITIAL_STATES = {
    None: loopline_pb2.INITIAL_STATE_UNSPECIFIED,
    InitialState.NOISE: loopline_pb2.INITIAL_STATE_NOISE,
    InitialState.ZEROS: loopline_pb2.INITIAL_STATE_ZEROS,
}
_ERRORS: Mapping[grpc.StatusCode, type[LooplineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestRefused,
    grpc.StatusCode.UNAUTHENTICATED: AccessRefused,
    grpc.StatusCode.PERMISSION_DENIED: AccessRefused,
}
_NAMED: Mapping[Any, type[LooplineError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        RequestTooLarge,
        NoTokenizer,
        OperatorError,
        RequestRefused,
        Overloaded,
        DeadlineExceeded,
        NotRead,
        WorkerLost,
    )
}
R = TypeVar("R")


def make_options(prompt: str | Sequence[int] | Chat, options: Mapping[str, Any]) -> RequestOptions:
    """RequestOptions of a prompt in any form; TypeError for an option that does not exist."""
    return RequestOptions(prompt=prompt if isinstance(prompt, str | Chat) else tuple(prompt), **options)


def generate_request(options: RequestOptions, label: str, deadline_s: float | None, priority: int = 0) -> Any:
    """The GenerateRequest. Raises InvalidRequest for a number that its field cannot hold, and for lone surrogates."""
    try:
        request = loopline_pb2.GenerateRequest(
            label=label,
            deadline_s=deadline_s,
            priority=priority,
            sampling=_sampling(options),
            delivered_token_ids=options.delivered_token_ids,
            session=options.session,
        )
        if isinstance(options.prompt, str):
            request.text = options.prompt.encode("utf-8")
        elif isinstance(options.prompt, Chat):
            request.messages.SetInParent()
            for role, content in options.prompt.messages:
                request.messages.messages.add(role=role, content=content.encode("utf-8"))
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(options.prompt)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(str(error)) from error
    return request


def _sampling(options: RequestOptions) -> Any:
    return loopline_pb2.SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=dict(options.logit_bias),
        stop=[text.encode("utf-8") for text in options.stop],
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
        exit_probabilities=options.exit_probabilities,
        loops=options.loops,
        initial_state=_INITIAL_STATES[options.initial_state],
    )


def event_of(message: Any) -> Event:
    """The event in a GenerateEvent. Raises PeerError for one that this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        accepted = message.accepted
        return Accepted(accepted.request_id, accepted.seed, accepted.prompt_tokens)
    if kind == "chunk":
        return Chunk(tuple(_token(token) for token in message.chunk.tokens), message.chunk.text)
    if kind == "finished":
        return _finished(message.finished)
    raise PeerError("the coordinator sent an event that this client does not know")


def _token(message: Any) -> Token:
    logprobs = None
    if message.HasField("logprob"):
        top = tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top_logprobs)
        logprobs = TokenLogprobs(message.logprob, top)
    return Token(message.id, message.depth, logprobs, tuple(message.exit_probabilities))


def _finished(message: Any) -> Finished:
    route = message.route
    return Finished(
        reason=_REASONS.get(message.reason, FinishReason.ERROR),
        text=message.text,
        has_text=message.has_text,
        usage=record_of(Usage, message.usage),
        timing=record_of(Timing, message.timing),
        route=Route(route.prefill, route.decode, tuple(route.earlier), route.prefix_source),
        handoff=record_of(HandoffStats, message.handoff) if message.HasField("handoff") else None,
    )


def record_of(kind: type[R], message: Any) -> R:
    """The record whose fields have the message's names. One that may be None is None where the message has none."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, kind))]
    return kind(**{name: _maybe_value(hints[name], message, name) for name in names})


def _maybe_value(hint: Any, message: Any, name: str) -> Any:
    """None where the field's record may be missing and is."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return _value(hint, getattr(message, name))
    present = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return _value(present, getattr(message, name)) if message.HasField(name) else None


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return record_of(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if typing.get_origin(hint) is Mapping:
        return dict(sorted(value.items()))
    return value


def error_of(
    error: Any, address: str, accepted: bool, *, too_large: type[LooplineError] = OperatorError
) -> LooplineError:
    """The error that the coordinator named in the call's trailing metadata, else what the status means. `too_large`: of
    a message past either side's limit, which gRPC itself refuses."""
    code, text = error.code(), error.details() or error.code().name
    metadata = dict(error.trailing_metadata() or ())
    named = _NAMED.get(metadata.get(ERROR_KEY))
    if named is Overloaded:
        return Overloaded(text, _retry_after_s(metadata.get(RETRY_KEY)))
    if named is not None:
        return named(text)
    if code is grpc.StatusCode.UNAVAILABLE and accepted:
        return WorkerLost(text)
    if code is grpc.StatusCode.UNAVAILABLE:
        hint = "; one with TLS closes connections without it: --ca-file or --config" if "ocket closed" in text else ""
        return CoordinatorUnreachable(
            f"no coordinator answers at {address}; is the cluster running? `loopline launch` says where ({text}{hint})"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return too_large(text)
    return _ERRORS.get(code, PeerError)(text if code in _ERRORS else f"{code.name}: {text}")


def _retry_after_s(pushback_ms: Any) -> float | None:
    """Seconds; None where there is no number that means any."""
    return int(pushback_ms) / 1000 if isinstance(pushback_ms, str) and pushback_ms.isdecimal() else None
