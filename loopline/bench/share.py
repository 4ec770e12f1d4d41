"""What a long prompt does to requests that decode beside it in the same engine: their time per token before it came and
while it was computed, by what bounds its share of a step. `loopline bench share` shows what `measure` gives.

Every arm is an engine with settings of its own, over the same weights; arms take turns. All give the same tokens.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from loopline.bench.engine import machine
from loopline.bench.named_model import folder_of, is_random, spec_of
from loopline.clock import Clock, MonotonicClock
from loopline.engine.engine import Engine, require_device
from loopline.errors import ConfigError, InvariantBroken
from loopline.request import Request, SamplingParams
from loopline.sched.policy import UnifiedPolicy
from loopline.settings import EngineSettings, SchedulerSettings

_BLOCK_SIZE = 16
_LONG = "long"
_NO_LIMIT = 1 << 30
_LEAST_SHARE = 8  # prompt tokens that a step computes at least
ARMS = ("bound", "fixed", "whole")


@dataclass(frozen=True, kw_only=True)
class ShareBench:
    """What is measured, on what, and how often."""

    model: str
    """A checkpoint folder, or a name in `loopline.bench.shapes.SHAPES`."""
    random_weights: bool = False
    """Of a folder use config.json alone; a named shape has no other weights."""
    device: str = "cuda"
    dtype: str = "bf16"
    rows: int = 8
    """Requests that decode."""
    context: int = 64
    """Tokens of their prompts."""
    prompt: int = 1024
    """Tokens of the long prompt."""
    bound_s: float | None = None
    """On time per token; None: `bound_times` the median of steps without prompts, measured first."""
    bound_times: float = 3.0
    most_share: int = 256
    """Prompt tokens that a step carries: at most in the arm `bound`, always in `fixed`."""
    before: int = 50
    """Tokens of each request that are timed before the prompt comes."""
    rounds: int = 3
    """Turns of every arm that are counted; there is one more of each before them."""
    steps_ahead: int | None = None
    """None: 1 on CUDA, 0 on a CPU."""
    cpu_time: bool = False
    """Count this process's CPU time, which work of others on the machine adds little to."""


class CpuClock:
    """CPU time of this process; it stands still while others have the processor."""

    def now_s(self) -> float:
        return time.process_time()


@dataclass(eq=False)
class Arm:
    """An engine, and what its turns gave. Times per token are of every request that decodes, pooled."""

    name: str
    engine: Engine
    before_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    """Prompt tokens of each step while the prompt was computed."""

    def forget(self) -> None:
        """Drop the figures so far; what the engine has learnt stays."""
        for figures in (self.before_s, self.during_s, self.first_token_s, self.shares):
            figures.clear()


