"""Time on a device: groups of calls by its own events, arms that take turns, and the two rates that floors are made of.

`loopline.bench.engine` and its parts call it.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

_GROUP_S = 0.4
"""A group has fewer calls than asked for where they would take longer."""
_ERROR_CHARS = 600
_ERROR_FRAMES = -6


@dataclass(eq=False)
class Arm:
    """One way to do what others do too. A failure is kept in `error` and ends this arm alone."""

    name: str
    run: Callable[[], object]
    """Submits the work once; on CUDA it need not wait for it."""
    most_rounds: int | None = None
    error: str | None = None
    round_s: list[float] = field(default_factory=list)  # seconds a call, of each round
    num_calls: int = 0  # of each group

    def report(self) -> dict[str, Any]:
        """Milliseconds a call: median, least and most over the rounds."""
        times = [one * 1e3 for one in self.round_s]
        figures: dict[str, Any] = {"rounds": len(times), "calls": self.num_calls}
        if times:
            figures |= {"median_ms": median(times), "min_ms": min(times), "max_ms": max(times), "rounds_ms": times}
        return figures if self.error is None else figures | {"error": self.error}


class Timer:
    """Times calls on one device: CUDA's by events around the group, a CPU's by this process's time on the processor,
    which other work on the machine does not lengthen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._clock = time.perf_counter if self._is_cuda else time.process_time

    def synchronize(self) -> None:
        """Wait for all that was submitted."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def clock_s(self, run: Callable[[], object]) -> float:
        """Seconds of one call, until the device is done with it."""
        self.synchronize()
        start = self._clock()
        run()
        self.synchronize()
        return self._clock() - start

    def group_s(self, run: Callable[[], object], count: int) -> float:
        """Seconds a call of `count` calls, one submitted behind the other."""
        if not self._is_cuda:
            return self.clock_s(lambda: [run() for _ in range(count)]) / count
        self.synchronize()
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's stubs leave it out
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            run()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """torch on one thread, as an engine on a CPU has it; on CUDA nothing changes."""
    num_threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(num_threads)


def interleave(arms: Sequence[Arm], timer: Timer, rounds: int, calls: int) -> None:
    """Let arms take turns, a group of `calls` each in every round; before each group one call that is not timed, which
    also says how many calls of a slow arm make a group.
    """
    for number in range(rounds):
        for arm in arms:
            if arm.error is None and (arm.most_rounds is None or number < arm.most_rounds):
                _turn(arm, timer, calls)


def _turn(arm: Arm, timer: Timer, calls: int) -> None:
    try:
        untimed_s = timer.clock_s(arm.run)
        if not arm.num_calls:
            arm.num_calls = max(1, min(calls, int(_GROUP_S / max(untimed_s, 1e-9))))
        arm.round_s.append(timer.group_s(arm.run, arm.num_calls))
    except Exception as error:  # whatever it is, the other arms' figures stand
        arm.error = error_text(error)


def error_text(error: Exception) -> str:
    """What a report keeps of a failure; standard error gets where it came from."""
    sys.stderr.write("".join(traceback.format_exception(error, limit=_ERROR_FRAMES)))
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARS]


@dataclass(frozen=True)
class Rates:
    """What the device was measured to do, in the same run as what is set against it."""

    copy_bytes_per_s: float
    """Read and written, each counted."""
    matmul_flops_per_s: float


def measure_rates(timer: Timer, dtype: torch.dtype) -> Rates:
    """A large copy, and a large square product in `dtype`; medians of several."""
    num_bytes, width = (4 << 30, 8192) if timer.device.type == "cuda" else (32 << 20, 256)
    return Rates(2 * num_bytes / _copy_s(timer, num_bytes), 2 * width**3 / _matmul_s(timer, width, dtype))


def _copy_s(timer: Timer, num_bytes: int) -> float:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    return _median_s(timer, lambda: target.copy_(source), 4)


def _matmul_s(timer: Timer, width: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn((width, width), device=timer.device).to(dtype) for _ in range(2))
    return _median_s(timer, lambda: a @ b, 10)


def _median_s(timer: Timer, run: Callable[[], object], count: int) -> float:
    timer.group_s(run, 2)
    return median(timer.group_s(run, count) for _ in range(5))
