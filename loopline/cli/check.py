"""`loopline check`: is a cluster YAML right, what will its workers hold, and what can they serve."""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.ray_placement import needs_of
from loopline.bench.shapes import SHAPES
from loopline.capacity.hardware import Profile
from loopline.capacity.links import likely_link
from loopline.capacity.plan import Plan, make_plan, roles_of, usual_workload
from loopline.capacity.profiles import MEASURED_LINK, PROFILES, default_profile, read_profile
from loopline.capacity.workers import DecodePlan, PrefillPlan
from loopline.cli.check_report import show
from loopline.cli.options import Config, Json
from loopline.config import PREFIX_CACHE, ClusterConfig, load_config
from loopline.config_notes import notes
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.noise_key import NoiseKey, check_prefix_cache
from loopline.text import load_text

_Profile = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help=f"Hardware: {', '.join(PROFILES)}, a YAML file, or a JSON report of bench engine or bench transfer. "
        "May be repeated: later ones are laid over earlier ones, and those over the file's capacity.profile.",
    ),
]
_Link = Annotated[str | None, typer.Option(metavar="NAME", help="The profile's link that pushes take.")]
_PROCESSORS = ("x86_64", "aarch64", "arm64", "arm", "i386")  # how reports name a CPU
_Workers = Annotated[int | None, typer.Option(metavar="N", help="Workers to split into prefill and decode.")]
_Prompt = Annotated[int | None, typer.Option(metavar="N", help="Prompt tokens of a request.")]
_New = Annotated[int | None, typer.Option(metavar="N", help="New tokens of a request.")]
_Rate = Annotated[float | None, typer.Option(metavar="X", help="Requests a second that come.")]


def check(
    *,
    config: Config,
    profile: _Profile = None,
    link: _Link = None,
    prompt_tokens: _Prompt = None,
    new_tokens: _New = None,
    rate: _Rate = None,
    workers: _Workers = None,
    as_json: Json = False,
) -> None:
    """Check a cluster YAML and its checkpoint folder, and plan its capacity: what fits, how long it takes, what limits
    it. Exit status 1 where not one request would be served."""
    loaded = load_config(config)
    if loaded.launcher.kind == "ray":
        needs_of(loaded)
    by_hand = _launch_fault(loaded)
    spec, is_there = read_geometry(loaded.model.path)
    check_prefix_cache(spec, PREFIX_CACHE[loaded.kv.prefix_cache], NoiseKey(loaded.model.noise_key))
    usual = usual_workload(spec)
    workload = dataclasses.replace(
        usual,
        prompt_tokens=usual.prompt_tokens if prompt_tokens is None else prompt_tokens,
        new_tokens=usual.new_tokens if new_tokens is None else new_tokens,
        rate=rate,
    )
    hardware = choose(config, loaded, spec, profile or (), link)
    plan = make_plan(loaded, spec, hardware.profiles, workload, hardware.link, workers)
    report = as_report(loaded, spec, is_there, hardware, plan)
    report["notes"] += [*hardware.notes, *by_hand]
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        show(report)
    if plan.shortages:
        raise typer.Exit(1)


