"""What one prefill worker, one decode worker and one link can serve of a workload."""

import math
from dataclasses import dataclass

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.memory import ArenaPlan, plan_arena
from loopline.capacity.times import Time, decode_time, prefill_time
from loopline.config_notes import LEAST_PACKED_SHARE_TOKENS, LEAST_SHARE_TOKENS
from loopline.errors import ConfigError
from loopline.settings import EngineSettings, TransferSettings


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every request is like, and how many come."""

    prompt_tokens: int
    new_tokens: int
    rate: float | None = None
    """Requests a second; None: none is asked for."""

    def check(self, context_tokens: int) -> None:
        """Raise ConfigError for a workload that no cluster could run."""
        if self.prompt_tokens < 1:
            raise ConfigError(f"prompt tokens: {self.prompt_tokens}; allowed: 1 and above")
        if self.new_tokens < 2:
            raise ConfigError(f"new tokens: {self.new_tokens}; allowed: 2 and above")
        if self.prompt_tokens + self.new_tokens > context_tokens:
            total = self.prompt_tokens + self.new_tokens
            raise ConfigError(f"prompt and new tokens: {total}; allowed: up to the context, {context_tokens}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"rate: {self.rate}; allowed: above 0 requests a second")


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """One prefill worker: `prompts` side by side in passes of `chunk_tokens` tokens of each."""

    arena: ArenaPlan
    fits: int
    """Prompts that its blocks and max_running let in at once."""
    prompts: int
    chunk_tokens: int
    one_prompt: Time
    requests_per_s: float
    """0 where no prompt fits."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """One decode worker with `rows` answers at once, in the middle of their growth."""

    arena: ArenaPlan
    fits: int
    """Answers that its blocks and max_running let in at once."""
    rows: int
    """All of them: rows that decode run in any case, whatever `max_token_loops` is."""
    rows_limit: str
    """What holds `rows` down: "memory" or "max_running"."""
    one_row: Time
    full: Time
    tokens_per_s: float
    whole_tiles_per_s: float
    """The same without the rows past the last whole tile of the profile; 0 where there is no whole one."""
    requests_per_s: float
    """0 where no answer fits."""


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The link from one prefill worker."""

    link: str
    request_bytes: int
    pushes: int
    floor_s: float
    expected_s: float
    last_chunk_s: float
    """From the end of a prompt's last chunk until its KV is there: what the second token waits for beside a step."""
    thousand_tokens_s: dict[str, float]
    """Of each link of the profile: 1,000 tokens of one prompt."""
    requests_per_s: float


