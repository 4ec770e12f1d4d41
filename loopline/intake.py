"""From what a client asked for to a resolved Request: the one place where defaults, stop ids and depth are decided.

Pure: the id, and the seed to use where the client brought none, are handed in. The coordinator and `loopline run` call
it; the checks against limits are `loopline.request.check_request`. A client fills the options and loads no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from loopline.errors import InvalidRequest, NoTokenizer, RequestTooLarge
from loopline.model_spec import ModelSpec
from loopline.request import MAX_SESSION_CHARS, InitialState, Request, SamplingParams

if TYPE_CHECKING:
    from loopline.text import TextCodec

MAX_DEADLINE_S = 86_400
MAX_PRIORITY = 10  # and its negative is the lowest


@dataclass(frozen=True)
class Chat:
    """A conversation to continue, as (role, content) messages."""

    messages: tuple[tuple[str, str], ...]


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What a client may set. None: the client left it to the server; other defaults are the public ones."""

    prompt: Prompt
    """Text, token ids, or a conversation."""
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids besides the model's own."""
    ignore_eos: bool = False
    """The model's own stop ids do not end the answer."""
    logprobs: int | None = None
    exit_probabilities: bool = False
    """Report how likely the exit gate held each loop to be the last (Ouro)."""
    loops: int | None = None
    initial_state: InitialState | None = None
    delivered_token_ids: tuple[int, ...] = ()
    """Tokens of this answer that the client already has."""
    session: str = ""
    """Turns of one conversation have one, so that `routing.policy` may keep them on one worker."""


def resolve_request(
    options: RequestOptions,
    *,
    request_id: str,
    fallback_seed: int,
    spec: ModelSpec,
    codec: "TextCodec | None",
    max_loops: int,
    initial_state: InitialState = InitialState.NOISE,
    exit_gate: bool = False,
) -> Request:
    """The request that workers get. `max_loops` bounds the default depth, `initial_state` is the server's default,
    `exit_gate`: whether engines evaluate it.

    Raises NoTokenizer where text is in the options and `codec` is None, InvalidRequest where text cannot be encoded and
    where exit probabilities are asked for that nobody computes,
    RequestTooLarge for a prompt past the model's context, before it is encoded if it is far past. Encoding takes its
    time: not for an event loop's thread.
    """
    for name, ids in (("prompt", options.prompt), ("delivered_token_ids", options.delivered_token_ids)):
        if isinstance(ids, tuple) and len(ids) > spec.context_tokens:
            raise RequestTooLarge(f"{name} has {len(ids)} token ids; the model's context is {spec.context_tokens}")
    if options.stop and codec is None:
        raise NoTokenizer("stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids")
    if len(options.session) > MAX_SESSION_CHARS:
        raise InvalidRequest(f"session has {len(options.session)} characters; allowed: at most {MAX_SESSION_CHARS}")
    if options.exit_probabilities:
        check_exit_gate(spec, exit_gate)
    own_stop_ids = () if options.ignore_eos else spec.stop_ids
    params = SamplingParams(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=fallback_seed if options.seed is None else options.seed,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=MappingProxyType(dict(options.logit_bias)),
        stop=options.stop,
        stop_ids=tuple(sorted({*own_stop_ids, *options.stop_token_ids})),
        logprobs=options.logprobs,
        exit_probabilities=options.exit_probabilities,
        loops=min(spec.default_loops, max_loops) if options.loops is None else options.loops,
        initial_state=options.initial_state or initial_state,
    )
    return Request(
        request_id=request_id,
        prompt_ids=_prompt_ids(options.prompt, codec, spec.context_tokens),
        params=params,
        generated_ids=options.delivered_token_ids,
        session=options.session,
    )


def check_exit_gate(spec: ModelSpec, is_on: bool) -> None:
    """Raise InvalidRequest unless exit probabilities can be asked for."""
    if not spec.has_exit_gate:
        raise InvalidRequest(
            f"exit_probabilities is true, and family {spec.family.value} has no exit gate; allowed: false"
        )
    if not is_on:
        raise InvalidRequest("exit_probabilities is true, and the setting model.exit_gate is off; allowed: false")


def check_deadline_s(deadline_s: float) -> None:
    """Raise InvalidRequest with the value unless it is in the range of the configuration's own deadline."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:  # NaN is not either
        raise InvalidRequest(f"deadline_s is {deadline_s}; allowed: above 0, at most {MAX_DEADLINE_S}")


def check_priority(priority: int) -> None:
    """Raise InvalidRequest with the value where it is out of range."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority is {priority}; allowed: -{MAX_PRIORITY} to {MAX_PRIORITY}")


def _prompt_ids(prompt: Prompt, codec: "TextCodec | None", context_tokens: int) -> tuple[int, ...]:
    if isinstance(prompt, tuple):
        return prompt
    if codec is None:
        raise NoTokenizer("the prompt is text, and the checkpoint has no tokenizer; send token ids")
    most_bytes = codec.max_text_bytes(context_tokens)
    if isinstance(prompt, str):
        _require_short("the prompt", prompt, most_bytes, context_tokens)
        return tuple(codec.encode(prompt))
    _require_short("the messages", "".join(content for _, content in prompt.messages), most_bytes, context_tokens)
    text = codec.render_chat(prompt.messages)
    _require_short("the chat template's text", text, most_bytes, context_tokens)
    return tuple(codec.encode(text))


def _require_short(name: str, text: str, most_bytes: int, context_tokens: int) -> None:
    num_bytes = len(text.encode("utf-8", errors="surrogatepass"))  # a surrogate is the codec's to refuse
    if num_bytes > most_bytes:
        raise RequestTooLarge(
            f"{name} has {num_bytes} bytes; the model's context of {context_tokens} tokens holds at most {most_bytes}"
        )
