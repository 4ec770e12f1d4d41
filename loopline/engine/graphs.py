"""Decode steps as CUDA graphs: one for each padded number of rows (a bucket) and depth, captured once and replayed.

All graphs read the same input buffers and share one memory pool, so only one runs at a time, in stream order. Inputs
are double-buffered on the host: while the device runs a step the host writes the next one's into the other buffer, and
a copy on the stream brings them over.

Shape letters: D rows that were asked for, N rows of a bucket, B block-table entries.
"""

import logging
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loopline.engine.batch import DecodeColumns
from loopline.engine.decode_loop import (
    NO_POSITION,
    NUM_COLUMNS,
    DecodeInputs,
    RowOutput,
    compute,
    fill_columns,
    inputs_of,
)
from loopline.engine.forward import Forward
from loopline.engine.staging import Staging
from loopline.errors import InvariantBroken

logger = logging.getLogger(__name__)
_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def buckets_up_to(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for, ascending; the last is `max_rows`."""
    return (*(size for size in _BUCKETS if size < max_rows), max_rows)


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: RowOutput  # of N rows, with their tokens


class GraphDecode:
    """`DecodeLoop` on CUDA. `replays` False runs the same steps without graphs, to compare and to find faults."""

    def __init__(self, forward: Forward, max_rows: int, table_width: int, previous: Tensor, *, replays: bool) -> None:
        """`previous`: the one buffer of chosen tokens that every run will be given; graphs hold its address."""
        self.max_rows = max_rows
        self.buckets = buckets_up_to(max_rows)
        self._forward = forward
        self._replays = replays
        self._previous = previous
        device = previous.device
        layout = forward.arena.layout
        self._null_slot = forward.arena.null_block * layout.block_size
        self._columns = torch.zeros(NUM_COLUMNS * max_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros((max_rows, table_width), dtype=torch.int64, device=device)
        self._staging = Staging(((NUM_COLUMNS * max_rows, torch.int64), (max_rows * table_width, torch.int64)))
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, int], _Captured] = {}
        forward.planes.reserve(max_rows)  # graphs hold its address

    def run(self, columns: DecodeColumns, depth: int, previous: Tensor) -> RowOutput:
        """See `DecodeLoop`. At a depth that nothing was captured for, the step is launched kernel by kernel."""
        if previous is not self._previous:
            raise InvariantBroken("a graph reads the buffer of tokens that it was captured with, and no other")
        count = len(columns)
        bucket = self.buckets[bisect_left(self.buckets, count)]
        self._upload(columns, bucket)
        captured = self._graphs.get((bucket, depth))
        if captured is None:
            return self._compute(bucket, depth).rows(0, count)
        captured.graph.replay()
        return captured.output.rows(0, count)

    def run_largest(self, depth: int) -> None:
        """Take the memory that the largest bucket takes."""
        if self._replays:
            self.capture(self.buckets[-1], depth)
        else:
            self._compute(self.buckets[-1], depth)

    def capture(self, bucket: int, depth: int) -> None:
        """Record the step of `bucket` rows at `depth`. All its rows are padding: only the null block is written."""
        inputs = self._inputs(bucket)
        self._columns.zero_()
        inputs.positions.fill_(NO_POSITION)
        inputs.slots.fill_(self._null_slot)
        self._compute(bucket, depth)  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._compute(bucket, depth)
        self._graphs[bucket, depth] = _Captured(graph, output)

    def capture_all(self, depth: int) -> None:
        """Record every bucket at `depth`, the largest first, so that the others fit its memory."""
        if self._replays:
            for bucket in reversed(self.buckets):
                self.capture(bucket, depth)

    def _compute(self, bucket: int, depth: int) -> RowOutput:
        """What comes of the N rows in the input buffers, their tokens with it."""
        return compute(self._forward, self._inputs(bucket), self._previous, depth, chooses=True)

    def _inputs(self, bucket: int) -> DecodeInputs:
        return inputs_of(self._columns[: NUM_COLUMNS * bucket].view(NUM_COLUMNS, bucket), self._tables[:bucket])

    def _upload(self, columns: DecodeColumns, bucket: int) -> None:
        flat, wide = self._staging.open()
        size, (count, width) = NUM_COLUMNS * bucket, columns.tables.shape
        fill_columns(flat[:size].view(NUM_COLUMNS, bucket).numpy(), columns, self._null_slot)
        tables = wide[: count * width].view(count, width)
        np.copyto(tables.numpy(), columns.tables)
        self._columns[:size].copy_(flat[:size], non_blocking=True)
        self._tables[:count, :width].copy_(tables, non_blocking=True)
        self._staging.sent()
