"""A hardware profile from what `loopline bench` measured: rates as reported, efficiencies fitted, links solved for.

The fit looks for the four numbers of `Profile` that bring expected times nearest to measured ones, each weighed by its
own size. What no point says anything of keeps the base profile's value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Link, Profile
from loopline.capacity.reports import EngineReport, TransferReport
from loopline.capacity.times import decode_load, prefill_load
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec

_KEPT = 3e-3
"""How hard the base's efficiencies hold: enough to settle what the points leave open, too little to move the rest."""
_SPAN = 3.0
_STEPS = 6
_ROUNDS = 14


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured pass: seconds that its weights, its KV and its operations take at the full rates, its layers, and
    the seconds that it took."""

    name: str
    weights_s: float
    kv_s: float
    flops_s: float
    layer_passes: int
    measured_s: float


def report_points(report: EngineReport, spec: ModelSpec, profile: Profile) -> list[Point]:
    """The points of a report of `loopline bench engine` that have figures, at the rates that the report measured.

    `spec`: of the model that the report is of. `profile`: whose padding of rows counts.
    """
    geometry, rates = Geometry.of(spec, report.model.loops, report.model.dtype), report.rates
    points = []
    for step in report.decode:
        load = decode_load(profile, geometry, step.rows, step.context)
        points.append((f"decode {step.rows}x{step.context}", load, step.arms.engine.median_ms))
    for one in report.prefill:
        load = prefill_load(profile, geometry, one.prompts, one.tokens)
        points.append((f"prefill {one.prompts}x{one.tokens}", load, one.arms.packed.median_ms))
    return [
        Point(
            name=name,
            weights_s=load.weight_bytes / rates.copy_bytes_per_s,
            kv_s=load.kv_bytes / rates.copy_bytes_per_s,
            flops_s=load.flops / rates.matmul_flops_per_s,
            layer_passes=load.layer_passes,
            measured_s=median_ms / 1e3,
        )
        for name, load, median_ms in points
        if median_ms is not None
    ]


def fit_efficiencies(points: Sequence[Point], base: Profile) -> dict[str, float]:
    """The efficiencies and layer_pass_s of `Profile` that fit the points best, by key: least in the sum of squared
    relative errors. Those of weights and operations are looked for on a grid that narrows around its best node, the
    other two solved for at each node. Raises ConfigError without points."""
    if not points:
        raise ConfigError("a report without figures of the arms engine and packed says nothing of efficiencies")
    prior = (math.log(base.weights_efficiency), math.log(base.flops_efficiency))
    best, center, span = math.inf, prior, _SPAN
    found = (base.weights_efficiency, base.flops_efficiency, base.kv_efficiency, base.layer_pass_s)
    for _ in range(_ROUNDS):
        middle = center
        for i in range(-_STEPS, _STEPS + 1):
            for j in range(-_STEPS, _STEPS + 1):
                node = (middle[0] + span * i / _STEPS, middle[1] + span * j / _STEPS)
                if max(node) > 0:  # more than the rate itself
                    continue
                weights, flops = math.exp(node[0]), math.exp(node[1])
                cost, inverse, layer_pass_s = _cost(points, weights, flops, 1 / base.kv_efficiency)
                cost += _KEPT * sum((a - b) ** 2 for a, b in zip(node, prior, strict=True))
                if cost < best:
                    best, center, found = cost, node, (weights, flops, 1 / inverse, layer_pass_s)
        span /= 2
    names = ("weights_efficiency", "flops_efficiency", "kv_efficiency", "layer_pass_s")
    return dict(zip(names, found, strict=True))


def _cost(points: Sequence[Point], weights: float, flops: float, prior: float) -> tuple[float, float, float]:
    """(cost, 1 / kv_efficiency, layer_pass_s) with the best of the last two for these efficiencies of weights and
    operations; `prior` is the base's 1 / kv_efficiency."""
    kv = [one.kv_s / one.measured_s for one in points]
    layers = [one.layer_passes / one.measured_s for one in points]
    left = [1.0 - max(one.weights_s / weights, one.flops_s / flops) / one.measured_s for one in points]
    held = _KEPT / prior**2
    a11, a12, a22 = _dot(kv, kv) + held, _dot(kv, layers), _dot(layers, layers)
    b1, b2 = _dot(kv, left) + held * prior, _dot(layers, left)
    determinant = a11 * a22 - a12 * a12
    inverse = (b1 * a22 - b2 * a12) / determinant if determinant > 0 else prior
    if (b2 * a11 - b1 * a12) < 0:  # layers cost nothing at least
        inverse = b1 / a11
    inverse = max(inverse, 1.0)
    layer_pass_s = max(0.0, (b2 - a12 * inverse) / a22)
    errors = (a * inverse + b * layer_pass_s - c for a, b, c in zip(kv, layers, left, strict=True))
    return sum(error**2 for error in errors) + held * (inverse - prior) ** 2, inverse, layer_pass_s


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def fit_engine(report: EngineReport, spec: ModelSpec, base: Profile) -> Profile:
    """`base` with the rates of a report of `loopline bench engine` and efficiencies fitted to its points; memory and
    links stay the base's. Raises ConfigError for a report without points, and pydantic's ValidationError for one whose
    points fit no profile."""
    fitted = fit_efficiencies(report_points(report, spec, base), base)
    machine, rates = report.machine, report.rates
    return Profile.model_validate(
        base.model_dump()
        | {
            "name": f"measured on {machine.device}",
            "source": f"{machine.command}, {machine.date}; memory and links: {base.name}",
            "device": machine.device,
            "model": report.model.name,
            "bytes_per_s": rates.copy_bytes_per_s,
            "flops_per_s": {**base.flops_per_s, report.model.dtype: rates.matmul_flops_per_s},
            **fitted,
        }
    )


def fit_link(report: TransferReport) -> Link:
    """The link of a report of `loopline bench transfer`: rate and time of a push solved from its flat range and, with
    --overlap, one chunk alone; without it all of the flat range is rate. Raises ConfigError without a flat arm, and
    pydantic's ValidationError where the two say nothing of the rate."""
    flat, overlap = report.arms.flat, report.overlap
    if flat.bytes is None or flat.total_ms is None:
        raise ConfigError("a report of `loopline bench transfer` without its arm flat says nothing of the link")
    total_s, push_s = flat.total_ms / 1e3, 0.0
    rate = flat.bytes / total_s
    if overlap is not None and overlap.one_chunk.ms is not None and overlap.chunk_bytes < flat.bytes:
        a_byte_s = (total_s - overlap.one_chunk.ms / 1e3) / (flat.bytes - overlap.chunk_bytes)
        if 0 < a_byte_s < total_s / flat.bytes:
            push_s, rate = total_s - flat.bytes * a_byte_s, 1 / a_byte_s
    return Link(peak_bytes_per_s=rate, bytes_per_s=rate, push_s=push_s)
