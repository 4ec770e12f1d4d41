"""What a whole engine in this process leaves idle: requests that decode together, traced, and the gaps between kernels.

Also how long it took from before the engine was made to the first token of anyone. `loopline.bench.engine` calls it.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from loopline.engine.engine import Engine
from loopline.errors import InvariantBroken
from loopline.request import Request, SamplingParams
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings, SchedulerSettings

_ENDS_STEP, _BEGINS_STEP = "_choose_kernel", "norm"
"""In the names of the kernels between which a step's tokens and inputs move."""
LARGE_GAP_US = 20.0
"""Gaps above it are between steps: inside a step kernels follow on one another."""
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
_MOST_KERNELS = 12


@dataclass(frozen=True, kw_only=True)
class IdleSizes:
    """What runs, and how many steps are looked at; requests must outlast them."""

    requests: int = 32
    prompt_tokens: int = 480
    new_tokens: int = 64
    clocked_steps: int = 16
    untraced_steps: int = 4
    """Steps under the profiler that it does not keep, for it slows the first."""
    traced_steps: int = 30


def measure_idle(
    settings: EngineSettings, sizes: IdleSizes, now_s: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Make the engine, let all requests decode, and look at it. On a CPU there is no trace, only times."""
    start_s = now_s()
    engine = Engine(_with_room(settings, sizes), UnifiedPolicy())
    made_s = now_s()
    _submit(engine, sizes)
    counts: dict[str, int] = defaultdict(int)

    def step() -> None:
        outcome = engine.step()
        if outcome is None or outcome.lost:
            raise InvariantBroken("requests are running, and a step computed nothing or lost one")
        for row in outcome.rows:
            counts[row.request_id] += 1

    while not counts:
        step()
    first_token_s = now_s()
    while len(counts) < sizes.requests or min(counts.values()) < 2:
        step()
    clocked_s = now_s()
    for _ in range(sizes.clocked_steps):
        step()
    step_s = (now_s() - clocked_s) / sizes.clocked_steps
    figures: dict[str, Any] = {
        "requests": sizes.requests,
        "start_to_engine_s": made_s - start_s,
        "start_to_first_token_s": first_token_s - start_s,
        "step_ms": step_s * 1e3,
        "trace": None,
    }
    if settings.device.startswith("cuda"):
        figures["trace"] = trace_figures(_trace(step, sizes)) | {"steps": sizes.traced_steps}
    if max(counts.values()) >= sizes.new_tokens:
        raise InvariantBroken("a request ended inside the steps that were measured")
    return figures


def trace_figures(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From a trace's events with `cat`, `name`, and `ts` and `dur` in microseconds: how much of the time between the
    first and the last device work nothing ran, and in which gaps; and which kernels took how long. Between two steps is
    what lies between the choice of tokens and the next step's first norm.
    """
    work = sorted((float(one["ts"]), float(one["ts"]) + float(one["dur"]), str(one["name"])) for one in events)
    if not work:
        raise InvariantBroken("a trace of an engine's steps has no device work")
    gaps, between, busy_to = [], [], work[0][0]
    is_between = False
    for start, end, name in work:
        if start > busy_to:
            gaps.append(start - busy_to)
            if is_between:
                between.append(start - busy_to)
        busy_to = max(busy_to, end)
        is_between = _ENDS_STEP in name or (is_between and _BEGINS_STEP not in name)
    window, large = busy_to - work[0][0], [gap for gap in gaps if gap > LARGE_GAP_US]
    return {
        "window_ms": window / 1e3,
        "idle_share": sum(gaps) / window,
        "between_steps": {
            "count": len(between),
            "share": sum(between) / window,
            "longest_us": max(between, default=0.0),
        },
        "large_gaps": {
            "above_us": LARGE_GAP_US,
            "count": len(large),
            "total_ms": sum(large) / 1e3,
            "share": sum(large) / window,
            "longest_us": max(large, default=0.0),
        },
        "small_gaps": {"count": len(gaps) - len(large), "share": (sum(gaps) - sum(large)) / window},
        "kernels": _longest(work),
    }


def _longest(work: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """The names that took longest in all."""
    times: dict[str, list[float]] = defaultdict(list)
    for start, end, name in work:
        times[name].append(end - start)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:_MOST_KERNELS]
    return [{"name": name, "count": len(one), "total_ms": sum(one) / 1e3} for name, one in longest]


def _trace(step: Callable[[], None], sizes: IdleSizes) -> list[dict[str, Any]]:
    """Device work of some steps."""
    plan = schedule(wait=0, warmup=sizes.untraced_steps, active=sizes.traced_steps, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"

        def keep(profiler: profile) -> None:
            profiler.export_chrome_trace(str(path))

        with profile(activities=[ProfilerActivity.CUDA], schedule=plan, on_trace_ready=keep) as profiler:
            for _ in range(sizes.untraced_steps + sizes.traced_steps):
                step()
                profiler.step()
            torch.cuda.synchronize()
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [one for one in events if one.get("cat") in _DEVICE_WORK and one.get("ph") == "X"]


def _with_room(settings: EngineSettings, sizes: IdleSizes) -> EngineSettings:
    """All requests at once, their prompts in as few steps as chunks allow, and the next step always on its way."""
    chunk_tokens = SchedulerSettings().chunk_tokens
    scheduler = SchedulerSettings(
        max_running=sizes.requests,
        chunk_tokens=chunk_tokens,
        max_token_loops=sizes.requests * chunk_tokens * (settings.max_loops or 1),
        steps_ahead=1,
    )
    return replace(settings, scheduler=scheduler)


def _submit(engine: Engine, sizes: IdleSizes) -> None:
    prompts = np.random.default_rng(0).integers(0, engine.model.spec.vocab_size, (sizes.requests, sizes.prompt_tokens))
    for number, prompt in enumerate(prompts.tolist()):
        params = SamplingParams(max_tokens=sizes.new_tokens, seed=number, loops=engine.layout.max_loops)
        if engine.scheduler.submit(Request(request_id=f"row{number}", prompt_ids=tuple(prompt), params=params)):
            raise InvariantBroken("an engine with nothing to do refused a request")
