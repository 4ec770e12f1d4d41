"""Arithmetic of blocks, runs and descriptors: what a push looks like to a transport. Pure; called by the sender.

Shape legend: N = number of descriptors, one per run of blocks that is contiguous on both sides.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopline.errors import TransferError
from loopline.identity import RegionManifest
from loopline.messages import PushRange


class PairedRun(NamedTuple):
    """`num_blocks` blocks that are consecutive in the source arena and in the target arena."""

    source_start: int
    target_start: int
    num_blocks: int


@dataclass(frozen=True, eq=False)
class Descriptors:
    """One side of a write. Row i is (address, number of bytes, device id); row i has as many bytes on both sides."""

    memory_kind: str  # "DRAM" | "VRAM"
    rows: NDArray[np.uint64]  # [N, 3]

    @property
    def num_bytes(self) -> int:
        return int(self.rows[:, 1].sum())

    def __len__(self) -> int:
        return len(self.rows)


def coalesce(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> tuple[PairedRun, ...]:
    """Group blocks into the fewest runs that are consecutive on both sides, in the order given.

    Raises ValueError when the two sides have different lengths.
    """
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks")
    runs: list[PairedRun] = []
    for source, target in zip(source_blocks, target_blocks, strict=True):
        if runs:
            start, target_start, count = runs[-1]
            if source == start + count and target == target_start + count:
                runs[-1] = PairedRun(start, target_start, count + 1)
                continue
        runs.append(PairedRun(source, target, 1))
    return tuple(runs)


def push_ranges(first_block: int, end_block: int, most_blocks: int, first_seq: int = 0) -> tuple[PushRange, ...]:
    """Blocks [first_block, end_block) of a request in pushes of at most `most_blocks`, numbered from `first_seq`."""
    starts = range(first_block, end_block, most_blocks)
    return tuple(
        PushRange(first_seq + index, start, min(most_blocks, end_block - start)) for index, start in enumerate(starts)
    )


def most_push_blocks(max_push_bytes: int | None, block_bytes: int) -> int:
    """Blocks of one push of at most `max_push_bytes`, or one block, if that is larger; None: no bound."""
    return max(1, (max_push_bytes or sys.maxsize) // block_bytes)


def paired_descriptors(
    source: RegionManifest, target: RegionManifest, runs: Sequence[PairedRun]
) -> tuple[Descriptors, Descriptors]:
    """Both sides of a push: one descriptor per run, [N, 3] each.

    Raises TransferError when a block is outside a region's total or the block sizes differ.
    """
    if source.block_bytes != target.block_bytes:
        raise TransferError(f"a block has {source.block_bytes} bytes here and {target.block_bytes} at the target")
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    return (
        _descriptors(source, table[:, 0], table[:, 2]),
        _descriptors(target, table[:, 1], table[:, 2]),
    )


def null_descriptors(region: RegionManifest, repeats: int) -> Descriptors:
    """The null block, `repeats` times: [repeats, 3]. What warm-up writes read and write."""
    rows = np.empty((repeats, 3), dtype=np.uint64)
    rows[:] = (region.base_address + region.null_block * region.block_bytes, region.block_bytes, region.device_id)
    return Descriptors(region.memory_kind, rows)


def _descriptors(region: RegionManifest, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Descriptors:
    """[N] starts and counts, in blocks, to [N, 3] bytes."""
    outside = (starts < 0) | (counts < 1) | (starts + counts > region.num_blocks)
    if outside.any():
        worst = int(np.argmax(outside))
        raise TransferError(
            f"blocks {int(starts[worst])}..{int(starts[worst] + counts[worst]) - 1} are not all inside "
            f"the region's {region.num_blocks} blocks"
        )
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0] = starts.astype(np.uint64) * np.uint64(region.block_bytes) + np.uint64(region.base_address)
    rows[:, 1] = counts.astype(np.uint64) * np.uint64(region.block_bytes)
    rows[:, 2] = region.device_id
    return Descriptors(region.memory_kind, rows)
