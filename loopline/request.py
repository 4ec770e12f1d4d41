"""What a request is, for everything behind the front door: ids, resolved sampling parameters, results.

Values are *resolved* here: a seed is present, the depth is a number, stop ids are listed. `check_request` holds every
bound; how defaults are filled in is in `loopline.intake`. No torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from loopline.errors import InvalidRequest, RequestTooLarge

TokenId = int
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_SESSION_CHARS = 256


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens were generated
    CANCELLED = "cancelled"  # the client went away, or cancelled
    DEADLINE = "deadline"  # its deadline passed
    ERROR = "error"  # a worker failed it


class InitialState(StrEnum):
    """Huginn's state before the first loop. Ouro has none and ignores this."""

    NOISE = "noise"  # truncated normal; `loopline.noise_key` says what it is keyed by
    ZEROS = "zeros"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. `check` holds for every instance that leaves validation."""

    max_tokens: int = 128
    """Most tokens to generate."""
    min_tokens: int = 0
    """Stop ids cannot be chosen before this many tokens were generated."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: int = 0
    """Unsigned 64 bits; keys sampling, and Huginn's noise unless the cluster keys it by position."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer; 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for every time the answer has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id."""
    stop: tuple[str, ...] = ()
    """Stop strings; cut from the text. Watched where text is made, not on workers."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer (the model's own unless `ignore_eos`, plus the request's); never part of it."""
    logprobs: int | None = None
    """None: none. n: the chosen token's log probability and the n most likely tokens'."""
    exit_probabilities: bool = False
    """Report with each token how likely the exit gate held each loop to be the last. Changes no token."""
    loops: int = 1
    """Depth: loops that every token of this request runs."""
    initial_state: InitialState = InitialState.NOISE

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest that names the first value out of range."""
        _at_least("max_tokens", self.max_tokens, 1)
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}; allowed: 0 to max_tokens ({self.max_tokens})")
        _finite("temperature", self.temperature)
        if self.temperature < 0:
            raise InvalidRequest(f"temperature is {self.temperature}; allowed: 0 (greedy) and above")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}; allowed: above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest(f"min_p is {self.min_p}; allowed: 0 to 1")
        _at_least("top_k", self.top_k, 0)
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest(f"seed is {self.seed}; allowed: 0 to 2^64 - 1")
        self._check_penalties()
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs is {self.logprobs}; allowed: 0 to {MAX_LOGPROBS}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"{len(self.stop)} stop strings; allowed: at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(f"a stop string has {len(text)} characters; allowed: 1 to {MAX_STOP_STRING_CHARS}")
        check_token_ids("stop_token_ids", self.stop_ids, vocab_size)
        check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)

    def _check_penalties(self) -> None:
        _finite("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0:
            raise InvalidRequest(f"repetition_penalty is {self.repetition_penalty}; allowed: above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _finite(name, value)
            if not -2 <= value <= 2:
                raise InvalidRequest(f"{name} is {value}; allowed: -2 to 2")
        for token_id, bias in self.logit_bias.items():
            _finite(f"logit_bias[{token_id}]", bias)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it, as the coordinator hands it to workers.

    `generated_ids` are tokens that an earlier attempt already delivered: they are computed like a prompt, but count as
    answer (penalties, min_tokens, max_tokens, positions of sampling).
    """

    request_id: str
    prompt_ids: tuple[TokenId, ...]
    params: SamplingParams
    attempt: int = 1
    generated_ids: tuple[TokenId, ...] = ()
    session: str = ""
    """The client's name for what the request is a turn of; "": of nothing."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be sampled."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Most positions that can ever need KV: the last token's is never read."""
        return len(self.prompt_ids) + self.params.max_tokens - 1


@dataclass(frozen=True)
class TokenLogprob:
    """One candidate and its natural log probability."""

    token_id: TokenId
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities (natural, of the raw model distribution) at one position."""

    chosen: float
    top: tuple[TokenLogprob, ...] = ()  # most likely first


@dataclass(frozen=True)
class TokenExtras:
    """What a request may ask to be told of each token."""

    logprobs: TokenLogprobs | None = None
    exit_probabilities: tuple[float, ...] = ()  # one a loop that it ran, their sum is 1; empty: not asked for


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV the worker that computed the prompt had, or fetched


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one model on one cluster (or engine) allows a request to ask for."""

    vocab_size: int
    context_tokens: int  # positions that the rope table covers
    max_loops: int
    arena_tokens: int  # tokens that the smallest arena on a request's way can ever hold


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError that names the first wrong value; a request that passes can run on an empty cluster."""
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    check_token_ids("prompt", request.prompt_ids, limits.vocab_size)
    check_token_ids("generated", request.generated_ids, limits.vocab_size)
    request.params.check(limits.vocab_size)
    check_size(request, limits)


def check_size(request: Request, limits: Limits) -> None:
    """The part of `check_request` that looks at numbers only, never at a token: cheap enough to be repeated."""
    params = request.params
    if not 1 <= params.loops <= limits.max_loops:
        raise InvalidRequest(f"loops is {params.loops}; allowed: 1 to {limits.max_loops}")
    if len(request.generated_ids) >= params.max_tokens:
        raise InvalidRequest(
            f"{len(request.generated_ids)} tokens were already delivered and max_tokens is {params.max_tokens}"
        )
    total = len(request.prompt_ids) + params.max_tokens
    what = f"prompt ({len(request.prompt_ids)}) + max_tokens ({params.max_tokens}) = {total} tokens"
    if total > limits.context_tokens:
        raise RequestTooLarge(f"{what}; the model's context is {limits.context_tokens}")
    if request.max_kv_tokens > limits.arena_tokens:
        raise RequestTooLarge(f"{what}; the KV arena can hold at most {limits.arena_tokens}")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest for the first id outside 0..vocab_size-1."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # at C's speed
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name}[{index}] is token id {token_id}; allowed: 0 to {vocab_size - 1}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidRequest(f"{name} is {value}; allowed: {least} and above")


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}; allowed: finite numbers")


@dataclass(frozen=True)
class Timing:
    """Seconds of a request's life, from its arrival at the front door."""

    queued_s: float = 0.0
    ttft_s: float = 0.0  # to the first token
    total_s: float = 0.0


class PrefixSource(StrEnum):
    """How a prompt's KV got to its decode worker."""

    LOCAL = "local"  # that worker computed what it lacked; a unified worker always does
    RECOMPUTE = "recompute"  # a prefill worker computed what it lacked itself, and pushed what the decode worker lacked
    FETCH = "fetch"  # the same, after it had been pushed what the decode worker had and it lacked


@dataclass(frozen=True)
class Route:
    """Names of the workers that ran a request; empty where a part ran nowhere. `prefix_source`: the PrefixSource that
    its prompt had in the end; "": it came to none."""

    prefill: str = ""  # the decode worker's where that one computed the prompt
    decode: str = ""
    earlier: tuple[str, ...] = ()  # workers of earlier attempts
    prefix_source: str = ""
