"""A packed prompt step: all rows of some runs through prelude, loops and coda in one pass.

On a CPU, and where a step has too many rows for the launches to matter, it runs as it comes; smaller steps on CUDA are
graphs, one for each padded number of rows, captured at one depth.

Shape letters: N rows with padding, E width, R runs, T tiles, B block-table entries, S sampled rows.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kernels.ops import TiledPlan, tiles_of
from loopline.engine.batch import PackedColumns, ToDevice, packed_columns, packed_rows
from loopline.engine.forward import Forward, Passed, Rows
from loopline.engine.staging import Staging
from loopline.kv.ledger import Ledger
from loopline.sched.plan import RowRun

logger = logging.getLogger(__name__)
_STEPS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Rows that graphs are captured for, close enough that padding costs little."""
_NUM_COLUMNS = 5


class PackedLoop(Protocol):
    """Runs packed prompt steps."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows that steps are padded to, ascending; beyond the last every tile of rows."""
        ...

    def run(self, runs: Sequence[RowRun], depth: int) -> Passed:
        """What comes of every row, in the order of the runs, padding behind them; written over by the next call."""
        ...

    def use_ledger(self, ledger: Ledger) -> None:
        """Read these books from now on."""
        ...


class EagerPacked:
    """Runs every step as it comes."""

    buckets: tuple[int, ...] = ()

    def __init__(self, forward: Forward, ledger: Ledger, to_device: ToDevice) -> None:
        self._forward = forward
        self._ledger = ledger
        self._to_device = to_device

    def run(self, runs: Sequence[RowRun], depth: int) -> Passed:
        """See `PackedLoop`."""
        arena = self._forward.arena
        null_slot = arena.null_block * arena.layout.block_size
        return self._forward.run(packed_rows(self.columns(runs), null_slot, self._to_device), depth)

    def use_ledger(self, ledger: Ledger) -> None:
        """See `PackedLoop`."""
        self._ledger = ledger

    def columns(self, runs: Sequence[RowRun]) -> PackedColumns:
        """The rows of runs, on the host."""
        return packed_columns(runs, self._ledger, self._forward.arena.null_block)


class GraphPacked:
    """Replays steps of up to `max_rows` rows at `depth`, and runs the others as they come."""

    def __init__(self, forward: Forward, eager: EagerPacked, *, max_rows: int, max_runs: int, depth: int) -> None:
        """`max_rows`: most rows of a step; graphs go no further than they gain anything. `max_runs`: most runs."""
        self.buckets = self.buckets_up_to(max_rows)
        self._eager = eager
        self._forward = forward
        self._depth = depth
        self._tile_rows = forward.model.ops.tile_rows(forward.model.dtype)
        self._max_runs = max_runs
        device, layout = forward.model.device, forward.arena.layout
        self._null_slot = forward.arena.null_block * layout.block_size
        rows, width = self.buckets[-1], layout.blocks_for(forward.model.spec.context_tokens)
        self._columns = torch.zeros(_NUM_COLUMNS * rows, dtype=torch.int64, device=device)
        self._tiles = torch.zeros((self._num_tiles(rows), 4), dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_runs, width), dtype=torch.int64, device=device)
        self._staging = Staging(
            (
                (_NUM_COLUMNS * rows, torch.int64),
                (self._tiles.numel(), torch.int32),
                (max_runs * width, torch.int64),
            )
        )
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Passed]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        forward.planes.reserve(rows)  # graphs hold its address

    @staticmethod
    def buckets_up_to(max_rows: int) -> tuple[int, ...]:
        """Numbers of rows that graphs are captured for, ascending."""
        most = min(max_rows, _STEPS[-1])
        return (*(size for size in _STEPS if size < most), most)

    def run(self, runs: Sequence[RowRun], depth: int) -> Passed:
        """See `PackedLoop`."""
        count = sum(run.num_tokens for run in runs)
        if depth != self._depth or count > self.buckets[-1] or len(runs) > self._max_runs:
            return self._eager.run(runs, depth)
        bucket = self.buckets[bisect_left(self.buckets, count)]
        if bucket not in self._graphs:
            logger.info("capturing the prompt graph of %d rows at depth %d", bucket, depth)
            self.capture(bucket)
        self._upload(self._eager.columns(runs), bucket)
        graph, passed = self._graphs[bucket]
        graph.replay()
        return passed

    def use_ledger(self, ledger: Ledger) -> None:
        """See `PackedLoop`."""
        self._eager.use_ledger(ledger)

    def capture(self, bucket: int) -> None:
        """Record the step of `bucket` rows. All its rows are padding: only the null block is written."""
        rows = self._rows(bucket)
        self._columns.zero_()
        self._tiles.zero_()
        rows.slots.fill_(self._null_slot)
        self._forward.run(rows, self._depth)  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            passed = self._forward.run(self._rows(bucket), self._depth)
        self._graphs[bucket] = (graph, passed)

    def capture_all(self) -> None:
        """Record every bucket, the largest first, so that the others fit its memory."""
        for bucket in reversed(self.buckets):
            self.capture(bucket)

    def _num_tiles(self, bucket: int) -> int:
        """Tiles of that many rows at most: each run may end with one that is not full."""
        return -(-bucket // self._tile_rows) + self._max_runs

    def _rows(self, bucket: int) -> Rows:
        columns = self._columns[: _NUM_COLUMNS * bucket].view(_NUM_COLUMNS, bucket)
        token_ids, positions, slots, seeds, zeros = columns.unbind(0)
        plan = TiledPlan(self._tiles[: self._num_tiles(bucket)], self._tables)
        return Rows(token_ids, positions, slots, seeds, zeros != 0, plan)

    def _upload(self, columns: PackedColumns, bucket: int) -> None:
        on_host = self._staging.open()
        size, count = _NUM_COLUMNS * bucket, len(columns.positions)
        flat = on_host[0][:size].view(_NUM_COLUMNS, bucket).numpy()
        parts = (
            (columns.token_ids, 0),
            (columns.positions, 0),
            (columns.slots, self._null_slot),
            (columns.seeds, 0),
            (columns.zeros, 1),
        )
        for row, (values, padding) in zip(flat, parts, strict=True):
            row[:count] = values
            row[count:] = padding
        num_tiles, (num_runs, width) = self._num_tiles(bucket), columns.tables.shape
        tiles = on_host[1][: 4 * num_tiles].view(num_tiles, 4)
        made = np.array(tiles_of(columns.runs, self._tile_rows), np.int32)
        tiles.numpy()[: len(made)] = made
        tiles.numpy()[len(made) :] = 0
        tables = on_host[2][: num_runs * width].view(num_runs, width)
        np.copyto(tables.numpy(), columns.tables)
        self._columns[:size].copy_(on_host[0][:size], non_blocking=True)
        self._tiles[:num_tiles].copy_(tiles, non_blocking=True)
        self._tables[:num_runs, :width].copy_(tables, non_blocking=True)
        self._staging.sent()
