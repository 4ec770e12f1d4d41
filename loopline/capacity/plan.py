"""What a cluster of a configuration can hold and serve on a hardware profile, for one workload; and what limits it.

The pure core of `loopline check`. Rates are of steady work without queues; the coordinator's own cost is not in them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.times import decode_time
from loopline.capacity.workers import (
    DecodePlan,
    PrefillPlan,
    TransferPlan,
    Workload,
    mean_context,
    plan_decode,
    plan_prefill,
    plan_transfer,
    pushed,
)
from loopline.config import ClusterConfig
from loopline.model_spec import ModelSpec

_MOST_OF_A_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a rate of requests asks of the cluster."""

    prefill_workers: int | None
    """Least number of them; None: no number is enough, for no request fits."""
    decode_workers: int | None
    use: dict[str, float | None]
    """Part of what prefill, transfer and decode can do; above 1 requests wait ever longer. None: it can do nothing."""
    rows: float | None
    """Answers at once in each decode worker; None: more come than can be served."""
    token_s: float | None
    """Expected time between an answer's tokens."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One cluster."""

    geometry: Geometry
    workload: Workload
    prefill: PrefillPlan
    decode: DecodePlan
    transfer: TransferPlan | None
    """None where unified workers take whole requests."""
    rates: dict[str, float]
    """Requests a second of all prefill workers, all links, all decode workers; or of all unified workers."""
    prefill_per_decode: float | None
    """Prefill workers, with their links, that keep one decode worker busy; None: nothing fits."""
    ratio: tuple[int, int] | None
    """About the same in whole numbers, prefill first."""
    demand: Demand | None
    notes: tuple[str, ...]
    """What of the configuration will not work, or not as it looks."""

    @property
    def bottleneck(self) -> str:
        """ "prefill", "transfer", "decode" or "unified": which serves least."""
        return min(self.rates, key=lambda part: self.rates[part])

    @property
    def requests_per_s(self) -> float:
        """What the bottleneck serves."""
        return self.rates[self.bottleneck]


def geometry_of(config: ClusterConfig, spec: ModelSpec) -> Geometry:
    """The model as this cluster serves it, at the depth of a request that asks for none."""
    max_loops = config.model.max_loops or spec.default_loops
    dtype = spec.checkpoint_dtype if config.model.dtype == "auto" else config.model.dtype
    return Geometry.of(spec, min(spec.default_loops, max_loops), dtype, config.kv.block_size, max_loops)


def roles_of(config: ClusterConfig) -> tuple[str, ...]:
    """The roles that a plan is of: prefill and decode, or unified where there are none of these."""
    return ("prefill", "decode") if config.prefill.replicas and config.decode.replicas else ("unified",)


