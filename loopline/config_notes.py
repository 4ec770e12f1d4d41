"""Settings that are allowed and have no effect beside the others of the same file, in words. `loopline check` shows
them and a launch logs them. `loopline.config` refuses what cannot be; here is what somebody may not have meant.
No torch.
"""

import logging
from collections.abc import Iterator

from loopline.config import ClusterConfig
from loopline.config_sections import DecodeConfig, RoutingConfig
from loopline.errors import CheckpointError
from loopline.identity import Role
from loopline.model_spec import ModelSpec, load_model_spec

_LOG = logging.getLogger(__name__)
LEAST_SHARE_TOKENS = 8
"""The fewest prompt tokens that a step of `loopline.sched.share` carries: one tile of rows."""
LEAST_PACKED_SHARE_TOKENS = 64
"""The same where CUDA graphs compute prompts: the fewest rows that one is captured for."""


def notes(config: ClusterConfig, spec: ModelSpec | None) -> list[str]:
    """One sentence for each setting without effect: the key, its value, and why. `spec`: of the checkpoint; None: not
    known, and nothing is said of what depends on it."""
    found = [] if spec is None else [*_noise_notes(config, spec)]
    reason = _why_nothing_is_cached(config, spec)
    return [*found, *_prefix_notes(config.routing, reason), *_routing_notes(config), *_bound_notes(config)]


def log_notes(config: ClusterConfig) -> None:
    """Log the notes, each as a warning. A checkpoint that cannot be read is left to those who serve it."""
    try:
        spec = load_model_spec(config.model.path)
    except CheckpointError:
        spec = None
    for note in notes(config, spec):
        _LOG.warning("%s: %s", config.name, note)


def _noise_notes(config: ClusterConfig, spec: ModelSpec) -> Iterator[str]:
    """Of the keys that noise depends on."""
    model = config.model
    if not spec.uses_initial_state:
        for key, value, usual in (
            ("initial_state", model.initial_state, "noise"),
            ("noise_key", model.noise_key, "request"),
            ("noise_seed", model.noise_seed, 0),
        ):
            if value != usual:
                yield f"model.{key} is {value}, which has no effect: {spec.family.capitalize()} starts from no noise"
        return
    if model.noise_seed and model.noise_key == "request":
        yield (
            f"model.noise_seed is {model.noise_seed}, which has no effect: model.noise_key is request, so noise "
            "depends on each request's seed"
        )
    if config.kv.prefix_cache == "auto" and model.noise_key == "request" and model.initial_state == "noise":
        yield (
            "kv.prefix_cache is auto, and nothing is cached of requests that start from noise: model.noise_key is "
            "request, so each has noise of its own; every turn of a conversation is computed from its first token on, "
            "unless model.noise_key is position"
        )


def _why_nothing_is_cached(config: ClusterConfig, spec: ModelSpec | None) -> str | None:
    """None: prefixes are cached, or may be."""
    if config.kv.prefix_cache is False:
        return "kv.prefix_cache is false, so nothing is cached"
    if spec is None or not spec.uses_initial_state:
        return None
    is_own = config.model.noise_key == "request" and config.model.initial_state == "noise"
    return "model.noise_key is request, so nothing is cached of requests that start from noise" if is_own else None


def _prefix_notes(routing: RoutingConfig, reason: str | None) -> Iterator[str]:
    if reason is None:
        return
    if routing.policy == "prefix_aware":
        yield f"routing.policy is prefix_aware and goes by work alone: {reason}"
    if routing.prefix_source == "fetch":
        yield f"routing.prefix_source is fetch, and there is nothing to fetch: {reason}"


def _routing_notes(config: ClusterConfig) -> Iterator[str]:
    routing = config.routing
    if routing.load_weight != 1 and routing.policy != "prefix_aware":
        yield (
            f"routing.load_weight is {routing.load_weight:g}, which has no effect: routing.policy is {routing.policy}, "
            "and only prefix_aware weighs"
        )
    only_unified = not (config.prefill.replicas or config.decode.replicas)
    below = routing.local_prefill_below_tokens
    if only_unified:
        why = "there are unified workers only, and such a worker computes every prompt itself"
        if routing.prefix_source in ("recompute", "fetch"):
            yield f"routing.prefix_source is {routing.prefix_source}, which has no effect: {why}"
        if below:
            yield f"routing.local_prefill_below_tokens is {below}, which has no effect: {why}"
    elif below and routing.prefix_source != "auto":
        yield (
            f"routing.local_prefill_below_tokens is {below}, which has no effect: routing.prefix_source is "
            f"{routing.prefix_source}, and only auto looks at it"
        )


def _bound_notes(config: ClusterConfig) -> Iterator[str]:
    """Of bounds on time per token that cannot make a share smaller."""
    for role in (Role.DECODE, Role.UNIFIED):
        group = config.group(role)
        assert isinstance(group, DecodeConfig)
        if not group.replicas or group.max_time_per_token_s is None:
            continue
        is_packed = group.device.startswith("cuda") and group.cuda_graphs and config.model.prefill != "per_row"
        least = LEAST_PACKED_SHARE_TOKENS if is_packed else LEAST_SHARE_TOKENS
        if group.prefill_share_tokens <= least:
            yield (
                f"{role.value}.max_time_per_token_s is {group.max_time_per_token_s:g}, which makes no step's share of "
                f"prompts smaller: {role.value}.prefill_share_tokens is {group.prefill_share_tokens}, and {least} "
                f"tokens are the smallest share {'that a CUDA graph computes' if is_packed else 'there is'}; give it "
                "room, such as 512"
            )