def measure(bench: ShareBench, command: str, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All figures as one JSON object. `say` hears what is measured next.

    Raises OperatorError kinds for what cannot be measured: device, model, sizes.
    """
    require_device(bench.device)
    spec, has_random = spec_of(bench.model), is_random(bench.model, bench.random_weights)
    _check(bench, spec.context_tokens)
    clock: Clock = CpuClock() if bench.cpu_time else MonotonicClock()
    with folder_of(bench.model) as folder:
        base = EngineSettings(
            model_path=str(folder),
            device=bench.device,
            dtype=bench.dtype,
            load_format="dummy" if has_random else "safetensors",
            num_blocks=_num_blocks(bench),
            block_size=_BLOCK_SIZE,
            prefix_cache="off",
        )
        run = _Run(bench, base, clock, say)
        arms, bound_s = run.make()
    for turn in range(bench.rounds):
        for arm in arms:
            say(f"turn {turn + 1} of {bench.rounds}, {arm.name}")
            run.turn(arm, turn + 1)
    return {
        "machine": machine(torch.device(bench.device), command) | {"load": list(os.getloadavg())},
        "model": {"name": bench.model, "loops": spec.default_loops, "dtype": bench.dtype},
        "random_weights": has_random,
        "clock": "cpu" if bench.cpu_time else "wall",
        "rows": bench.rows,
        "context": bench.context,
        "prompt": bench.prompt,
        "rounds": bench.rounds,
        "bound_ms": bound_s * 1e3,
        "most_share": bench.most_share,
        "arms": {arm.name: _figures(arm, bound_s) for arm in arms},
    }


class _Run:
    """Makes the arms and runs their turns."""

    def __init__(self, bench: ShareBench, base: EngineSettings, clock: Clock, say: Callable[[str], None]) -> None:
        self._bench = bench
        self._base = base
        self._clock = clock
        self._say = say

    def make(self) -> tuple[list[Arm], float]:
        """All arms, each after a turn that is not counted, and the bound in seconds."""
        arms = {"whole": self._arm("whole", None, None)}
        alone_s = median(arms["whole"].before_s)
        bound_s = self._bench.bound_s or alone_s * self._bench.bound_times
        self._say(f"steps without prompts take {alone_s * 1e3:.3f} ms; the bound is {bound_s * 1e3:.3f} ms")
        arms["fixed"] = self._arm("fixed", self._bench.most_share, None)
        arms["bound"] = self._arm("bound", self._bench.most_share, bound_s)
        for arm in arms.values():
            arm.forget()
        return [arms[name] for name in ARMS], bound_s

    def _arm(self, name: str, share: int | None, bound_s: float | None) -> Arm:
        self._say(f"engine of the arm {name}")
        bench = self._bench
        most_tokens = max(bench.prompt, bench.rows * bench.context)
        usual_ahead = 1 if bench.device.startswith("cuda") else 0
        scheduler = SchedulerSettings(
            max_running=bench.rows + 1,
            chunk_tokens=most_tokens + -most_tokens % _BLOCK_SIZE,
            max_token_loops=_NO_LIMIT,
            prefill_tokens_per_loop=share,
            max_time_per_token_s=bound_s,
            steps_ahead=usual_ahead if bench.steps_ahead is None else bench.steps_ahead,
        )
        arm = Arm(name, Engine(replace(self._base, scheduler=scheduler), UnifiedPolicy(), clock=self._clock))
        self.turn(arm, 0)
        return arm

    def turn(self, arm: Arm, number: int) -> None:
        """All requests decode, then the long prompt comes. Ends with its first token; the engine is empty then."""
        bench, engine, draw = self._bench, arm.engine, np.random.default_rng(number)
        names = [f"row{row}" for row in range(bench.rows)]
        times: dict[str, list[float]] = {name: [] for name in (*names, _LONG)}
        for name in names:
            self._submit(engine, name, draw, bench.context, _answer_tokens(bench))
        self._step_until(engine, times, lambda: all(len(times[name]) > 1 for name in names))
        skipped = {name: len(one) - 1 for name, one in times.items()}
        self._step_until(engine, times, lambda: len(times["row0"]) > skipped["row0"] + bench.before)
        asked_s = self._clock.now_s()
        arrived = {name: len(one) - 1 for name, one in times.items()}
        self._submit(engine, _LONG, draw, bench.prompt, 1)
        before = engine.counts.tokens.copy()
        arm.shares += self._step_until(engine, times, lambda: bool(times[_LONG]))
        if engine.counts.tokens["prefill"] - before["prefill"] != bench.prompt:
            raise InvariantBroken("something else than the long prompt was computed beside the requests")
        arm.first_token_s.append(times[_LONG][0] - asked_s)
        for name in names:
            arm.before_s += np.diff(times[name][skipped[name] : arrived[name] + 1]).tolist()
            arm.during_s += np.diff(times[name][arrived[name] :]).tolist()
            allocation = engine.scheduler.remove(name)
            if allocation is not None:
                engine.ledger.release(allocation)
        while engine.step() is not None:  # what was queued ahead
            pass

    def _step_until(self, engine: Engine, times: Mapping[str, list[float]], is_done: Callable[[], bool]) -> list[int]:
        """Step, and note when each request's tokens came. Prompt tokens of each step."""
        shares = []
        while not is_done():
            before = engine.counts.tokens["prefill"]
            outcome = engine.step()
            if outcome is None or outcome.lost:
                raise InvariantBroken("requests are running, and a step computed nothing or lost one")
            now_s = self._clock.now_s()
            shares.append(engine.counts.tokens["prefill"] - before)
            for row in outcome.rows:
                times[row.request_id].append(now_s)
                if row.finish is not None and row.request_id != _LONG:
                    raise InvariantBroken("a request ended before the long prompt was computed")
        return shares

    def _submit(self, engine: Engine, name: str, draw: np.random.Generator, prompt: int, most: int) -> None:
        token_ids = tuple(draw.integers(0, engine.model.spec.vocab_size, prompt).tolist())
        params = SamplingParams(max_tokens=most, loops=engine.layout.max_loops)
        if engine.scheduler.submit(Request(request_id=name, prompt_ids=token_ids, params=params)):
            raise InvariantBroken("an engine with nothing to do refused a request")


def _figures(arm: Arm, bound_s: float) -> dict[str, Any]:
    shares = [share for share in arm.shares if share]
    return {
        "before": _spread(arm.before_s),
        "during": _spread(arm.during_s),
        "within_bound": sum(one <= bound_s for one in arm.during_s) / len(arm.during_s),
        "p99_within_bound": _spread(arm.during_s)["p99_ms"] <= bound_s * 1e3,
        "first_token_ms": {"median": median(arm.first_token_s) * 1e3, "each": [s * 1e3 for s in arm.first_token_s]},
        "steps_a_prompt": len(shares) / len(arm.first_token_s),
        "share_tokens": {"least": min(shares), "median": median(shares), "most": max(shares)},
        "least_shares": arm.engine.scheduler.share.num_least,
    }


def _spread(times_s: list[float]) -> dict[str, float]:
    """Of times per token, in ms."""
    p50, p99 = np.percentile(times_s, [50, 99], method="higher").tolist()
    return {"tokens": len(times_s), "p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "max_ms": max(times_s) * 1e3}


def _answer_tokens(bench: ShareBench) -> int:
    """Enough for the longest turn: every step with the least share."""
    return bench.context // _LEAST_SHARE + bench.before + bench.prompt // _LEAST_SHARE + 32


def _num_blocks(bench: ShareBench) -> int:
    rows = bench.rows * -(-(bench.context + _answer_tokens(bench)) // _BLOCK_SIZE)
    return rows + -(-(bench.prompt + 1) // _BLOCK_SIZE) + 1


def _check(bench: ShareBench, context_tokens: int) -> None:
    """Raise ConfigError for sizes that cannot be."""
    allowed = f"at most {context_tokens}, the model's context"
    if bench.prompt + 1 > context_tokens:
        raise ConfigError(f"prompt is {bench.prompt}; with one new token allowed: {allowed}")
    if (most := bench.context + _answer_tokens(bench)) > context_tokens:
        raise ConfigError(f"context is {bench.context}, so requests may grow to {most} tokens; allowed: {allowed}")
