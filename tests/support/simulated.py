"""A scheduler on a machine that takes a given time for each step: tokens are scripted, and so is time."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from loopline.kv.ledger import Ledger
from loopline.request import Request
from loopline.sched.plan import StepPlan
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.sched.share import TILES, RowSteps
from loopline.settings import SchedulerSettings
from tests.support.scheduling import ScriptedEngine

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What steps take, in seconds, without noise. Passes are padded."""

    decode_s: float = 0.010
    """A step of one tile of decode rows."""
    tile_s: float = 0.001
    """Each further one."""
    pass_s: float = 0.002
    """A pass over prompts, however few tokens it has."""
    token_loop_s: float = 20e-6
    """Each token-loop in it."""
    rows: RowSteps = TILES

    def step_s(self, plan: StepPlan) -> float:
        seconds = 0.0
        for segment in plan.segments:
            if segment.decode is not None:
                seconds += self.decode_s + (-(-len(segment.decode) // 8) - 1) * self.tile_s
            if segment.runs:
                seconds += self.prompt_s(sum(run.num_tokens for run in segment.runs), segment.last_loop)
        return seconds

    def prompt_s(self, num_tokens: int, depth: int) -> float:
        """What a pass adds."""
        return self.pass_s + self.rows.padded(num_tokens) * depth * self.token_loop_s

    @property
    def least_s(self) -> float:
        """A step of one tile of decode rows and the least share, at depth 4."""
        return self.decode_s + self.prompt_s(1, 4)


class Simulated:
    """Steps of `machine`; `noise` is asked once a step for what it is multiplied with."""

    def __init__(
        self,
        machine: Machine,
        settings: SchedulerSettings,
        noise: Callable[[], float] = lambda: 1.0,
        num_blocks: int = 4096,
    ) -> None:
        self.machine = machine
        self.ledger = Ledger(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.ledger, settings, UnifiedPolicy(), None, machine.rows)
        self.now_s = 0.0
        self.tokens_at_s: dict[str, list[float]] = {}
        self.shares: list[int] = []
        """Prompt tokens of every step with decode rows and prompts."""
        self._engine = ScriptedEngine(self.scheduler, settings.steps_ahead)
        self._noise = noise

    def submit(self, request: Request) -> None:
        assert self.scheduler.submit(request) is None

    def step(self) -> None:
        """Compute and commit one step, and note when its tokens came."""
        engine = self._engine
        while engine.may_submit and engine.submit() is not None:
            pass
        plan, _ = engine.in_flight[0]
        seconds = self.machine.step_s(plan) * self._noise()
        self.now_s += seconds
        self.scheduler.share.observe(plan, seconds)
        if plan.runs and plan.num_decode_rows:
            self.shares.append(sum(run.num_tokens for run in plan.runs))
        for row in engine.commit().rows:
            self.tokens_at_s.setdefault(row.request_id, []).append(self.now_s)

    def run_until(self, request_id: str, num_tokens: int = 1, most_steps: int = 20_000) -> None:
        """Step until that request has so many tokens."""
        for _ in range(most_steps):
            if len(self.tokens_at_s.get(request_id, ())) >= num_tokens:
                return
            self.step()
        raise AssertionError(f"{request_id} has {len(self.tokens_at_s.get(request_id, ()))} tokens of {num_tokens}")

    def gaps_s(self, request_id: str, since_s: float) -> list[float]:
        """A request's times per token, of its tokens after `since_s`, ascending."""
        times = self.tokens_at_s[request_id]
        return sorted(b - a for a, b in pairwise(times) if a >= since_s)


def p99(gaps_s: list[float]) -> float:
    """Of ascending values: that which one in a hundred passes at most."""
    return gaps_s[-1 - len(gaps_s) // 100]