def _launch_fault(config: ClusterConfig) -> list[str]:
    """What `loopline launch` would refuse of a file that has no section launcher, so that its workers may well be
    started by hand. Raises ConfigError for it where the file has one."""
    try:
        config.require_reachable_workers()
    except ConfigError as error:
        if "launcher" in config.model_fields_set:
            raise
        return [f"for workers that are started by hand; loopline launch would refuse the file: {error}"]
    return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is planned for."""

    profiles: tuple[Profile, Profile]
    """Of workers that compute prompts, and of those that generate."""
    link: str | None
    assumed: tuple[str, ...]
    """What was taken because neither the file nor an option names it, and how to name another."""
    notes: tuple[str, ...]
    """What speaks against a profile that was measured."""


def choose(file: Path, config: ClusterConfig, spec: ModelSpec, names: Sequence[str], link: str | None) -> Hardware:
    """Profiles and link: what the options name, over what the file's section capacity names, over what is likely.

    `names`: of profiles, in the order in which they are laid over each other. A report of a link among them is named
    for its link, so that goes before the file's. Raises ConfigError for what there is not.
    """
    roles = roles_of(config)
    devices = [config.group(role).device for role in roles]
    own = config.capacity.profile
    all_names = [*([] if own is None else [_of_file(file, own)]), *names]
    profiles = (_profile(all_names, devices[0], spec), _profile(all_names, devices[-1], spec))
    assumed = []
    on_cuda = [device for device in dict.fromkeys(devices) if device != "cpu"]
    if on_cuda and not all_names:
        others = ", ".join(name for name in PROFILES if name not in ("cpu", profiles[-1].name))
        assumed.append(
            f"profile {default_profile(on_cuda[0]).name} is assumed for workers on {' and '.join(on_cuda)}; to name "
            f"another ({others}, or a file): --profile, or capacity.profile in the file"
        )
    has_report = profiles[0].default_link == MEASURED_LINK
    wanted = link or (None if has_report else config.capacity.link)
    if wanted is not None:
        profiles[0].link(wanted)
    elif on_cuda and not has_report and len(roles) > 1:
        wanted, reason = likely_link(config, profiles[0])
        others = ", ".join(name for name in profiles[0].links if name != wanted)
        assumed.append(
            f"link {wanted} is assumed ({reason}); to name another ({others}): --link, or capacity.link in the file"
        )
    notes = dict.fromkeys(
        note for device, one in zip(devices, profiles, strict=False) for note in _other_notes(config, device, one)
    )
    return Hardware(profiles=profiles, link=wanted, assumed=tuple(assumed), notes=tuple(notes))


def _other_notes(config: ClusterConfig, device: str, profile: Profile) -> Iterator[str]:
    """Of a profile that was measured on another kind of device, or with another model."""
    if profile.device and (profile.device in _PROCESSORS) != (device == "cpu"):
        yield f"the report is of a device {profile.device}, and workers are on {device}: the plan is of no cluster"
    if profile.model and Path(profile.model).name != Path(config.model.path).name:
        yield (
            f"the report is of {profile.model} and not of this model: its figures are taken for what the device reaches"
        )


def _of_file(file: Path, name: str) -> str:
    """`capacity.profile` as `--profile` takes it. Raises ConfigError where it is neither."""
    if name in PROFILES:
        return name
    path = file.resolve().parent / Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"{file}: capacity.profile is {name!r}; allowed: {', '.join(PROFILES)}, or a file")
    return str(path)


def read_geometry(folder: str) -> tuple[ModelSpec, bool]:
    """The checkpoint folder's geometry and True; where there is no such folder and its name is a public model's, that
    model's and False. Raises CheckpointError."""
    path = Path(folder)
    if not path.exists() and path.name in SHAPES:
        return SHAPES[path.name], False
    return load_model_spec(folder), True


def _profile(names: Sequence[str], device: str, spec: ModelSpec) -> Profile:
    profile = default_profile(device)
    for name in names:
        profile = read_profile(name, profile, lambda model: SHAPES[model] if model in SHAPES else _spec_of(model, spec))
    return profile


def _spec_of(model: str, own: ModelSpec) -> ModelSpec:
    """Of a report's model: its folder's, if it is there; else it is taken to be the configuration's."""
    return load_model_spec(model) if Path(model).is_dir() else own


def as_report(config: ClusterConfig, spec: ModelSpec, is_there: bool, hardware: Hardware, plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object."""
    layout, codec = plan.geometry.layout, load_text(config.model.path) if is_there else None
    return {
        "name": config.name,
        "model": config.model.path,
        "checkpoint_found": is_there,
        "family": str(spec.family),
        "dtype": plan.geometry.dtype,
        "loops": plan.geometry.loops,
        "max_loops": layout.max_loops,
        "context_tokens": spec.context_tokens,
        "has_tokenizer": codec is not None,
        "has_chat_template": codec is not None and codec.has_chat_template,
        "weights_bytes": plan.geometry.stored_bytes,
        "num_planes": layout.num_planes,
        "token_bytes": layout.token_bytes,
        "unpacked_token_bytes": layout.unpacked_token_bytes,
        "packing": layout.unpacked_token_bytes / layout.token_bytes,
        "block_size": layout.block_size,
        "block_bytes": layout.block_bytes,
        "profiles": {role: _described(one) for role, one in zip(("prefill", "decode"), hardware.profiles, strict=True)},
        "assumed": list(hardware.assumed),
        "workload": dataclasses.asdict(plan.workload),
        "workers": {role: _group(config, role, plan) for role in roles_of(config)},
        "steps": {"prefill": _steps(plan.prefill), "decode": _steps(plan.decode)},
        "transfer": None if plan.transfer is None else dataclasses.asdict(plan.transfer),
        "rates": plan.rates,
        "requests_per_s": plan.requests_per_s,
        "bottleneck": plan.bottleneck,
        "prefill_per_decode": plan.prefill_per_decode,
        "ratio": plan.ratio,
        "split": None if plan.split is None else dataclasses.asdict(plan.split),
        "demand": None if plan.demand is None else dataclasses.asdict(plan.demand),
        "shortages": list(plan.shortages),
        "notes": [*plan.notes, *notes(config, spec)],
    }


def _described(profile: Profile) -> dict[str, Any]:
    return {"name": profile.name, "source": profile.source}


def _group(config: ClusterConfig, role: str, plan: Plan) -> dict[str, Any]:
    """A role's workers. Counts of an arena that are not known are null."""
    group, part = config.group(role), plan.prefill if role == "prefill" else plan.decode
    return {"replicas": group.replicas, "device": group.device, **dataclasses.asdict(part.arena), "fits": part.fits}


def _steps(part: PrefillPlan | DecodePlan) -> dict[str, Any]:
    figures = dataclasses.asdict(part)
    del figures["arena"]
    return figures