def usual_workload(spec: ModelSpec) -> Workload:
    """What is planned for where nothing is said: 1,024 prompt and 256 new tokens, less where the context is small."""
    prompt_tokens = min(1024, spec.context_tokens // 2)
    return Workload(prompt_tokens=prompt_tokens, new_tokens=max(2, min(256, spec.context_tokens // 4)))


def make_plan(
    config: ClusterConfig,
    spec: ModelSpec,
    profiles: tuple[Profile, Profile],
    workload: Workload,
    link: str | None = None,
) -> Plan:
    """The plan of a cluster whose prefill and decode workers have `profiles`, in this order; `link`: one of the first,
    None its default. Raises ConfigError for a workload or a link that cannot be."""
    workload.check(spec.context_tokens)
    geometry, roles = geometry_of(config, spec), roles_of(config)
    prefill = plan_prefill(config.engine_settings(roles[0]), geometry, profiles[0], workload)
    decode = plan_decode(config.engine_settings(roles[-1]), geometry, profiles[1], workload)
    if roles == ("unified",):
        return _unified(config, geometry, profiles[1], workload, prefill, decode)
    transfers = config.worker_settings("prefill", "p", "").transfer
    transfer = plan_transfer(transfers, geometry, profiles[0], workload, prefill.chunk_tokens, link)
    num_prefill, num_decode = config.prefill.replicas, config.decode.replicas
    rates = {
        "prefill": num_prefill * prefill.requests_per_s,
        "transfer": min(num_prefill, num_decode) * transfer.requests_per_s,
        "decode": num_decode * decode.requests_per_s,
    }
    a_prefill = min(prefill.requests_per_s, transfer.requests_per_s)
    balance = decode.requests_per_s / a_prefill if a_prefill and decode.requests_per_s else None
    return Plan(
        geometry=geometry,
        workload=workload,
        prefill=prefill,
        decode=decode,
        transfer=transfer,
        rates=rates,
        prefill_per_decode=balance,
        ratio=None if balance is None else small_ratio(balance),
        demand=_demand(workload, rates, a_prefill, num_decode, decode, geometry, profiles[1]),
        notes=tuple(_notes(config, geometry, workload, prefill, decode)),
    )


def _unified(
    config: ClusterConfig,
    geometry: Geometry,
    profile: Profile,
    workload: Workload,
    prefill: PrefillPlan,
    decode: DecodePlan,
) -> Plan:
    """Each worker's device computes prompts and steps by turns."""
    both = 1 / (1 / prefill.requests_per_s + 1 / decode.requests_per_s) if prefill.fits and decode.rows else 0.0
    rates = {"unified": config.unified.replicas * both}
    whole = replace(decode, requests_per_s=both)
    return Plan(
        geometry=geometry,
        workload=workload,
        prefill=prefill,
        decode=decode,
        transfer=None,
        rates=rates,
        prefill_per_decode=None,
        ratio=None,
        demand=_demand(workload, rates, both, config.unified.replicas, whole, geometry, profile),
        notes=() if decode.rows else ("no such request fits a unified worker",),
    )


def small_ratio(value: float) -> tuple[int, int]:
    """The nearest ratio of whole numbers of which the smaller is at most 4. `value` is above 0."""
    if value < 1:
        return small_ratio(1 / value)[::-1]
    found = Fraction(value).limit_denominator(_MOST_OF_A_RATIO)
    return found.numerator, found.denominator


def _demand(
    workload: Workload,
    rates: dict[str, float],
    a_prefill: float,
    num_decode: int,
    decode: DecodePlan,
    geometry: Geometry,
    profile: Profile,
) -> Demand | None:
    if workload.rate is None:
        return None
    rate, steps = workload.rate, workload.new_tokens - 1
    rows = _running(rate * steps / num_decode, decode.rows, geometry, profile, mean_context(workload))
    step = None if rows is None else decode_time(profile, geometry, max(1, math.ceil(rows)), mean_context(workload))
    return Demand(
        prefill_workers=math.ceil(rate / a_prefill) if a_prefill else None,
        decode_workers=math.ceil(rate / decode.requests_per_s) if decode.requests_per_s else None,
        use={part: rate / one if one else None for part, one in rates.items()},
        rows=rows,
        token_s=None if step is None else step.expected_s,
    )


def _running(tokens_per_s: float, most: int, geometry: Geometry, profile: Profile, context: int) -> float | None:
    """Rows of a worker that makes so many tokens a second: the least batch whose step is not longer than the time in
    which that many tokens are asked for (Little's law). None where no batch up to `most` is enough."""

    def lasts(rows: int) -> float:
        return tokens_per_s * decode_time(profile, geometry, rows, context).expected_s

    low, high = 1, most
    if most < 1 or lasts(most) > most:
        return None
    while low < high:
        middle = (low + high) // 2
        if lasts(middle) <= middle:
            high = middle
        else:
            low = middle + 1
    return min(float(low), lasts(low))


def _notes(
    config: ClusterConfig,
    geometry: Geometry,
    workload: Workload,
    prefill: PrefillPlan,
    decode: DecodePlan,
) -> Iterator[str]:
    if config.unified.replicas:
        yield f"{config.unified.replicas} unified workers are not counted in"
    need = geometry.layout.blocks_for(workload.prompt_tokens + workload.new_tokens)
    for role, group in (("prefill", prefill), ("decode", decode)):
        blocks = group.arena.num_blocks
        wanted = geometry.layout.blocks_for(workload.prompt_tokens) if role == "prefill" else need
        if blocks is not None and blocks < wanted:
            yield f"no such request fits: it needs {wanted:,} blocks, and a {role} worker has {blocks:,}"
    if prefill.chunk_tokens < config.prefill.chunk_tokens:
        yield (
            f"chunks are {prefill.chunk_tokens:,} tokens and not prefill.chunk_tokens: prefill.max_token_loops allows "
            f"{config.prefill.max_token_loops:,} / {geometry.loops} loops a step"
        )
    if decode.rows_limit == "max_token_loops":
        yield f"{decode.fits - decode.rows:,} answers that fit have no row: decode.max_token_loops allows fewer"
    chunk_bytes, _ = pushed(
        config.worker_settings("prefill", "p", "").transfer, geometry, prefill.chunk_tokens, prefill.chunk_tokens
    )
    share = config.transfer.in_flight_limit_bytes * config.transfer.peer_share
    if chunk_bytes > share:
        yield f"a chunk's KV, {chunk_bytes:,} bytes, is more than a peer's share in flight, {int(share):,}: chunks wait"
    share_device = config.prefill.device == config.decode.device != "cpu" and config.launcher.kind == "local"
    if share_device and prefill.requests_per_s and decode.requests_per_s:
        shared = 1 / (1 / prefill.requests_per_s + 1 / decode.requests_per_s)
        yield (
            f"both roles are on {config.decode.device}: where that is one GPU, its prefill and decode worker together "
            f"serve at most {shared:.3g} requests/s"
        )
