"""Ways to push one prompt's blocks, which differ in where the blocks lie and in how many descriptors say so. Pure.

Shape legend: N = descriptors of a push.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvtransfer.manifest import Descriptors, PairedRun, coalesce, paired_descriptors
from loopline.errors import InvariantBroken
from loopline.identity import BlockRun, RegionManifest
from loopline.kv.block_pool import BlockPool, ids_of


class PushTimes(NamedTuple):
    """Of one push, in seconds: building descriptors, inside `post_write`, and from its begin to the acknowledgement."""

    prep_s: float
    post_s: float
    total_s: float


@dataclass(eq=False)
class TransferArm:
    """A way to push. A failure is kept in `error` and ends this arm alone."""

    name: str
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    build: Callable[[], tuple[Descriptors, Descriptors]]
    """Both sides of the push, [N, 3] each; timed."""
    num_descriptors: int = 0
    num_bytes: int = 0
    checksum_ok: bool = False
    error: str | None = None
    pushes: list[PushTimes] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Medians over the rounds in milliseconds, and the rate that the whole push had."""
        figures: dict[str, Any] = {
            "descriptors": self.num_descriptors,
            "bytes": self.num_bytes,
            "checksum_ok": self.checksum_ok,
            "rounds": len(self.pushes),
        }
        if self.pushes:
            for name, times in zip(("prep_ms", "post_ms", "total_ms"), zip(*self.pushes, strict=True), strict=True):
                figures[name] = median(times) * 1e3
            totals = [one.total_s * 1e3 for one in self.pushes]
            figures |= {"min_ms": min(totals), "max_ms": max(totals), "rounds_ms": totals}
            figures["gb_per_s"] = self.num_bytes / figures["total_ms"] / 1e6
        return figures if self.error is None else figures | {"error": self.error}


def make_arms(source: RegionManifest, target: RegionManifest, num_blocks: int, num_parts: int) -> list[TransferArm]:
    """All arms for a prompt of `num_blocks` blocks; `num_parts`: pieces of a block, its planes' keys and values.

    The arenas have at least twice as many blocks as the prompt.
    """
    fresh_source, fresh_target = (fresh_blocks(region.num_blocks, num_blocks) for region in (source, target))
    holey_source = fragmented_blocks(source.num_blocks, num_blocks, first=0)
    holey_target = fragmented_blocks(target.num_blocks, num_blocks, first=1)
    whole = tuple(range(num_blocks))
    return [
        TransferArm("flat", whole, whole, lambda: paired_descriptors(source, target, [PairedRun(0, 0, num_blocks)])),
        _coalesced("fresh", source, target, fresh_source, fresh_target),
        _coalesced("fragmented", source, target, holey_source, holey_target),
        TransferArm(
            "uncoalesced",
            fresh_source,
            fresh_target,
            lambda: (
                part_descriptors(source, fresh_source, num_parts),
                part_descriptors(target, fresh_target, num_parts),
            ),
        ),
    ]


def fresh_blocks(total: int, count: int) -> tuple[int, ...]:
    """What a pool of which nothing was ever taken hands out."""
    return tuple(ids_of(_taken(BlockPool(total), count)))


def fragmented_blocks(total: int, count: int, first: int) -> tuple[int, ...]:
    """What a pool hands out in which every other block is taken; of the free ones `first`, 0 or 1, is the lowest."""
    pool = BlockPool(total)
    _taken(pool, total)
    pool.give_back(BlockRun(block, 1) for block in range(first, total, 2))
    return tuple(ids_of(_taken(pool, count)))


def part_descriptors(region: RegionManifest, blocks: Sequence[int], num_parts: int) -> Descriptors:
    """A descriptor for each of the `num_parts` equal pieces of each block: [blocks x num_parts, 3]."""
    part_bytes = region.block_bytes // num_parts
    starts = np.asarray(blocks, dtype=np.uint64)[:, None] * np.uint64(region.block_bytes)
    offsets = np.arange(num_parts, dtype=np.uint64)[None, :] * np.uint64(part_bytes)
    rows = np.empty((len(blocks) * num_parts, 3), dtype=np.uint64)
    rows[:, 0] = (starts + offsets).reshape(-1) + np.uint64(region.base_address)
    rows[:, 1] = part_bytes
    rows[:, 2] = region.device_id
    return Descriptors(region.memory_kind, rows)


def _coalesced(
    name: str, source: RegionManifest, target: RegionManifest, sources: tuple[int, ...], targets: tuple[int, ...]
) -> TransferArm:
    """As the sender builds a push."""
    return TransferArm(name, sources, targets, lambda: paired_descriptors(source, target, coalesce(sources, targets)))


def _taken(pool: BlockPool, count: int) -> tuple[BlockRun, ...]:
    runs = pool.take(count)
    if runs is None:
        raise InvariantBroken(f"{count} blocks of {pool.num_free} free ones")
    return runs
