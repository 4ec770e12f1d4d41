"""What Huginn's noise is keyed by, and so which requests may share KV: rules that engines, the coordinator and the
command line have in common. The numbers themselves are drawn in `loopline.model.noise`. No torch.

    noise_key   noise depends on                     KV of equal tokens is equal
    request     request seed, position, channel      within one request
    position    cluster's seed, position, channel    in every request that starts from noise
    -           (a request may start from zeros)     in every request that starts from zeros
"""

from enum import StrEnum

from loopline.errors import ConfigError
from loopline.identity import Fingerprint
from loopline.model_spec import ModelSpec
from loopline.request import InitialState, SamplingParams

NO_NOISE = "none"
_FIELD, _SEED_FIELD = "noise_key", "noise_seed"


class NoiseKey(StrEnum):
    """What noise is a function of, besides position and channel."""

    REQUEST = "request"  # the request's seed
    POSITION = "position"  # a seed that the whole cluster has


def noise_fields(spec: ModelSpec, key: NoiseKey, seed: int) -> tuple[tuple[str, str], ...]:
    """The part of a fingerprint that says how noise is keyed. A seed that no noise depends on is left out."""
    if not spec.uses_initial_state:
        return (_FIELD, NO_NOISE), (_SEED_FIELD, NO_NOISE)
    return (_FIELD, key.value), (_SEED_FIELD, str(seed) if key is NoiseKey.POSITION else NO_NOISE)


def noise_name(group: Fingerprint, params: SamplingParams) -> str | None:
    """What the initial states of such a request are, on workers of this fingerprint: requests of one name have equal KV
    where their tokens are equal. None: the states are this request's own.

    A fingerprint that does not speak of noise is of a model without; one that speaks of a key unknown here shares
    nothing.
    """
    fields = dict(group.fields)
    key = fields.get(_FIELD, NO_NOISE)
    if key == NO_NOISE:
        return NO_NOISE
    if params.initial_state is InitialState.ZEROS:
        return "zeros"
    return f"position {fields.get(_SEED_FIELD)}" if key == NoiseKey.POSITION else None


def check_prefix_cache(spec: ModelSpec, prefix_cache: str, key: NoiseKey) -> None:
    """Raise ConfigError where prefixes must be shared (`prefix_cache` is on) and noise is each request's own."""
    if prefix_cache == "on" and spec.uses_initial_state and key is NoiseKey.REQUEST:
        raise ConfigError(
            "kv.prefix_cache is true and model.noise_key is request: Huginn's noise is keyed by a request's seed, and "
            "equal prefixes have different KV; allowed: model.noise_key: position, or kv.prefix_cache: auto or false"
        )
