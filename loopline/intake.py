"""From what a client asked for to a resolved Request: the one place where defaults, stop ids and depth are decided.

Pure: the id, and the seed to use where the client brought none, are handed in. The coordinator and `loopline run` call
it; the checks against limits are `loopline.request.check_request`. A client fills the options and loads no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from loopline.errors import NoTokenizer
from loopline.model_spec import ModelSpec
from loopline.request import InitialState, Request, SamplingParams

if TYPE_CHECKING:
    from loopline.text import TextCodec


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
    loops: int | None = None
    initial_state: InitialState | None = None
    delivered_token_ids: tuple[int, ...] = ()
    """Tokens of this answer that the client already has."""


def resolve_request(
    options: RequestOptions,
    *,
    request_id: str,
    fallback_seed: int,
    spec: ModelSpec,
    codec: "TextCodec | None",
    max_loops: int,
    initial_state: InitialState = InitialState.NOISE,
) -> Request:
    """The request that workers get. `max_loops` bounds the default depth, `initial_state` is the server's default.

    Raises NoTokenizer where text is in the options and `codec` is None, InvalidRequest where text cannot be encoded.
    """
    if options.stop and codec is None:
        raise NoTokenizer("stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids")
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
        loops=min(spec.default_loops, max_loops) if options.loops is None else options.loops,
        initial_state=options.initial_state or initial_state,
    )
    return Request(
        request_id=request_id,
        prompt_ids=_prompt_ids(options.prompt, codec),
        params=params,
        generated_ids=options.delivered_token_ids,
    )


def _prompt_ids(prompt: Prompt, codec: "TextCodec | None") -> tuple[int, ...]:
    if isinstance(prompt, tuple):
        return prompt
    if codec is None:
        raise NoTokenizer("the prompt is text, and the checkpoint has no tokenizer; send token ids")
    return tuple(codec.encode_chat(prompt.messages) if isinstance(prompt, Chat) else codec.encode(prompt))
