"""What deciding costs on the host: time and calls of plan + commit, and of its parts against plainer ways to do them.

No model runs: results are scripted, so figures are of this machine's CPU alone. What is compared is interleaved, in
short turns, so that a machine's other load falls on all sides alike. `loopline bench host` shows what `measure` gives;
the comparisons themselves are `loopline.bench.naive`.
"""

import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any, TypeVar

from loopline.bench import naive
from loopline.bench.naive import BLOCK_SIZE, LOOPS, Race
from loopline.errors import InvariantBroken
from loopline.identity import Fingerprint
from loopline.kv.ledger import Ledger
from loopline.request import Request, SamplingParams
from loopline.sched.plan import StepPlan, StepResult
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import SchedulerSettings

T = TypeVar("T")

_TOKEN, _STOP_ID = 5, 2  # what every step gives, and what never comes
_PROMPT_TOKENS = 2 * BLOCK_SIZE + 1
_COUNTED_STEPS = BLOCK_SIZE  # in so many steps each row fills one block
_TURN_STEPS = 20
_POOL_ROWS, _POOL_ANSWER = 8, 128  # fits the smallest pool
_QUEUE_ROWS = 32
_LEAST_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured, and how often."""

    steps: int = 1000
    """Steps, or pairs of calls, behind each median."""
    rows: tuple[int, ...] = (1, 8, 32, 128, 256, 512)
    """Decode rows in a step."""
    pools: tuple[int, ...] = (10**2, 10**3, 10**4, 10**5, 10**6)
    """Blocks in the arena."""
    queues: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Requests that wait and do not fit."""
    prompts: tuple[int, ...] = (256, 2048, 16_384)
    """Tokens of a prompt that is tried again."""
    chunk_tokens: int = 2048
    argmax: tuple[tuple[int, int], ...] = ((32, 1024), (256, 1024), (32, 49_152), (256, 49_152))
    """(rows, vocabulary)."""
    sampled: tuple[tuple[int, int], ...] = ((32, 1024), (32, 49_152))
    """(rows, vocabulary); half of the rows are greedy."""
    race_s: float = 4.0
    """Seconds after which a comparison ends with the pairs that it has."""


QUICK = Sizes(
    steps=4,
    rows=(1, 8),
    pools=(100, 1000),
    queues=(10, 40),
    prompts=(64,),
    chunk_tokens=64,
    argmax=((4, 64),),
    sampled=((4, 64),),
    race_s=60.0,
)


