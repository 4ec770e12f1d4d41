"""What a worker's arena holds: from num_blocks, or what of the device's memory is left for it."""

from dataclasses import dataclass

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.model_spec import DTYPE_BYTES
from loopline.settings import EngineSettings

SLACK_BYTES = 1536 << 20
"""What an engine on CUDA leaves free beside what it measured."""


@dataclass(frozen=True, kw_only=True)
class ArenaPlan:
    """Blocks of one worker's arena, the null block not counted; None where its memory is not known."""

    num_blocks: int | None
    arena_bytes: int | None
    tokens: int | None
    is_estimate: bool
    """Whether the count is from the profile's memory and not from num_blocks."""


def plan_arena(settings: EngineSettings, geometry: Geometry, profile: Profile) -> ArenaPlan:
    """The arena of a worker with these settings on a device of this profile."""
    if settings.num_blocks is not None:
        return _arena(settings.num_blocks, geometry, is_estimate=False)
    if profile.memory_bytes is None:
        return ArenaPlan(num_blocks=None, arena_bytes=None, tokens=None, is_estimate=True)
    budget = int(profile.memory_bytes * settings.memory_fraction)
    if settings.device != "cpu":
        budget -= geometry.stored_bytes + workspace_bytes(settings, geometry) + SLACK_BYTES
    return _arena(blocks_that_fit(settings, geometry, budget), geometry, is_estimate=True)


def blocks_that_fit(settings: EngineSettings, geometry: Geometry, budget_bytes: int) -> int:
    """Blocks of an arena in so many bytes, as an engine without num_blocks counts them; 0 where none fits."""
    layout = geometry.layout
    budget = budget_bytes if settings.max_arena_bytes is None else min(budget_bytes, settings.max_arena_bytes)
    useful = settings.scheduler.max_running * layout.blocks_for(geometry.spec.context_tokens)
    return max(0, min(budget // layout.block_bytes - 1, useful))


def workspace_bytes(settings: EngineSettings, geometry: Geometry) -> int:
    """An estimate of what the largest step takes: activations of its prompt tokens, and logits of its rows.

    The engine measures it at start; this counts a token's widest layer and six of its states.
    """
    spec, limits = geometry.spec, settings.scheduler
    tokens = max(settings.block_size, min(limits.max_running * limits.chunk_tokens, limits.max_token_loops))
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    width = 6 * spec.hidden_size + heads + 3 * spec.intermediate_size
    return tokens * width * DTYPE_BYTES[geometry.dtype] + 3 * limits.max_running * spec.vocab_size * 4


def _arena(num_blocks: int, geometry: Geometry, *, is_estimate: bool) -> ArenaPlan:
    layout = geometry.layout
    return ArenaPlan(
        num_blocks=num_blocks,
        arena_bytes=(num_blocks + 1) * layout.block_bytes,  # one takes padding's writes
        tokens=num_blocks * layout.block_size,
        is_estimate=is_estimate,
    )
