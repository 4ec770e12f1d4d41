"""Hardware profiles: those that come along, and those of files. The one place that reads such a file.

Measured: H200, by `loopline bench engine` and `loopline bench transfer` (docs/performance.md). GH200 has the same
multiprocessors with other memory: its memory rate is the maker's figure times what H200's copy reached of its own
(4.26 of 4.8 TB/s), and what steps reach of the rates is taken over. Its memory is what public logs of such machines
show, 94.9 GiB where the maker says 96 GB and 142.5 GiB where he says 144, less what the driver takes. Links that
nobody measured here are the maker's figure less a tenth; tcp between GPUs' memory was seen on H200s only. The CPU's
figures are those of one core of a small server and stand for no machine: measure it.
"""

import json
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from loopline.capacity.fit import fit_engine, fit_link
from loopline.capacity.hardware import Link, Profile
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec

_HOPPER_FLOPS = {"bf16": 760e12, "fp32": 50e12}  # fp32 as it is spoken of: no tensor cores; bf16 measured
_INFINIBAND = Link(peak_bytes_per_s=50e9, bytes_per_s=45e9, push_s=0.6e-3)  # NDR: 400 Gbit/s
_KINDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}
_BOUNDS = (("gt", "above"), ("ge", "at least"), ("le", "at most"))
_OF_FILES = ["base"]
_TCP = Link(peak_bytes_per_s=12.5e9, bytes_per_s=0.4e9, push_s=1e-3)  # of GPUs' memory: seen on one host


def _hopper(name: str, memory_bytes: int, bytes_per_s: float, links: Mapping[str, Link], **more: Any) -> Profile:
    return Profile(
        name=name,
        memory_bytes=memory_bytes,
        bytes_per_s=bytes_per_s,
        flops_per_s=_HOPPER_FLOPS,
        weights_efficiency=0.98,
        kv_efficiency=0.85,
        flops_efficiency=0.74,
        layer_pass_s=16.9e-6,
        links=links,
        **more,
    )


_H200 = _hopper(
    "h200",
    139 * 2**30,
    4.26e12,
    {
        "same-gpu": Link(peak_bytes_per_s=2.54e12, bytes_per_s=2.54e12, push_s=0.42e-3),
        "nvlink": Link(peak_bytes_per_s=450e9, bytes_per_s=415e9, push_s=0.59e-3),
        "infiniband": _INFINIBAND,
        "tcp": _TCP,
    },
    default_link="nvlink",
    source="measured on NVIDIA H200 (141 GB), 2026-11-30: steps, and the links same-gpu and nvlink",
)


def _gh200(name: str, memory_bytes: int, peak_bytes_per_s: float) -> Profile:
    half = peak_bytes_per_s / 2  # each byte is read and written
    return _hopper(
        name,
        memory_bytes,
        peak_bytes_per_s * 0.887,
        {
            "same-gpu": Link(peak_bytes_per_s=half, bytes_per_s=half, push_s=0.42e-3),
            # six of eighteen links to each other GPU of a node of four; a node of two has three times that
            "nvlink": Link(peak_bytes_per_s=150e9, bytes_per_s=135e9, push_s=0.59e-3),
            "infiniband": _INFINIBAND,
            "tcp": _TCP,
        },
        default_link="infiniband",
        source="not measured: the maker's rates, memory as others saw it; what steps reach of the rates is H200's",
    )


_CPU = Profile(
    name="cpu",
    source="one core of a small server, with the small checkpoints: measure yours with loopline bench engine",
    bytes_per_s=9.7e9,
    flops_per_s={"fp32": 60e9, "bf16": 6e9},
    weights_efficiency=0.7,
    kv_efficiency=0.09,
    flops_efficiency=0.64,
    layer_pass_s=2.2e-3,
    row_tile=8,
    links={
        "copy": Link(peak_bytes_per_s=10e9, bytes_per_s=5e9, push_s=5e-3),
        "tcp": Link(peak_bytes_per_s=12.5e9, bytes_per_s=1e9, push_s=5e-3),
    },
    default_link="copy",
)
PROFILES: Mapping[str, Profile] = {
    one.name: one
    for one in (
        _H200,
        _gh200("gh200-96", 94 * 2**30, 4.0e12),
        _gh200("gh200-144", 141 * 2**30, 4.9e12),
        _CPU,
    )
}


