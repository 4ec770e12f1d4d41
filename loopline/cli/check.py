"""`loopline check`: is a cluster YAML right, what will its workers hold, and what can they serve."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.ray_placement import needs_of
from loopline.bench.shapes import SHAPES
from loopline.capacity.hardware import Profile
from loopline.capacity.plan import Plan, make_plan, roles_of, usual_workload
from loopline.capacity.profiles import PROFILES, default_profile, read_profile
from loopline.capacity.workers import DecodePlan, PrefillPlan
from loopline.cli.check_report import show
from loopline.cli.options import Config, Json
from loopline.config import PREFIX_CACHE, ClusterConfig, load_config
from loopline.config_notes import notes
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.noise_key import NoiseKey, check_prefix_cache
from loopline.text import load_text

_Profile = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE",
        help=f"Hardware: {', '.join(PROFILES)}, a YAML file, or a JSON report of bench engine or bench transfer. "
        "May be repeated: later ones are laid over earlier ones.",
    ),
]
_Link = Annotated[str | None, typer.Option(metavar="NAME", help="The profile's link that pushes take.")]
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
    as_json: Json = False,
) -> None:
    """Check a cluster YAML and its checkpoint folder, and plan its capacity: what fits, how long it takes, what limits
    it."""
    loaded = load_config(config)
    loaded.require_reachable_workers()
    if loaded.launcher.kind == "ray":
        needs_of(loaded)
    spec, is_there = read_geometry(loaded.model.path)
    check_prefix_cache(spec, PREFIX_CACHE[loaded.kv.prefix_cache], NoiseKey(loaded.model.noise_key))
    devices = [loaded.group(role).device for role in roles_of(loaded)]
    profiles = (_profile(profile or (), devices[0], spec), _profile(profile or (), devices[-1], spec))
    usual = usual_workload(spec)
    workload = dataclasses.replace(
        usual,
        prompt_tokens=usual.prompt_tokens if prompt_tokens is None else prompt_tokens,
        new_tokens=usual.new_tokens if new_tokens is None else new_tokens,
        rate=rate,
    )
    plan = make_plan(loaded, spec, profiles, workload, link)
    report = as_report(loaded, spec, is_there, profiles, plan)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    show(report)


def read_geometry(folder: str) -> tuple[ModelSpec, bool]:
    """The checkpoint folder's geometry and True; where there is no such folder and its name is a public model's, that
    model's and False. Raises CheckpointError."""
    path = Path(folder)
    if not path.exists() and path.name in SHAPES:
        return SHAPES[path.name], False
    return load_model_spec(folder), True


def _profile(names: list[str] | tuple[str, ...], device: str, spec: ModelSpec) -> Profile:
    profile = default_profile(device)
    for name in names:
        profile = read_profile(name, profile, lambda model: SHAPES[model] if model in SHAPES else _spec_of(model, spec))
    return profile


def _spec_of(model: str, own: ModelSpec) -> ModelSpec:
    """Of a report's model: its folder's, if it is there; else it is taken to be the configuration's."""
    return load_model_spec(model) if Path(model).is_dir() else own


def as_report(
    config: ClusterConfig, spec: ModelSpec, is_there: bool, profiles: tuple[Profile, Profile], plan: Plan
) -> dict[str, Any]:
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
        "profiles": {role: _described(one) for role, one in zip(("prefill", "decode"), profiles, strict=True)},
        "workload": dataclasses.asdict(plan.workload),
        "workers": {role: _group(config, role, plan) for role in roles_of(config)},
        "steps": {"prefill": _steps(plan.prefill), "decode": _steps(plan.decode)},
        "transfer": None if plan.transfer is None else dataclasses.asdict(plan.transfer),
        "rates": plan.rates,
        "requests_per_s": plan.requests_per_s,
        "bottleneck": plan.bottleneck,
        "prefill_per_decode": plan.prefill_per_decode,
        "ratio": plan.ratio,
        "demand": None if plan.demand is None else dataclasses.asdict(plan.demand),
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
