"""What a cluster of a configuration can hold and serve on a hardware profile, for one workload; and what limits it.

The pure core of `loopline check`. Rates are of steady work without queues; the coordinator's own cost is not in them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.links import is_one_device
from loopline.capacity.notes import answer_shortage, padding_notes, prompt_shortage, role_notes
from loopline.capacity.splits import Rates, Split, best_split, small_ratio
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
)
from loopline.config import ClusterConfig
from loopline.model_spec import ModelSpec

_BUT_ROUNDING = 1 - 1e-9


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
    split: Split | None
    """Of as many workers as were asked for, the one that serves most; None: there is nothing to choose, since workers
    are unified, or cannot change roles: one role is on a CPU, or both are on one GPU."""
    demand: Demand | None
    shortages: tuple[str, ...]
    """What is missing for one request of the workload to be served at all."""
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
    num_workers: int | None = None,
) -> Plan:
    """The plan of a cluster whose prefill and decode workers have `profiles`, in this order; `link`: one of the first,
    None its default; `num_workers`: that are to be split, None those of the file. Raises ConfigError for a workload, a
    link or a number that cannot be."""
    workload.check(spec.context_tokens)
    geometry, roles = geometry_of(config, spec), roles_of(config)
    is_unified = roles == ("unified",)
    prefill = plan_prefill(config.engine_settings(roles[0]), geometry, profiles[0], workload, answers=is_unified)
    decode = plan_decode(config.engine_settings(roles[-1]), geometry, profiles[1], workload)
    if is_unified:
        return _unified(config, geometry, profiles[1], workload, prefill, decode)
    transfers = config.worker_settings("prefill", "p", "").transfer
    transfer = plan_transfer(transfers, geometry, profiles[0], workload, prefill.chunk_tokens, link)
    num_prefill, num_decode = own = config.prefill.replicas, config.decode.replicas
    each = Rates(prefill=prefill.requests_per_s, transfer=transfer.requests_per_s, decode=decode.requests_per_s)
    rates = each.of(num_prefill, num_decode)
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
        split=best_split(each, sum(own) if num_workers is None else num_workers, own)
        if balance is not None and _can_change_roles(config)
        else None,
        demand=_demand(workload, rates, a_prefill, num_decode, decode, _Steps(geometry, profiles[1], workload)),
        shortages=(
            *prompt_shortage(config, geometry, workload, prefill),
            *answer_shortage("decode", config, geometry, workload, decode),
        ),
        notes=(
            *role_notes(config, geometry, prefill, decode, transfer),
            *padding_notes("decode", decode, profiles[1]),
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
        split=None,
        demand=_demand(workload, rates, both, num_workers, whole, _Steps(geometry, profile, workload, busy)),
        shortages=tuple(answer_shortage("unified", config, geometry, workload, decode)),
        notes=tuple(padding_notes("unified", decode, profile)),
    )


def _can_change_roles(config: ClusterConfig) -> bool:
    """Whether a worker's device would serve the other role as well."""
    return (config.prefill.device == "cpu") == (config.decode.device == "cpu") and not is_one_device(config)


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

    They are looked at in turn: where rows are padded, a batch of one tile may be enough and one row more is not. A step
    of more rows is not shorter, so none below what a smaller one is asked for is enough, and these are left out.
    """
    rows = 1
    while rows <= most:
        asked = tokens_per_s * step_s(rows)
        if asked <= rows:
            return asked
        if asked > 2 * most:
            return None
        rows = max(rows + 1, math.ceil(asked * _BUT_ROUNDING))
    return None
