"""Which engines `loopline bench session` and `burst` ask: arms, as every combination of what is named, and what their
engines are set to. No torch: what does not fit is said before anything is loaded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any

from loopline.bench.sessions import Trace
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec
from loopline.noise_key import NoiseKey
from loopline.settings import EngineSettings

_OWN_SETTINGS = ("model_path", "device", "dtype", "max_loops", "num_blocks", "prefill", "prefix_cache", "scheduler")


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What runs, on what, and in which arms: every combination of the four."""

    model: str
    """A checkpoint folder, or a name in `loopline.bench.shapes.SHAPES`."""
    random_weights: bool = False
    device: str = "cuda"
    dtype: str = "bf16"
    prefix_cache: tuple[str, ...] = ("on", "off")
    working_sets: tuple[float, ...] = (0.9,)
    """What all conversations need to their ends, as a multiple of the arena; 1 and below: everything stays."""
    prefill: tuple[str, ...] = ("packed",)
    host: tuple[str, ...] = ("plain",)
    """plain: the core as it is; naive: `loopline.bench.naive_core`."""
    rounds: int = 2
    chunk_tokens: int = 256
    step_tokens: int = 2048
    """Prompt tokens of one step at most."""
    max_running: int | None = None
    """None: all sessions."""
    counts_calls: bool = False
    """Whether each arm runs once more, untimed, with its Python calls counted."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further fields of EngineSettings, as text."""


@dataclass(frozen=True)
class EngineArm:
    """One of the combinations."""

    prefix_cache: str
    working_set: float
    prefill: str
    host: str


ALLOWED = {"prefix_cache": ("on", "off"), "prefill": ("packed", "per_row", "auto"), "host": ("plain", "naive")}
"""What an arm may be, by the fields of EngineArm that have names."""
_PAIRS = {"prefix_cache": ("on", "off"), "prefill": ("packed", "per_row"), "host": ("plain", "naive")}
"""Arms that differ in this alone are compared: the first over the second."""


def arms_of(load: EngineLoad) -> list[EngineArm]:
    """All combinations. Raises ConfigError for one that does not exist."""
    for name, allowed in ALLOWED.items():
        for value in getattr(load, name):
            if value not in allowed:
                raise ConfigError(f"{name} has {value!r}; allowed: {', '.join(allowed)}")
    for value in load.working_sets:
        if not 0 < value < math.inf:
            raise ConfigError(f"working_sets has {value}; allowed: above 0")
    arms = [EngineArm(*one) for one in product(load.prefix_cache, load.working_sets, load.prefill, load.host)]
    if not arms or len(set(arms)) < len(arms):
        raise ConfigError("an arm is named twice, or there is none")
    return arms


def names_of(arms: Sequence[EngineArm]) -> list[str]:
    """Each arm by what it does not share with all others."""
    texts = [
        {
            "prefix_cache": f"cache {arm.prefix_cache}",
            "working_set": f"{arm.working_set:g}x arena",
            "prefill": arm.prefill,
            "host": f"{arm.host} host",
        }
        for arm in arms
    ]
    varied = [name for name in texts[0] if len({text[name] for text in texts}) > 1] or ["prefix_cache"]
    return [", ".join(text[name] for name in varied) for text in texts]


def pairs_of(arms: Sequence[EngineArm], names: Sequence[str]) -> list[tuple[str, str]]:
    """Names of the arms to compare, see `_PAIRS`."""
    name_of = dict(zip(arms, names, strict=True))
    pairs = []
    for what, (one, other) in _PAIRS.items():
        for arm in arms:
            sibling = EngineArm(**(asdict(arm) | {what: other}))
            if getattr(arm, what) == one and sibling in name_of:
                pairs.append((name_of[arm], name_of[sibling]))
    return pairs


def num_blocks(arm: EngineArm, trace: Trace, block_size: int) -> int:
    """Of the arm's books; never fewer than the longest conversation needs."""
    return max(-(-trace.longest // block_size), math.ceil(trace.working_set_blocks(block_size) / arm.working_set))


def block_size_of(load: EngineLoad) -> int:
    """Tokens a block."""
    size = further_settings(load.settings).get("block_size", EngineSettings(model_path="").block_size)
    return int(size)


def check_prefixes(load: EngineLoad, spec: ModelSpec) -> None:
    """Raise ConfigError, in the command line's words, where an arm is to share prefixes and each request's noise is its
    own."""
    key = further_settings(load.settings).get("noise_key", EngineSettings(model_path="").noise_key)
    if "on" in load.prefix_cache and spec.uses_initial_state and key == NoiseKey.REQUEST:
        raise ConfigError(
            f"--prefix-cache is {','.join(load.prefix_cache)}, and the noise of {load.model} depends on each request's "
            "seed: equal prefixes have different KV; allowed: --set noise_key=position, or --prefix-cache off"
        )


def further_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    """Fields of EngineSettings from text. Raises ConfigError for a name or a value that is none."""
    kinds: dict[str, Any] = {
        one.name: type(one.default)
        for one in fields(EngineSettings)
        if one.name not in _OWN_SETTINGS and isinstance(one.default, bool | int | float | str)
    }
    made: dict[str, Any] = {}
    for name, text in texts.items():
        kind = kinds.get(name)
        if kind is None:
            raise ConfigError(f"{name} is no setting of an engine; allowed: {', '.join(sorted(kinds))}")
        try:
            made[name] = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{name} is {text!r}; allowed: a value of the kind {kind.__name__}") from None
    return made