def plan_prefill(
    settings: EngineSettings, geometry: Geometry, profile: Profile, workload: Workload, *, answers: bool = False
) -> PrefillPlan:
    """A worker that computes prompts all the time, as many side by side as a step takes.

    `answers`: it generates their answers too, so each holds blocks for that, and a step carries no more prompt tokens
    than its share beside rows that decode.
    """
    limits, tokens = settings.scheduler, workload.prompt_tokens
    arena = plan_arena(settings, geometry, profile)
    fits = _answers(settings, geometry, arena, workload)
    if not answers:
        fits = _fitting(arena, geometry.layout.blocks_for(tokens), limits.max_running)
    step_tokens = _step_tokens(settings, geometry, fits if answers else 0)
    chunk = _chunk_tokens(min(limits.chunk_tokens, step_tokens), tokens, settings.block_size)
    prompts = max(1, min(fits, step_tokens // min(chunk, tokens)))
    together = prefill_time(profile, geometry, prompts, tokens, chunk)
    return PrefillPlan(
        arena=arena,
        fits=fits,
        prompts=prompts,
        chunk_tokens=chunk,
        one_prompt=prefill_time(profile, geometry, 1, tokens, chunk),
        requests_per_s=prompts / together.expected_s if fits else 0.0,
    )


def plan_decode(settings: EngineSettings, geometry: Geometry, profile: Profile, workload: Workload) -> DecodePlan:
    """A worker whose batch is always full. An answer's first token is not its own."""
    limits = settings.scheduler
    arena = plan_arena(settings, geometry, profile)
    fits = _answers(settings, geometry, arena, workload)
    full = decode_time(profile, geometry, max(1, fits), mean_context(workload))
    tokens_per_s, whole = fits / full.expected_s, fits - fits % profile.row_tile
    whole_s = decode_time(profile, geometry, max(1, whole), mean_context(workload)).expected_s
    return DecodePlan(
        arena=arena,
        fits=fits,
        rows=fits,
        rows_limit="memory" if fits < limits.max_running else "max_running",
        one_row=decode_time(profile, geometry, 1, mean_context(workload)),
        full=full,
        tokens_per_s=tokens_per_s,
        whole_tiles_per_s=whole / whole_s,
        requests_per_s=tokens_per_s / (workload.new_tokens - 1),
    )


def plan_transfer(
    settings: TransferSettings,
    geometry: Geometry,
    profile: Profile,
    workload: Workload,
    chunk_tokens: int,
    link: str | None,
) -> TransferPlan:
    """The way of one prompt's KV, in chunks of `chunk_tokens`. `link`: None, the profile's default. Raises ConfigError
    for a link that the profile has not."""
    name, chosen = profile.link(link)
    num_bytes, pushes = pushed(settings, geometry, workload.prompt_tokens, chunk_tokens)
    last = workload.prompt_tokens % chunk_tokens or min(chunk_tokens, workload.prompt_tokens)
    thousand = pushed(settings, geometry, 1000, chunk_tokens)
    expected_s = chosen.expected_s(num_bytes, pushes)
    return TransferPlan(
        link=name,
        request_bytes=num_bytes,
        pushes=pushes,
        floor_s=chosen.floor_s(num_bytes),
        expected_s=expected_s,
        last_chunk_s=chosen.expected_s(*pushed(settings, geometry, last, chunk_tokens)),
        thousand_tokens_s={key: one.expected_s(*thousand) for key, one in profile.links.items()},
        requests_per_s=1.0 / expected_s,
    )


def pushed(settings: TransferSettings, geometry: Geometry, tokens: int, chunk_tokens: int) -> tuple[int, int]:
    """(bytes, pushes) of a prompt: whole blocks, each chunk's full ones when it is done, cut to `max_push_bytes`."""
    layout, total, sent, pushes = geometry.layout, geometry.layout.blocks_for(tokens), 0, 0
    most = max(1, settings.max_push_bytes // layout.block_bytes)
    for start in range(0, tokens, chunk_tokens):
        end = start + chunk_tokens
        ready = total if end >= tokens else end // layout.block_size
        pushes += -(-(ready - sent) // most)
        sent = ready
    return total * layout.block_bytes, pushes


def mean_context(workload: Workload) -> int:
    """Tokens that a decode row sees, over its answer."""
    return workload.prompt_tokens + workload.new_tokens // 2


def most_tokens(workload: Workload) -> int:
    """Tokens of a request that ever need KV: the last one's is never read."""
    return workload.prompt_tokens + workload.new_tokens - 1


def _step_tokens(settings: EngineSettings, geometry: Geometry, rows: int) -> int:
    """Prompt tokens of one step, as `loopline.sched` grants them: what the step's token-loops leave beside so many rows
    that decode, there at most the share; and at least a pass of the fewest rows."""
    limits, loops = settings.scheduler, geometry.loops
    alone = limits.max_token_loops // loops
    if not rows:
        return alone or settings.block_size
    is_packed = settings.device.startswith("cuda") and settings.cuda_graphs and settings.prefill != "per_row"
    least = LEAST_PACKED_SHARE_TOKENS if is_packed else LEAST_SHARE_TOKENS
    beside = max(alone - rows, min(least, max(alone, settings.block_size)))
    return beside if limits.prefill_tokens_per_loop is None else min(beside, limits.prefill_tokens_per_loop)


def _chunk_tokens(most: int, prompt_tokens: int, block_size: int) -> int:
    """Tokens of a chunk: one that does not end its prompt ends on a block's border, where it reaches one."""
    return most if most >= prompt_tokens or most < block_size else most - most % block_size


def _answers(settings: EngineSettings, geometry: Geometry, arena: ArenaPlan, workload: Workload) -> int:
    """Answers that a worker lets in at once: each with blocks for its prompt and the promised part of its growth, and
    none that could never grow to its end."""
    limits, layout = settings.scheduler, geometry.layout
    if arena.num_blocks is not None and arena.num_blocks < layout.blocks_for(most_tokens(workload)):
        return 0
    promised = workload.prompt_tokens + int(limits.growth_share * (workload.new_tokens - 1) + 0.5)
    return _fitting(arena, layout.blocks_for(promised), limits.max_running)


def _fitting(arena: ArenaPlan, blocks_each: int, max_running: int) -> int:
    return max_running if arena.num_blocks is None else min(max_running, arena.num_blocks // blocks_each)
