"""A client's GenerateRequest -> what the dispatcher takes: UTF-8 and presence are checked here, values are resolved by
`loopline.intake`. Every token id is looked at here and not again. Sizes are not checked: the dispatcher knows them.

Every failure is a RequestError that names the field and the value. Tokenizing takes its time, so `resolve` is called in
a thread; nothing here changes.
"""

import secrets
import uuid
from dataclasses import dataclass
from typing import Any

from loopline.errors import InvalidRequest
from loopline.intake import Chat, Prompt, RequestOptions, check_deadline_s, check_priority, resolve_request
from loopline.model_spec import ModelSpec
from loopline.request import FinishReason, InitialState, Request, SamplingParams, check_token_ids
from loopline.text import TextCodec, TextStream
from loopline.wire._generated.loopline.v1 import loopline_pb2

_DEFAULTS = SamplingParams()
_INITIAL_STATES = {
    loopline_pb2.INITIAL_STATE_UNSPECIFIED: None,
    loopline_pb2.INITIAL_STATE_NOISE: InitialState.NOISE,
    loopline_pb2.INITIAL_STATE_ZEROS: InitialState.ZEROS,
}


@dataclass(frozen=True)
class Submission:
    """What the dispatcher takes. `decoder` None: the checkpoint has no tokenizer. `whole` is set where the delivered
    tokens are the whole answer already, of which the client missed the end only: no worker is needed."""

    request: Request
    deadline_s: float
    priority: int
    decoder: TextStream | None
    whole: FinishReason | None = None


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Resolves requests for one model."""

    spec: ModelSpec
    codec: TextCodec | None
    max_loops: int
    initial_state: InitialState
    """Where the client names none."""
    default_deadline_s: float
    exit_gate: bool = False
    """Whether workers evaluate it."""

    def resolve(self, message: Any) -> Submission:
        """Give a GenerateRequest an id and, where it brought none, a seed. Raises RequestError."""
        deadline_s = self._deadline_s(message)
        check_priority(message.priority)
        request = resolve_request(
            self._options(message),
            request_id=str(uuid.uuid4()),
            fallback_seed=secrets.randbits(64),
            spec=self.spec,
            codec=self.codec,
            max_loops=self.max_loops,
            initial_state=self.initial_state,
            exit_gate=self.exit_gate,
        )
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty: it has no token; at least one is needed")
        check_token_ids("token_ids", request.prompt_ids, self.spec.vocab_size)
        request.params.check(self.spec.vocab_size)
        check_token_ids("delivered_token_ids", request.generated_ids, self.spec.vocab_size)
        decoder = self._decoder(request)
        whole = FinishReason.LENGTH if len(request.generated_ids) == request.params.max_tokens else None
        if decoder is not None and decoder.stopped:
            whole = FinishReason.STOP
        return Submission(request, deadline_s, message.priority, decoder, whole)

    def _options(self, message: Any) -> RequestOptions:
        sampling = message.sampling
        return RequestOptions(
            prompt=self._prompt(message),
            max_tokens=_given(sampling, "max_tokens", _DEFAULTS.max_tokens),
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=_given(sampling, "top_p", _DEFAULTS.top_p),
            min_p=sampling.min_p,
            seed=_given(sampling, "seed", None),
            repetition_penalty=_given(sampling, "repetition_penalty", _DEFAULTS.repetition_penalty),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias),
            stop=tuple(_utf8(f"stop[{index}]", text) for index, text in enumerate(sampling.stop)),
            stop_token_ids=tuple(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            logprobs=_given(sampling, "logprobs", None),
            exit_probabilities=sampling.exit_probabilities,
            loops=_given(sampling, "loops", None),
            initial_state=_initial_state(sampling),
            delivered_token_ids=tuple(message.delivered_token_ids),
            session=message.session,
        )

    def _prompt(self, message: Any) -> Prompt:
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("the prompt is missing; give text, messages or token_ids")
        if kind == "token_ids":
            return tuple(message.token_ids.ids)
        if kind == "text":
            if not message.text:
                raise InvalidRequest("text is empty")
            return _utf8("text", message.text)
        return _chat(message.messages.messages)

    def _deadline_s(self, message: Any) -> float:
        deadline_s = float(_given(message, "deadline_s", self.default_deadline_s))
        check_deadline_s(deadline_s)
        return deadline_s

    def _decoder(self, request: Request) -> TextStream | None:
        """A decoder that stands where the earlier stream of this answer ended: that text is not sent again."""
        if self.codec is None:
            return None
        decoder = self.codec.decoder(request.params.stop)
        decoder.push(request.generated_ids[:-1])
        if decoder.stopped:
            raise InvalidRequest("delivered_token_ids go on behind a stop string in their text")
        decoder.push(request.generated_ids[-1:])
        return decoder


def _chat(messages: Any) -> Chat:
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed")
    turns = []
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"messages[{index}].role is empty")
        turns.append((message.role, _utf8(f"messages[{index}].content", message.content)))
    return Chat(tuple(turns))


def _initial_state(sampling: Any) -> InitialState | None:
    if sampling.initial_state not in _INITIAL_STATES:
        raise InvalidRequest(f"initial_state is {sampling.initial_state}; allowed: 0 to {max(_INITIAL_STATES)}")
    return _INITIAL_STATES[sampling.initial_state]


def _given(message: Any, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _utf8(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} ({error.reason})"
        ) from error
