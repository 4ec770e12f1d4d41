"""A plan's segment as device tensors: which row computes what, where its KV goes, what it attends to.

Rows of a segment are its decode rows, then its runs one after the other, padded at the end to a multiple of ROW_TILE;
padding rows write the null block and are in no attention tile. Host work is a few array operations for all decode rows,
and a few more for each run.

Shape letters: N padded rows, D decode rows, G attention tiles of T rows, B blocks of the longest table, S sampled rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import ROW_TILE, AttentionPlan
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Ledger
from loopline.request import InitialState, SamplingParams
from loopline.sched.plan import DecodeRows, RowRun, Segment

ToDevice = Callable[[Any], Tensor]


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
    sampled_rows: Tensor  # [S] row of each token to choose, in the plan's order


@dataclass(frozen=True)
class _Part:
    """Columns of some rows, and their attention tiles."""

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    seeds: IntArray
    zeros: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"
    tile_rows: IntArray  # [g, T] within the part
    tile_positions: IntArray  # [g, T]
    tables: IntArray  # [g, B]
    sampled: IntArray  # rows of the part whose token is chosen


def build_batch(segment: Segment, ledger: Ledger, null_block: int, device: str) -> Batch:
    """Lay a segment out."""
    width = _table_width(segment, ledger.block_size)
    parts = [] if segment.decode is None else [_decode_part(segment.decode, ledger, width)]
    parts += [_run_part(run, ledger, width, null_block) for run in segment.runs]
    starts = np.cumsum([0, *(len(part.positions) for part in parts)])
    padding = -int(starts[-1]) % ROW_TILE
    zero = np.zeros(padding, np.int64)

    def to_device(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    def column(name: str, fill: Any) -> Tensor:
        return to_device(np.concatenate([*(getattr(part, name) for part in parts), fill]))

    def shifted(name: str) -> Tensor:
        pairs = zip(parts, starts[:-1], strict=True)
        return to_device(np.concatenate([getattr(part, name) + start for part, start in pairs]))

    return Batch(
        depth=segment.last_loop,
        token_ids=column("token_ids", zero),
        positions=column("positions", zero),
        slots=column("slots", np.full(padding, null_block * ledger.block_size)),
        seeds=column("seeds", zero),
        zeros=column("zeros", np.ones(padding, bool)),
        attention=AttentionPlan(
            tile_rows=shifted("tile_rows"),
            tile_positions=to_device(np.concatenate([part.tile_positions for part in parts])),
            block_tables=to_device(np.concatenate([part.tables for part in parts])),
        ),
        sampled_rows=shifted("sampled"),
    )


def _table_width(segment: Segment, block_size: int) -> int:
    """Blocks that the segment's longest row attends to."""
    last = [run.first_position + run.num_tokens - 1 for run in segment.runs]
    if segment.decode is not None:
        last.append(int(segment.decode.positions.max()))
    return max(last) // block_size + 1


def _decode_part(decode: DecodeRows, ledger: Ledger, width: int) -> _Part:
    """One position of each request: a tile each, with a single real row."""
    positions, count = decode.positions, len(decode)
    tables = ledger.block_tables(decode.book_rows, width)
    blocks = positions // ledger.block_size
    slots = tables[np.arange(count), blocks] * ledger.block_size + positions % ledger.block_size
    tables = np.where(np.arange(width) <= blocks[:, None], tables, tables[:, :1])  # past its end a row repeats a block
    tile_positions = np.full((count, ROW_TILE), -1, np.int64)
    tile_positions[:, 0] = positions
    rows = np.arange(count, dtype=np.int64)
    return _Part(
        token_ids=decode.token_ids,
        positions=positions,
        slots=slots,
        seeds=np.array([signed_seed(request.params.seed) for request in decode.requests], np.int64),
        zeros=np.array([_starts_from_zeros(request.params) for request in decode.requests], bool),
        tile_rows=np.repeat(rows[:, None], ROW_TILE, axis=1),
        tile_positions=tile_positions,
        tables=tables,
        sampled=rows,
    )


def _run_part(run: RowRun, ledger: Ledger, width: int, null_block: int) -> _Part:
    """Consecutive positions of one request, cut into tiles of ROW_TILE rows."""
    count, block_size = run.num_tokens, ledger.block_size
    positions = np.arange(run.first_position, run.first_position + count, dtype=np.int64)
    own = ledger.block_table(run.allocation)[: int(positions[-1]) // block_size + 1]
    table = np.concatenate([own, np.full(width - len(own), own[0])])
    if run.writes:
        slots = table[positions // block_size] * block_size + positions % block_size
    else:
        slots = np.full(count, null_block * block_size)
    num_tiles = -(-count // ROW_TILE)
    index = np.arange(num_tiles * ROW_TILE, dtype=np.int64).reshape(num_tiles, ROW_TILE)
    return _Part(
        token_ids=np.array(run.token_ids, np.int64),
        positions=positions,
        slots=slots,
        seeds=np.full(count, signed_seed(run.params.seed), np.int64),
        zeros=np.full(count, _starts_from_zeros(run.params)),
        tile_rows=np.where(index < count, index, 0),
        tile_positions=np.where(index < count, run.first_position + index, -1),
        tables=np.broadcast_to(table, (num_tiles, width)),
        sampled=np.array([] if run.sampling is None else [count - 1], np.int64),
    )


def _starts_from_zeros(params: SamplingParams) -> bool:
    return params.initial_state is InitialState.ZEROS


def signed_seed(seed: int) -> int:
    """The int64 with the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed
