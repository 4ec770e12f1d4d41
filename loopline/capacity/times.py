"""What steps take on a device: floors that no way can be below, and what is expected of the engine."""

from dataclasses import dataclass, replace

from loopline.capacity.geometry import Geometry, Work
from loopline.capacity.hardware import Profile


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one or several passes, and what their floor is made of: "memory" or "compute"."""

    floor_s: float
    expected_s: float
    bound: str


def decode_load(profile: Profile, geometry: Geometry, rows: int, context: int) -> Work:
    """A decode step as the device runs it: its operations are those of the padded rows."""
    work = geometry.decode_work(rows, context)
    padded = -(-rows // profile.row_tile) * profile.row_tile
    return replace(work, flops=work.flops * padded // rows)


def prefill_load(profile: Profile, geometry: Geometry, prompts: int, tokens: int, cached: int = 0) -> Work:
    """A packed pass over `tokens` tokens of each of `prompts` prompts, behind `cached` of each, as the device runs it:
    padded likewise."""
    work = geometry.prefill_work(prompts, tokens, cached)
    rows = prompts * tokens
    padded = -(-rows // profile.row_tile) * profile.row_tile
    return replace(work, flops=work.flops * padded // rows)


def decode_time(profile: Profile, geometry: Geometry, rows: int, context: int) -> Time:
    """One decode step of `rows` rows that each see `context` tokens."""
    floor = geometry.decode_work(rows, context)
    return _time(profile, geometry.dtype, floor, decode_load(profile, geometry, rows, context))


def prefill_time(profile: Profile, geometry: Geometry, prompts: int, tokens: int, chunk_tokens: int) -> Time:
    """`prompts` prompts of `tokens` tokens, side by side in passes of at most `chunk_tokens` tokens of each.

    The floor is that of one pass: chunks read weights more often, and nothing forces a way to have chunks.
    """
    whole = geometry.prefill_work(prompts, tokens)
    floor = _time(profile, geometry.dtype, whole, whole)
    expected_s = 0.0
    for start in range(0, tokens, chunk_tokens):
        size = min(chunk_tokens, tokens - start)
        load = prefill_load(profile, geometry, prompts, size, start)
        expected_s += _time(profile, geometry.dtype, load, load).expected_s
    return Time(floor_s=floor.floor_s, expected_s=expected_s, bound=floor.bound)


def _time(profile: Profile, dtype: str, floor: Work, load: Work) -> Time:
    """Floor: the slower of bytes and operations at the profile's rates. Expected, of `load`, at the parts of the rates
    that steps reach: the slower of weights and operations, then keys and values, which attention goes through between
    them, and a constant for each layer that runs."""
    bandwidth, rate = profile.bytes_per_s, profile.rate_of(dtype)
    bytes_s, flops_s = floor.num_bytes / bandwidth, floor.flops / rate
    weights_s = load.weight_bytes / bandwidth / profile.weights_efficiency
    products_s = load.flops / rate / profile.flops_efficiency
    kv_s = load.kv_bytes / bandwidth / profile.kv_efficiency
    return Time(
        floor_s=max(bytes_s, flops_s),
        expected_s=max(weights_s, products_s) + kv_s + load.layer_passes * profile.layer_pass_s,
        bound="memory" if bytes_s >= flops_s else "compute",
    )
