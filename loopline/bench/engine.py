"""What the engine's steps cost on a device, beside plainer ways to compute the same and beside a floor, in one run.

Arms take turns in every round, so that whatever else moves the machine moves them alike; what a figure is worth is its
ratio to another of the same run. Floors are bytes and operations that no way can do without, over rates that the run
itself measured. `loopline bench engine` shows what `measure` gives.
"""

import gc
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from loopline.bench.device_time import Arm, Rates, Timer, error_text, interleave, measure_rates, one_thread
from loopline.bench.engine_arms import CPU_ARMS, CUDA_ARMS, DECODE_ARMS, DecodePoint
from loopline.bench.engine_idle import IdleSizes, measure_idle
from loopline.bench.engine_prefill import PrefillPoint
from loopline.bench.named_model import folder_of, is_random, spec_of
from loopline.bench.shapes import prompt_flops, weight_bytes
from loopline.engine.engine import require_device
from loopline.errors import ConfigError, InvariantBroken
from loopline.model import LoopedModel, load_model, random_model, resolve_dtype
from loopline.model_spec import ModelSpec
from loopline.settings import EngineSettings

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_MOST_PER_ROW_ROUNDS = 2
_RATIOS = (
    ("plain-eager", "engine"),
    ("plain-graph", "elementwise-graph"),
    ("plain-graph", "engine"),
    ("elementwise-graph", "engine"),
    ("unfused", "engine"),
    ("engine-eager", "engine"),
    ("per-row", "packed"),
)


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """What is measured, on what, and how often."""

    model: str
    """A checkpoint folder, or a name in `loopline.bench.shapes.SHAPES`."""
    random_weights: bool = False
    """Of a folder use config.json alone; a named shape has no other weights."""
    device: str = "cuda"
    dtype: str = "bf16"
    """fp32, bf16, or auto: the checkpoint's own."""
    decode: tuple[tuple[int, int], ...] = ((1, 512), (32, 512))
    """(rows, context)."""
    prefill: tuple[tuple[int, int], ...] = ((1, 2048), (8, 2048))
    """(prompts, tokens of each)."""
    arms: tuple[str, ...] | None = None
    """Names in `DECODE_ARMS`; None: what the device can do, `engine-eager` left out."""
    rounds: int = 5
    steps: int = 20
    """Steps of a group, and one group is an arm's turn; fewer where they take long."""
    prefill_chunk: int = 16384
    """Most tokens of one packed pass."""
    per_row_rows: int = 256
    """Rows of a decode step where prompts are computed as decode rows."""
    per_row_all: bool = False
    """Prompts as decode rows at every prefill point, not at the first alone."""
    idle: IdleSizes | None = None
    """Requests of a whole engine to look at; None: not at all."""


