"""What a worker's arena holds: from num_blocks, or what of the device's memory is left for it."""

from dataclasses import dataclass

from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.kv.arena_size import SLACK_BYTES, blocks_that_fit, most_prompt_tokens
from loopline.model_spec import DTYPE_BYTES
from loopline.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class ArenaPlan:
    """Blocks of one worker's arena, the null block not counted; None where its memory is not known."""

    num_blocks: int | None
    arena_bytes: int | None
    tokens: int | None
    left_bytes: int | None
    """What memory_fraction leaves for an arena beside weights and workspace, below 0 where they take more; None where
    num_blocks is set, or where memory is not known."""
    is_estimate: bool
    """Whether the count is from the profile's memory and not from num_blocks."""


def plan_arena(settings: EngineSettings, geometry: Geometry, profile: Profile) -> ArenaPlan:
    """The arena of a worker with these settings on a device of this profile."""
    if settings.num_blocks is not None:
        return _arena(settings.num_blocks, geometry, None)
    if profile.memory_bytes is None:
        return ArenaPlan(num_blocks=None, arena_bytes=None, tokens=None, left_bytes=None, is_estimate=True)
    budget = int(profile.memory_bytes * settings.memory_fraction)
    if settings.device != "cpu":
        budget -= geometry.stored_bytes + workspace_bytes(settings, geometry) + SLACK_BYTES
    num_blocks = blocks_that_fit(settings, geometry.layout, geometry.spec.context_tokens, budget)
    return _arena(num_blocks, geometry, budget)


def workspace_bytes(settings: EngineSettings, geometry: Geometry) -> int:
    """An estimate of what the largest step takes: activations of its prompt tokens, and logits of its rows.

    The engine measures it at start; this counts a token's widest layer and six of its states.
    """
    spec, tokens = geometry.spec, most_prompt_tokens(settings, 1)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    width = 6 * spec.hidden_size + heads + 3 * spec.intermediate_size
    return tokens * width * DTYPE_BYTES[geometry.dtype] + 3 * settings.scheduler.max_running * spec.vocab_size * 4


def _arena(num_blocks: int, geometry: Geometry, left_bytes: int | None) -> ArenaPlan:
    layout = geometry.layout
    return ArenaPlan(
        num_blocks=num_blocks,
        arena_bytes=(num_blocks + 1) * layout.block_bytes,  # one takes padding's writes
        tokens=num_blocks * layout.block_size,
        left_bytes=left_bytes,
        is_estimate=left_bytes is not None,
    )
