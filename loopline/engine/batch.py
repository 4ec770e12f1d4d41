"""A plan's segment as device tensors: which row computes what, where its KV goes, what it attends to.

Rows of a segment are its runs one after the other, padded at the end to a multiple of ROW_TILE; padding rows write the
null block and are in no attention tile. Shape letters: N padded rows, G attention tiles of T rows, B blocks of the
longest table, S sampled rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import ROW_TILE, AttentionPlan
from loopline.kv.ledger import Allocation
from loopline.request import InitialState
from loopline.sched.plan import RowRun, Segment

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Batch:
    """One segment's inputs. All tensors are int64 unless said."""

    depth: int
    token_ids: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [N] block * block_size + offset
    seeds: Tensor  # [N] the request seed's 64 bits
    zeros: Tensor  # [N] bool: rows whose initial state is all zeros
    attention: AttentionPlan
    sampled_rows: Tensor  # [S] row of each token to choose, in the order of runs


def build_batch(
    segment: Segment,
    block_ids: Callable[[Allocation], Sequence[int]],
    block_size: int,
    null_block: int,
    device: str,
) -> Batch:
    """Lay a segment out. Host work: one pass over its runs, nothing per row."""
    parts = [_run_arrays(run, block_ids(run.allocation), block_size) for run in segment.runs]
    starts = np.cumsum([0, *(run.num_tokens for run in segment.runs)])
    num_rows = int(starts[-1])
    padding = -num_rows % ROW_TILE
    zero = np.zeros(padding, np.int64)
    token_ids = np.concatenate([*(part.token_ids for part in parts), zero])
    positions = np.concatenate([*(part.positions for part in parts), zero])
    slots = np.concatenate([*(part.slots for part in parts), np.full(padding, null_block * block_size)])
    counts = [run.num_tokens for run in segment.runs]
    seeds = np.concatenate([np.repeat([_signed(run.params.seed) for run in segment.runs], counts), zero])
    is_zero = [run.params.initial_state is InitialState.ZEROS for run in segment.runs]
    zeros = np.concatenate([np.repeat(is_zero, counts), np.ones(padding, bool)])
    sampled = [int(end) - 1 for run, end in zip(segment.runs, starts[1:], strict=True) if run.sampling is not None]

    def to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return Batch(
        depth=segment.last_loop,
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        slots=to_device(slots),
        seeds=to_device(seeds.astype(np.int64)),
        zeros=to_device(zeros.astype(bool)),
        attention=_attention_plan(segment.runs, starts, block_ids, block_size, to_device),
        sampled_rows=to_device(np.array(sampled, np.int64)),
    )


@dataclass(frozen=True)
class _RunArrays:
    token_ids: IntArray
    positions: IntArray
    slots: IntArray


def _run_arrays(run: RowRun, block_ids: Sequence[int], block_size: int) -> _RunArrays:
    end = run.first_position + run.num_tokens
    positions = np.arange(run.first_position, end, dtype=np.int64)
    first_block = run.first_position // block_size
    table = np.array(block_ids[first_block : (end - 1) // block_size + 1], np.int64)
    slots = table[positions // block_size - first_block] * block_size + positions % block_size
    return _RunArrays(np.array(run.token_ids, np.int64), positions, slots)


def _attention_plan(
    runs: Sequence[RowRun],
    starts: IntArray,
    block_ids: Callable[[Allocation], Sequence[int]],
    block_size: int,
    to_device: Callable[[IntArray], Tensor],
) -> AttentionPlan:
    """Cut each run into tiles of ROW_TILE consecutive rows; a tile's table reaches its own last position."""
    widths = [(run.first_position + run.num_tokens - 1) // block_size + 1 for run in runs]
    tables, rows, positions = [], [], []
    offsets = np.arange(ROW_TILE, dtype=np.int64)
    for run, start, width in zip(runs, starts[:-1], widths, strict=True):
        ids = np.zeros(max(widths), np.int64)
        ids[:width] = block_ids(run.allocation)[:width]
        ids[width:] = ids[0]
        num_tiles = -(-run.num_tokens // ROW_TILE)
        index = np.arange(num_tiles, dtype=np.int64)[:, None] * ROW_TILE + offsets  # [tiles, T] row within the run
        real = index < run.num_tokens
        rows.append(start + np.where(real, index, 0))
        positions.append(np.where(real, run.first_position + index, -1))
        tables.append(np.broadcast_to(ids, (num_tiles, len(ids))))
    return AttentionPlan(
        tile_rows=to_device(np.concatenate(rows)),
        tile_positions=to_device(np.concatenate(positions)),
        block_tables=to_device(np.concatenate(tables)),
    )


def _signed(seed: int) -> int:
    """The int64 with the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed
