"""Hardware profiles: those that come along, and those of files. The one place that reads such a file.

Measured: H200, by `loopline bench engine` and `loopline bench transfer` (docs/performance.md). GH200 has the same
multiprocessors with other memory: its memory rate is the maker's figure times what H200's copy reached of its own
(4.26 of 4.8 TB/s), and what steps reach of the rates is taken over. Its memory is what public logs of such machines
show, 94.9 GiB where the maker says 96 GB and 142.5 GiB where he says 144, less what the driver takes. Links that
nobody measured here are the maker's figure less a tenth; tcp between GPUs' memory was seen on H200s only. The CPU's
figures are those of one core of a small server and stand for no machine: measure it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from loopline.capacity.fit import fit_engine, fit_link
from loopline.capacity.hardware import Link, Profile
from loopline.capacity.reports import EngineReport, TransferReport
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec
from loopline.schema_words import fault_text, shown

_HOPPER_FLOPS = {"bf16": 760e12, "fp32": 50e12}  # fp32 as it is spoken of: no tensor cores; bf16 measured
_INFINIBAND = Link(peak_bytes_per_s=50e9, bytes_per_s=45e9, push_s=0.6e-3)  # NDR: 400 Gbit/s
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
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, yaml.YAMLError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as a profile: {words}") from error  # constructors raise all of them
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds no mapping; allowed: keys of a profile, or a report of loopline bench")
    try:
        if "rates" in content:
            return _of_engine(content, base, spec_of)
        if "link" in content and "arms" in content:
            return _of_transfer(content, base)
        return _laid_over(path, content, base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _of_engine(content: dict[str, Any], base: Profile, spec_of: Callable[[str], ModelSpec]) -> Profile:
    try:
        report = EngineReport.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_fault(EngineReport, error)) from None
    try:
        return fit_engine(report, spec_of(report.model.name), base)
    except (ValidationError, ArithmeticError):
        raise ConfigError("no profile fits its figures: are they all of one device and model?") from None


def _of_transfer(content: dict[str, Any], base: Profile) -> Profile:
    try:
        report = TransferReport.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_fault(TransferReport, error)) from None
    try:
        links = {**base.links, MEASURED_LINK: fit_link(report)}
    except ValidationError:
        raise ConfigError("no link fits its figures: arms.flat and overlap.one_chunk give no rate") from None
    return base.model_copy(update={"links": links, "default_link": MEASURED_LINK})


def _laid_over(path: Path, content: dict[str, Any], base: Profile) -> Profile:
    own = {key: value for key, value in content.items() if key != "base"}
    below = base
    if content.get("base") is not None:
        named = content["base"]
        if not isinstance(named, str) or named not in PROFILES:
            raise ConfigError(f"base is {shown(named)}; allowed: {', '.join(PROFILES)}")
        below = PROFILES[named]
    under = below.model_dump()
    values = under | {"name": path.stem, "source": str(path)} | own
    for key in ("links", "flops_per_s"):
        if isinstance(own.get(key), dict):
            values[key] = under[key] | own[key]
    try:
        profile = Profile.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_fault(Profile, error, ["base"])) from None
    profile.link(None)  # the default one is there
    return profile


def _fault(schema: type[BaseModel], error: ValidationError, more_keys: Sequence[str] = ()) -> str:
    return fault_text(schema, error.errors(include_url=False, include_context=False)[0], more_keys=more_keys)
