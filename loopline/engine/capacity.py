"""How many blocks an arena gets: what was asked for, or what memory allows."""

import os

import torch

from loopline.errors import ConfigError
from loopline.kv.arena_size import arena_budget, blocks_that_fit
from loopline.kv.layout import KVLayout
from loopline.settings import EngineSettings


def free_bytes(device: str) -> int:
    """Memory that could be allocated on `device` now, in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def blocks_for_arena(settings: EngineSettings, layout: KVLayout, context_tokens: int, budget_bytes: int) -> int:
    """Blocks of the arena, the null block not counted. Raises ConfigError if not even one fits.

    Without `num_blocks`: what `blocks_that_fit` finds in `budget_bytes`.
    """
    if settings.num_blocks is not None:
        if settings.num_blocks < 1:
            raise ConfigError(f"num_blocks is {settings.num_blocks}; allowed: 1 and above")
        return settings.num_blocks
    num_blocks = blocks_that_fit(settings, layout, context_tokens, budget_bytes)
    if num_blocks < 1:
        budget = arena_budget(settings, budget_bytes)
        raise ConfigError(
            f"{budget} bytes of {settings.device} memory are left for the arena and hold no block of "
            f"{layout.block_bytes} bytes; lower max_loops, block_size, max_running or chunk_tokens, or raise "
            "memory_fraction or max_arena_bytes"
        )
    return num_blocks
