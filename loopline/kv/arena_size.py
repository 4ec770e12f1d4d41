"""How many blocks an arena gets where their number is not set: what an engine goes by with what it measured, and the
planner with estimates. No torch.
"""

from loopline.kv.layout import KVLayout
from loopline.settings import EngineSettings

SLACK_BYTES = 1536 << 20
"""Left free on CUDA beside what was measured: what the driver takes by itself, for its context, kernels and graphs."""


def arena_budget(settings: EngineSettings, budget_bytes: int) -> int:
    """Bytes of an arena where so many are left for it."""
    return budget_bytes if settings.max_arena_bytes is None else min(budget_bytes, settings.max_arena_bytes)


def blocks_that_fit(settings: EngineSettings, layout: KVLayout, context_tokens: int, budget_bytes: int) -> int:
    """Blocks of an arena without `num_blocks`, the null block not counted: as many as fit what is left, at most
    `max_arena_bytes`, and never more than `max_running` requests of the whole context could use. 0 where none fits."""
    useful = settings.scheduler.max_running * layout.blocks_for(context_tokens)
    return max(0, min(arena_budget(settings, budget_bytes) // layout.block_bytes - 1, useful))


def most_prompt_tokens(settings: EngineSettings, depth: int) -> int:
    """Most prompt tokens of one step whose requests all have this depth."""
    limits = settings.scheduler
    tokens = min(limits.max_running * limits.chunk_tokens, limits.max_token_loops // depth)
    return max(settings.block_size, tokens)
