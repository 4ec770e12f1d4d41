"""What an engine has computed, counted step by step; the engine counts, and a scrape reads from its own thread."""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from loopline.sched.plan import StepPlan
from loopline.telemetry.metrics import Histogram

_STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class TokenPhase(StrEnum):
    """Whether a token was known before its step."""

    PREFILL = "prefill"
    DECODE = "decode"


class Rows(StrEnum):
    """What a step had."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class PromptRate:
    """How fast prompts are computed: token-loops by the seconds of the steps that they were in, whatever else those
    computed, with the latest ones counting most. The first such step does not count, since it may have compiled and
    warmed what others find ready; nor is a rate known that no prompt has shown for a while: a worker that is left out
    for it could not show another."""

    _KEPT = 0.9  # of what earlier steps count, with each step

    KNOWN_FOR_S = 60.0

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s`: a clock in seconds."""
        self._now_s = now_s
        self._token_loops = self._seconds = 0.0
        self._is_warm = False
        self._latest_s = 0.0

    @property
    def token_loops_per_s(self) -> float:
        """0: not known."""
        if not self._seconds or self._now_s() - self._latest_s > self.KNOWN_FOR_S:
            return 0.0
        return self._token_loops / self._seconds

    def observe(self, token_loops: int, seconds: float) -> None:
        """A step with that many of prompts took `seconds`."""
        if not self._is_warm:
            self._is_warm = True
            return
        self._latest_s = self._now_s()
        self._token_loops = self._KEPT * self._token_loops + token_loops
        self._seconds = self._KEPT * self._seconds + seconds


class StepCounts:
    """Counts since the engine's start. Rows that turned out void count as well: they were computed."""

    def __init__(self) -> None:
        self.token_loops: Counter[str] = Counter()  # by phase
        self.tokens: Counter[str] = Counter()  # by phase
        self.seconds = {rows: Histogram(_STEP_S) for rows in Rows}
        self.failed_steps = 0
        self.prompt_rate = PromptRate()

    def computed(self, plan: StepPlan, taken_s: float) -> None:
        """A step was computed and committed."""
        prefill = decode = prompt_loops = 0
        for segment in plan.segments:
            depth = segment.last_loop - segment.first_loop
            rows = 0 if segment.decode is None else len(segment.decode)
            known = sum(run.num_tokens for run in segment.runs)
            decode, prefill, prompt_loops = decode + rows, prefill + known, prompt_loops + known * depth
            self.token_loops[TokenPhase.DECODE] += rows * depth
            self.token_loops[TokenPhase.PREFILL] += known * depth
        self.tokens[TokenPhase.DECODE] += decode
        self.tokens[TokenPhase.PREFILL] += prefill
        kind = Rows.MIXED if prefill and decode else Rows.PREFILL if prefill else Rows.DECODE
        self.seconds[kind].observe(taken_s)
        if prompt_loops:
            self.prompt_rate.observe(prompt_loops, taken_s)

    def failed(self) -> None:
        """A step could not be computed."""
        self.failed_steps += 1