def measure(bench: EngineBench, command: str, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All figures as one JSON object. A part that fails has its error there, and the others their figures. `command`:
    what the report says it was asked by. `say` hears what is measured next.

    Raises OperatorError kinds for what cannot be measured at all: device, model, points and arms.
    """
    require_device(bench.device)
    spec, device = spec_of(bench.model), torch.device(bench.device)
    arms = _checked_arms(bench, device, spec)
    kind = resolve_dtype(bench.dtype, spec)
    dtype, timer = _DTYPE_NAMES[kind], Timer(device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    say("rates of the device")
    with one_thread(device):
        rates = measure_rates(timer, kind)
    _free(device)
    report: dict[str, Any] = {
        "machine": machine(device, command),
        "model": {"name": bench.model, "loops": spec.default_loops, "dtype": dtype},
        "rates": {"copy_bytes_per_s": rates.copy_bytes_per_s, "matmul_flops_per_s": rates.matmul_flops_per_s},
    }
    report["model"]["random_weights"] = is_random(bench.model, bench.random_weights)
    report |= _points(bench, spec, arms, timer, rates, say)
    _free(device)
    if bench.idle is not None:
        say("a whole engine")
        return report | {"idle": _idle(bench, bench.idle, spec, dtype)}
    return report | {"idle": None}


def _points(
    bench: EngineBench, spec: ModelSpec, arms: Sequence[str], timer: Timer, rates: Rates, say: Callable[[str], None]
) -> dict[str, Any]:
    """Figures of all decode and prefill points; the model is gone afterwards."""
    if not bench.decode and not bench.prefill:
        return {"decode": [], "prefill": []}
    say("weights")
    with torch.inference_mode(), one_thread(timer.device):
        run = _Run(bench, _model(bench, spec), timer, rates, say)
        return {
            "decode": [run.decode(arms, *point) for point in bench.decode],
            "prefill": [run.prefill(index, *point) for index, point in enumerate(bench.prefill)],
        }


def machine(device: torch.device, command: str) -> dict[str, Any]:
    """Where, when and by which command this runs."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


@dataclass(eq=False)
class _Run:
    """Measures points with one model."""

    bench: EngineBench
    model: LoopedModel
    timer: Timer
    rates: Rates
    say: Callable[[str], None]

    @property
    def dtype(self) -> str:
        return _DTYPE_NAMES[self.model.dtype]

    def decode(self, names: Sequence[str], rows: int, context: int) -> dict[str, Any]:
        """One decode step of `rows` rows that each see `context` keys."""
        self.say(f"decode, {rows} rows at context {context}")
        return {"rows": rows, "context": context} | self._guarded(lambda: self._decode_figures(names, rows, context))

    def prefill(self, index: int, prompts: int, tokens: int) -> dict[str, Any]:
        """`prompts` prompts of `tokens` tokens; `index`: which point it is."""
        self.say(f"prefill, {prompts} prompts of {tokens} tokens")
        per_row = index == 0 or self.bench.per_row_all
        return {"prompts": prompts, "tokens": tokens} | self._guarded(
            lambda: self._prefill_figures(prompts, tokens, per_row)
        )

    def _guarded(self, point: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a point gives, or its error; its memory is free afterwards."""
        try:
            figures = point()
        except Exception as error:  # whatever it is, the other points' figures stand
            figures = {"error": error_text(error)}
        _free(self.timer.device)
        arms = figures.get("arms", {})
        times = [f"{name} {one['median_ms']:.3f} ms" for name, one in arms.items() if "median_ms" in one]
        self.say(f"  floor {figures['floor_ms']:.3f} ms, {', '.join(times)}" if times else "  no figures")
        return figures

    def _decode_figures(self, names: Sequence[str], rows: int, context: int) -> dict[str, Any]:
        point = DecodePoint(self.model, self.dtype, rows, context)
        weights = weight_bytes(self.model.spec, self.dtype)
        floor_ms = (weights + point.kv_bytes_moved) / self.rates.copy_bytes_per_s * 1e3
        tokens: dict[str, list[int]] = {}
        arms = [self._decode_arm(name, point, tokens) for name in names]
        interleave(arms, self.timer, self.bench.rounds, self.bench.steps)
        figures = {"weight_bytes": weights, "kv_bytes": point.kv_bytes_moved, "floor_ms": floor_ms}
        return figures | _arm_figures(arms, floor_ms) | {"same_tokens": _same_tokens(tokens)}

    def _prefill_figures(self, prompts: int, tokens: int, per_row: bool) -> dict[str, Any]:
        bench, spec = self.bench, self.model.spec
        point = PrefillPoint(self.model, self.dtype, prompts, tokens, bench.prefill_chunk, bench.per_row_rows)
        flops = prompts * prompt_flops(spec, tokens)
        num_bytes = weight_bytes(spec, self.dtype) + prompts * tokens * point.layout.token_bytes
        floor_ms = max(flops / self.rates.matmul_flops_per_s, num_bytes / self.rates.copy_bytes_per_s) * 1e3
        arms = [Arm("packed", point.packed)]
        if per_row:
            arms.append(Arm("per-row", point.per_row, _MOST_PER_ROW_ROUNDS))
        for arm in arms:
            _try_out(arm)
        interleave(arms, self.timer, bench.rounds, bench.steps)
        figures = {"flops": flops, "bytes": num_bytes, "floor_ms": floor_ms} | _arm_figures(arms, floor_ms)
        for one in figures["arms"].values():
            if "median_ms" in one:
                one["tokens_per_s"] = prompts * tokens / one["median_ms"] * 1e3
        return figures

    def _decode_arm(self, name: str, point: DecodePoint, tokens: dict[str, list[int]]) -> Arm:
        """An arm that has run once; what it chose goes into `tokens`."""
        try:
            step = DECODE_ARMS[name](point)
            tokens[name] = step().tolist()
            if not all(0 <= one < self.model.spec.vocab_size for one in tokens[name]):
                raise InvariantBroken("logits are not finite")
            return Arm(name, step)
        except Exception as error:  # whatever it is, the other arms' figures stand
            return Arm(name, lambda: None, error=error_text(error))


def _arm_figures(arms: Sequence[Arm], floor_ms: float) -> dict[str, Any]:
    """Every arm's times, and ratios of medians."""
    times = {arm.name: arm.report() for arm in arms}
    medians = {name: one["median_ms"] for name, one in times.items() if "median_ms" in one}
    ratios = {f"{a} / {b}": medians[a] / medians[b] for a, b in _RATIOS if a in medians and b in medians}
    return {"arms": times, "ratios": ratios | {f"{name} / floor": one / floor_ms for name, one in medians.items()}}


def _same_tokens(tokens: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """For each pair of arms over the same view of the storage: the share of rows for which both chose the same."""
    views = (("plain-eager", "plain-graph", "elementwise-graph"), ("engine", "unfused", "engine-eager"))
    return {
        f"{view[0]}, {name}": sum(map(int.__eq__, tokens[view[0]], tokens[name])) / len(tokens[name])
        for view in views
        for name in view[1:]
        if view[0] in tokens and name in tokens
    }


def _try_out(arm: Arm) -> None:
    """Run it once, so that what is compiled or captured is, and look at its logits."""
    try:
        logits = arm.run()
        if not isinstance(logits, Tensor) or not bool(torch.isfinite(logits).all()):
            raise InvariantBroken("logits are not finite")
    except Exception as error:  # whatever it is, the other arms' figures stand
        arm.error = error_text(error)


def _idle(bench: EngineBench, sizes: IdleSizes, spec: ModelSpec, dtype: str) -> dict[str, Any]:
    try:
        with folder_of(bench.model) as folder:
            settings = EngineSettings(
                model_path=str(folder),
                device=bench.device,
                dtype=dtype,
                max_loops=spec.default_loops,
                load_format="dummy" if is_random(bench.model, bench.random_weights) else "safetensors",
            )
            return measure_idle(settings, sizes)
    except Exception as error:  # whatever it is, the figures before it stand
        return {"error": error_text(error)}


# ---- what is asked for


def _checked_arms(bench: EngineBench, device: torch.device, spec: ModelSpec) -> tuple[str, ...]:
    """The decode arms. Raises ConfigError for a dtype, an arm or a point that cannot be measured."""
    if bench.dtype not in ("auto", *_DTYPE_NAMES.values()):
        raise ConfigError(f"dtype is {bench.dtype!r}; allowed: auto, {', '.join(_DTYPE_NAMES.values())}")
    allowed = CPU_ARMS if device.type == "cpu" else tuple(DECODE_ARMS)
    for name in bench.arms or ():
        if name not in allowed:
            raise ConfigError(f"arms has {name!r}; allowed on {device.type}: {', '.join(allowed)}")
    for name, points in (("decode", bench.decode), ("prefill", bench.prefill)):
        for count, tokens in points:
            if count < 1 or not 1 <= tokens <= spec.context_tokens:
                raise ConfigError(f"{name} has {count}x{tokens}; allowed: 1 and above x 1 to {spec.context_tokens}")
    return bench.arms or (CPU_ARMS if device.type == "cpu" else CUDA_ARMS)


def _model(bench: EngineBench, spec: ModelSpec) -> LoopedModel:
    if is_random(bench.model, bench.random_weights):
        return random_model(spec, bench.device, bench.dtype)
    return load_model(bench.model, bench.device, bench.dtype)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _free(device: torch.device) -> None:
    """Give what the last point had back to the device."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # of a device that an arm has broken: its error is in the report
            torch.cuda.empty_cache()