MEASURED_LINK = "measured"
"""The link that a report of `loopline bench transfer` brings, as the default one."""


def default_profile(device: str) -> Profile:
    """What is taken where no profile is named, by a worker group's `device`."""
    return PROFILES["cpu" if device == "cpu" else "h200"]


def read_profile(text: str, base: Profile, spec_of: Callable[[str], ModelSpec]) -> Profile:
    """The profile that `text` names: one that comes along, or a file laid over `base`.

    A YAML file holds keys of `Profile` (`base: NAME` takes another base); a JSON file is a report of `loopline bench
    engine` or `loopline bench transfer`, and `spec_of` gives the geometry of the model that it names. Raises
    ConfigError that names file and key.
    """
    if text in PROFILES:
        return PROFILES[text]
    path = Path(text)
    try:
        raw = path.read_text(encoding="utf-8")
        content = json.loads(raw) if path.suffix == ".json" else yaml.safe_load(raw)
    except FileNotFoundError:
        raise ConfigError(f"profile is {text!r}; allowed: {', '.join(PROFILES)}, or a file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a profile: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no mapping; allowed: keys of a profile, or a report of loopline bench")
    try:
        if "rates" in content:
            return fit_engine(content, spec_of(str(content["model"]["name"])), base)
        if "link" in content and "arms" in content:
            links = {**base.links, MEASURED_LINK: fit_link(content)}
            return base.model_copy(update={"links": links, "default_link": MEASURED_LINK})
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path}: a report without {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return _laid_over(path, content, base)


def _laid_over(path: Path, content: dict[str, Any], base: Profile) -> Profile:
    named = content.pop("base", None)
    if named is not None and named not in PROFILES:
        raise ConfigError(f"{path}: base is {named!r}; allowed: {', '.join(PROFILES)}")
    below = base if named is None else PROFILES[named]
    values = below.model_dump() | {"name": path.stem, "source": str(path)} | content
    for key in ("links", "flops_per_s"):
        if isinstance(content.get(key), dict):
            values[key] = below.model_dump()[key] | content[key]
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_fault_text(error.errors(include_url=False)[0])}") from None


def _fault_text(fault: Any) -> str:
    """A validation error of pydantic's at a key of `Profile`, as one sentence that says what is allowed."""
    loc = [str(part) for part in fault["loc"] if part != "[key]"]
    key, schema = ".".join(loc), Link if loc[0] == "links" and len(loc) > 2 else Profile
    if fault["type"] == "extra_forbidden":
        return f"{key}: no such key; allowed: {', '.join([*schema.model_fields, *_OF_FILES * (schema is Profile)])}"
    if fault["type"] == "missing":
        return f"{key} is missing; a link that is new needs all of {', '.join(Link.model_fields)}"
    return f"{key} is {fault['input']!r}; allowed: {_allowed(schema, loc)}"


def _allowed(schema: type[Link] | type[Profile], loc: Sequence[str]) -> str:
    """What a key may hold, in words."""
    if loc[0] == "links" and len(loc) < 3:
        return f"a mapping of names to mappings with the keys {', '.join(Link.model_fields)}"
    if loc[0] == "flops_per_s":
        return "a mapping of dtypes (fp32, bf16) to operations a second, numbers above 0"
    field = schema.model_fields[loc[-1]]
    kinds = typing.get_args(field.annotation) or (field.annotation,)
    words = [_KINDS[kind] for kind in kinds]
    bounds = [f"{word} {getattr(one, name)}" for one in field.metadata for name, word in _BOUNDS if hasattr(one, name)]
    return ", ".join([" or ".join(words), *bounds])