def measure(sizes: Sizes, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All figures as one JSON object; times are medians in microseconds. `say` hears what is measured next."""
    report: dict[str, Any] = {"machine": machine()}
    num_steps = sizes.steps * 2 + _COUNTED_STEPS  # no host but those of the pools starts over
    say("steps by decode rows")
    hosts = {rows: Decoding(rows, num_steps) for rows in sizes.rows}
    report["steps"] = _step_figures("rows", hosts, sizes.steps)
    say("steps by pool size")
    hosts = {blocks: Decoding(_POOL_ROWS, _POOL_ANSWER, num_blocks=blocks) for blocks in sizes.pools}
    report["pools"] = _step_figures("blocks", hosts, sizes.steps)
    say("steps by waiting requests")
    hosts = {n: Decoding(_QUEUE_ROWS, num_steps, num_waiting=n) for n in sizes.queues}
    report["queues"] = _step_figures("waiting", hosts, sizes.steps)
    say("a chunk")
    report["chunk"] = _chunk_figures(sizes)
    report["arms"] = [_run(race, sizes, say) for race in _bookkeeping_races(sizes)]
    report["arms"] += _token_figures(sizes, say)
    return report


def machine() -> dict[str, Any]:
    """Where and when this runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# ---- whole steps


class Decoding:
    """A scheduler whose requests all decode. Starts over, untimed, before their answers end.

    Prompts differ in length so that each step some rows fill a block, as they would in service. The pool holds these
    requests and nothing more unless `num_blocks` says otherwise, so `num_waiting` further ones stay outside.
    """

    def __init__(self, num_rows: int, num_steps: int, num_blocks: int | None = None, num_waiting: int = 0) -> None:
        self._running = [_request(f"row{n}", n, _PROMPT_TOKENS + n % BLOCK_SIZE, num_steps) for n in range(num_rows)]
        self._waiting = [_request(f"waiting{n}", num_rows + n, _PROMPT_TOKENS, 1) for n in range(num_waiting)]
        self._num_blocks = num_blocks or sum(-(-one.max_kv_tokens // BLOCK_SIZE) for one in self._running)
        self._start()

    def step(self) -> int:
        """Nanoseconds that planning and committing one step took."""
        self._count_down()
        return _timed_step(self._scheduler)

    def count_step(self, counts: Counter[CodeType | None]) -> None:
        """Add the calls that planning and committing one step makes."""
        self._count_down()
        _counted_step(self._scheduler, counts)

    def _count_down(self) -> None:
        if not self._steps_left:
            self._start()
        self._steps_left -= 1

    def _start(self) -> None:
        self._scheduler = _scheduler(self._num_blocks, len(self._running) + len(self._waiting))
        for request in self._running:
            self._scheduler.submit(request)
        plan, result = _scripted(self._scheduler.plan())
        while plan.runs:  # rows whose prompt is done decode beside the prompts that are not
            self._scheduler.commit(plan, result)
            plan, result = _scripted(self._scheduler.plan())
        self._scheduler.commit(plan, result)
        for request in self._waiting:
            self._scheduler.submit(request)
        self._steps_left = self._running[0].params.max_tokens - plan.step - 1


def count_calls(call: Callable[[], T], counts: Counter[CodeType | None]) -> T:
    """Make a call, and count the calls inside it by code; of built-in functions all together, under None."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            counts[None] += 1

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        return call()
    finally:
        sys.setprofile(previous)


def _step_figures(name: str, hosts: Mapping[int, Decoding], num_steps: int) -> list[dict[str, Any]]:
    """Medians of hosts that take turns of a few steps; the first of a turn, with another's caches, is not timed."""
    taken_ns: dict[int, list[int]] = {size: [] for size in hosts}
    for first in range(0, num_steps, _TURN_STEPS):
        for size, host in hosts.items():
            host.step()
            taken_ns[size] += [host.step() for _ in range(min(_TURN_STEPS, num_steps - first))]
    figures = []
    for size, host in hosts.items():
        counts: Counter[CodeType | None] = Counter()
        for _ in range(_COUNTED_STEPS):
            host.count_step(counts)
        figures.append({name: size, "step_us": median(taken_ns[size]) / 1e3} | _calls(counts, _COUNTED_STEPS))
    return figures


def _calls(counts: Counter[CodeType | None], num_steps: int) -> dict[str, float]:
    built_in = counts[None]
    return {"python_calls": (counts.total() - built_in) / num_steps, "built_in_calls": built_in / num_steps}


def _chunk_figures(sizes: Sizes) -> dict[str, Any]:
    """One step that computes the second chunk of one prompt, and how often it calls the ledger for it."""
    counts: Counter[CodeType | None] = Counter()
    _counted_step(_second_chunk(sizes.chunk_tokens), counts)
    taken_ns = [_timed_step(_second_chunk(sizes.chunk_tokens)) for _ in range(sizes.steps)]
    ledger_calls = {
        "begin": counts[Ledger.begin_run.__code__] + counts[Ledger.begin_rows.__code__],
        "mark": counts[Ledger.mark_written.__code__] + counts[Ledger.mark_rows.__code__],
    }
    figures = {"tokens": sizes.chunk_tokens, "step_us": median(taken_ns) / 1e3, "ledger_calls": ledger_calls}
    return figures | _calls(counts, 1)


def _second_chunk(num_tokens: int) -> Scheduler:
    """A scheduler that computes the second of three chunks next."""
    request = _request("prompt", 0, 3 * num_tokens, 1)
    scheduler = _scheduler(-(-request.max_kv_tokens // BLOCK_SIZE), 1, num_tokens)
    scheduler.submit(request)
    scheduler.commit(*_scripted(scheduler.plan()))
    return scheduler


def _scheduler(num_blocks: int, num_requests: int, chunk_tokens: int = 256) -> Scheduler:
    settings = SchedulerSettings(
        max_running=num_requests + 1,
        max_waiting=num_requests,
        chunk_tokens=chunk_tokens,
        max_token_loops=num_requests * chunk_tokens * LOOPS,
    )
    return Scheduler(Ledger(num_blocks, BLOCK_SIZE), settings, UnifiedPolicy(), Fingerprint((("weights", "bench"),)))


def _request(name: str, number: int, prompt_tokens: int, max_tokens: int) -> Request:
    """A request whose first block is its own."""
    params = SamplingParams(max_tokens=max_tokens, stop_ids=(_STOP_ID,), loops=LOOPS)
    return Request(request_id=name, prompt_ids=(10 + number, *[_TOKEN] * (prompt_tokens - 1)), params=params)


def _scripted(plan: StepPlan | None) -> tuple[StepPlan, StepResult]:
    """A plan and its result: the same token for every row that asks for one."""
    if plan is None:
        raise InvariantBroken("a scheduler with work for every step planned none")
    num_tokens = plan.num_decode_rows + sum(run.sampling is not None for run in plan.runs)
    return plan, StepResult(plan.step, [_TOKEN] * num_tokens)


def _timed_step(scheduler: Scheduler) -> int:
    start = time.perf_counter_ns()
    planned = scheduler.plan()
    middle = time.perf_counter_ns()
    plan, result = _scripted(planned)
    committing = time.perf_counter_ns()
    scheduler.commit(plan, result)
    return middle - start + time.perf_counter_ns() - committing


def _counted_step(scheduler: Scheduler, counts: Counter[CodeType | None]) -> None:
    plan, result = _scripted(count_calls(scheduler.plan, counts))
    count_calls(partial(scheduler.commit, plan, result), counts)


# ---- parts of a step, against their naive sides


def _run(race: Race, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Medians of calls in turn. Raises InvariantBroken if the two sides do not agree."""
    say(f"{race.arm}, {race.size}")
    if race.naive() != race.ours():
        raise InvariantBroken(f"the two sides of {race.arm!r} do not give the same")
    naive_ns: list[int] = []
    ours_ns: list[float] = []
    ends_at = time.monotonic() + sizes.race_s
    while len(naive_ns) < sizes.steps and (len(naive_ns) < _LEAST_PAIRS or time.monotonic() < ends_at):
        start = time.perf_counter_ns()
        race.naive()
        middle = time.perf_counter_ns()
        for _ in range(race.ours_calls):
            race.ours()
        ours_ns.append((time.perf_counter_ns() - middle) / race.ours_calls)
        naive_ns.append(middle - start)
    naive_us, ours_us = median(naive_ns) / 1e3, median(ours_ns) / 1e3
    return {
        "arm": race.arm,
        "size": race.size,
        "pairs": len(naive_ns),
        "naive_us": naive_us,
        "ours_us": ours_us,
        "ratio": naive_us / ours_us,
    }


def _bookkeeping_races(sizes: Sizes) -> Iterator[Race]:
    yield from map(naive.rehash, sizes.prompts)
    yield from map(naive.free_count, sizes.pools)
    for num_rows in sizes.rows:
        yield naive.rows(num_rows, sizes.steps)
    yield from map(naive.promise, sizes.rows)
    yield naive.chunk(sizes.chunk_tokens)


def _token_figures(sizes: Sizes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """What choosing tokens costs, on one torch thread as in an engine. The only part that loads torch."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        races = [naive.argmax(*size) for size in sizes.argmax] + [naive.sampled(*size) for size in sizes.sampled]
        return [_run(race, sizes, say) for race in races]
    finally:
        torch.set_num_threads(num_threads)
