"""What a cluster of a configuration can hold and serve on a hardware profile, for one workload; and what limits it.

The pure core of `loopline check`. Rates are of steady work without queues; the coordinator's own cost is not in them.
"""

import math
from collections.abc import Callable, Iterator
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
    most_tokens,
    plan_decode,
    plan_prefill,
    plan_transfer,
    pushed,
)
from loopline.config import ClusterConfig
from loopline.model_spec import ModelSpec

_MOST_OF_A_RATIO = 4
_ONE_GPU, _BETWEEN_GPUS = "same-gpu", ("nvlink", "infiniband")  # links of the profiles that come along


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a rate of requests asks of the cluster."""

    prefill_workers: int | None
    """Least number of them; None: no number is enough, for no request fits."""
    decode_workers: int | None
    use: dict[str, float | None]
    """Part of what prefill, transfer and decode can do; above 1 requests wait ever longer. None: it can do nothing."""
    rows: float | None
    """Answers at once in each worker that generates; None: more come than can be served."""
    token_s: float | None
    """Expected time between an answer's tokens, that of other requests' prompts included where a worker computes both.
    """


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
    is_unified = roles == ("unified",)
    prefill = plan_prefill(config.engine_settings(roles[0]), geometry, profiles[0], workload, answers=is_unified)
    decode = plan_decode(config.engine_settings(roles[-1]), geometry, profiles[1], workload)
    if is_unified:
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
        demand=_demand(workload, rates, a_prefill, num_decode, decode, _Steps(geometry, profiles[1], workload)),
        notes=(
            *_role_notes(config, geometry, workload, prefill, decode, transfer),
            *_padding_notes("decode", decode, profiles[1]),
        ),
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
    whole, num_workers = replace(decode, requests_per_s=both), config.unified.replicas
    busy = 0.0 if workload.rate is None or not both else workload.rate / num_workers / prefill.requests_per_s
    return Plan(
        geometry=geometry,
        workload=workload,
        prefill=prefill,
        decode=decode,
        transfer=None,
        rates=rates,
        prefill_per_decode=None,
        ratio=None,
        demand=_demand(workload, rates, both, num_workers, whole, _Steps(geometry, profile, workload, busy)),
        notes=(
            *_decode_notes("unified", config, geometry, workload, decode),
            *_padding_notes("unified", decode, profile),
        ),
    )


def small_ratio(value: float) -> tuple[int, int]:
    """The nearest ratio of whole numbers of which the smaller is at most 4. `value` is above 0."""
    if value < 1:
        return small_ratio(1 / value)[::-1]
    found = Fraction(value).limit_denominator(_MOST_OF_A_RATIO)
    return found.numerator, found.denominator


@dataclass(frozen=True)
class _Steps:
    """Decode steps of one worker, of whose time prompts take the part `busy`."""

    geometry: Geometry
    profile: Profile
    workload: Workload
    busy: float = 0.0

    def expected_s(self, rows: int) -> float:
        """From one token of an answer to its next; infinite where prompts leave no time."""
        if self.busy >= 1:
            return math.inf
        step = decode_time(self.profile, self.geometry, rows, mean_context(self.workload))
        return step.expected_s / (1 - self.busy)


def _demand(
    workload: Workload, rates: dict[str, float], a_prefill: float, num_decode: int, decode: DecodePlan, steps: _Steps
) -> Demand | None:
    if workload.rate is None:
        return None
    rate = workload.rate
    rows = running_rows(rate * (workload.new_tokens - 1) / num_decode, decode.rows, steps.expected_s)
    return Demand(
        prefill_workers=math.ceil(rate / a_prefill) if a_prefill else None,
        decode_workers=math.ceil(rate / decode.requests_per_s) if decode.requests_per_s else None,
        use={part: rate / one if one else None for part, one in rates.items()},
        rows=rows,
        token_s=None if rows is None else steps.expected_s(max(1, math.ceil(rows))),
    )


def running_rows(tokens_per_s: float, most: int, step_s: Callable[[int], float]) -> float | None:
    """Rows of a worker that makes so many tokens a second: of the least batch whose step is not longer than the time in
    which that many tokens are asked for (Little's law). None where no batch up to `most` is enough.

    All are looked at in turn: where rows are padded, a batch of one tile may be enough and one row more is not.
    """
    for rows in range(1, most + 1):
        asked = tokens_per_s * step_s(rows)
        if asked <= rows:
            return asked
    return None


def _role_notes(
    config: ClusterConfig,
    geometry: Geometry,
    workload: Workload,
    prefill: PrefillPlan,
    decode: DecodePlan,
    transfer: TransferPlan,
) -> Iterator[str]:
    if config.unified.replicas:
        yield f"{config.unified.replicas} unified workers are not counted in"
    yield from _room_notes("prefill", geometry.layout.blocks_for(workload.prompt_tokens), prefill)
    yield from _decode_notes("decode", config, geometry, workload, decode)
    if prefill.chunk_tokens < config.prefill.chunk_tokens:
        yield (
            f"chunks are {prefill.chunk_tokens:,} tokens and not prefill.chunk_tokens: prefill.max_token_loops allows "
            f"{config.prefill.max_token_loops:,} / {geometry.loops} loops a step"
        )
    chunk_bytes, _ = pushed(
        config.worker_settings("prefill", "p", "").transfer, geometry, prefill.chunk_tokens, prefill.chunk_tokens
    )
    share = config.transfer.in_flight_limit_bytes * config.transfer.peer_share
    if chunk_bytes > share:
        yield f"a chunk's KV, {chunk_bytes:,} bytes, is more than a peer's share in flight, {int(share):,}: chunks wait"
    if _is_one_device(config) and prefill.requests_per_s and decode.requests_per_s:
        shared = 1 / (1 / prefill.requests_per_s + 1 / decode.requests_per_s)
        goes = f"; KV goes by --link {_ONE_GPU} then, not {transfer.link}" if transfer.link in _BETWEEN_GPUS else ""
        yield (
            f"both roles are on {config.decode.device}: where that is one GPU, its prefill and decode worker together "
            f"serve at most {shared:.3g} requests/s{goes}"
        )
        yield from _shared_memory_notes(config)


def _is_one_device(config: ClusterConfig) -> bool:
    """Whether both roles share a GPU, where the workers' machine does not hide that from them."""
    return config.prefill.device == config.decode.device != "cpu" and config.launcher.kind == "local"


def _decode_notes(
    role: str, config: ClusterConfig, geometry: Geometry, workload: Workload, decode: DecodePlan
) -> Iterator[str]:
    """Of a role that generates."""
    yield from _room_notes(role, geometry.layout.blocks_for(most_tokens(workload)), decode)
    if decode.rows_limit == "max_token_loops":
        yield f"{decode.fits - decode.rows:,} answers that fit have no row: {role}.max_token_loops allows fewer"


def _room_notes(role: str, need: int, group: PrefillPlan | DecodePlan) -> Iterator[str]:
    blocks = group.arena.num_blocks
    if blocks is not None and blocks < need:
        yield f"no such request fits: it needs {need:,} blocks, and a {role} worker has {blocks:,}"


def _padding_notes(role: str, decode: DecodePlan, profile: Profile) -> Iterator[str]:
    """Of a full batch that makes less than one without its last rows."""
    if decode.whole_tiles_per_s > decode.tokens_per_s:
        fewer = decode.rows - decode.rows % profile.row_tile
        yield (
            f"{decode.rows:,} rows make {decode.tokens_per_s:,.3g} tokens/s and {fewer:,} would make "
            f"{decode.whole_tiles_per_s:,.3g}: rows are padded to a multiple of {profile.row_tile}; "
            f"{role}.max_running: {fewer} keeps to whole ones"
        )


def _shared_memory_notes(config: ClusterConfig) -> Iterator[str]:
    asked = [one.memory_fraction for one in (config.prefill, config.decode) if one.num_blocks is None]
    if sum(asked) > 1:
        yield f"on one GPU memory_fraction, {' and '.join(f'{one:g}' for one in asked)}, is more than all of its memory"
