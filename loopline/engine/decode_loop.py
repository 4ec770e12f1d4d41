"""A decode step: one position each of many rows, through all loops, the head and the choice of tokens.

`compute` is the whole of it. On a CPU it runs as it stands; on CUDA `loopline.engine.graphs` captures it once for each
number of rows and replays it. Nothing in it waits for the device or looks at a value.

Shape letters: D rows that were asked for, N rows with padding, B block-table entries, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.ops import ROW_TILE, DecodePlan
from loopline.engine.batch import DecodeColumns
from loopline.engine.forward import Forward, Rows
from loopline.sched.plan import KNOWN

NO_POSITION = -1


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Rows as tensors on the model's device; int64 [N] unless said."""

    token_ids: Tensor
    sources: Tensor  # index into the previous step's tokens, or KNOWN
    positions: Tensor  # NO_POSITION for padding
    slots: Tensor
    seeds: Tensor
    zeros: Tensor  # 0 or 1
    temperature: Tensor  # float64
    block_tables: Tensor  # [N, B]


@dataclass(frozen=True, eq=False)
class RowOutput:
    """What came of D rows, on the device; a decode loop's is written over by its next run."""

    logits: Tensor  # [D, V] float32
    chosen: Tensor | None = None  # [D] int64 by temperature and seed alone; None: nobody chose yet
    gates: Tensor | None = None  # [D, T] float32 logits of the exit gate after each loop; None: not evaluated

    def rows(self, start: int, end: int) -> "RowOutput":
        """Rows [start, end), which are views."""
        chosen = None if self.chosen is None else self.chosen[start:end]
        return RowOutput(self.logits[start:end], chosen, None if self.gates is None else self.gates[start:end])

    def kept(self) -> "RowOutput":
        """A copy that no run writes over; of the tokens there is none."""
        return RowOutput(self.logits.clone(), None, None if self.gates is None else self.gates.clone())


class DecodeLoop(Protocol):
    """Runs decode rows; a row's bits depend on its own inputs and on the padded number of rows alone."""

    @property
    def max_rows(self) -> int:
        """Most rows of one run."""
        ...

    def run(self, columns: DecodeColumns, depth: int, previous: Tensor) -> RowOutput:
        """Submit D rows. `previous`: the tokens that the step before chose, of which rows may be a continuation."""
        ...


def compute(forward: Forward, inputs: DecodeInputs, previous: Tensor, depth: int, *, chooses: bool) -> RowOutput:
    """What comes of all N rows; their tokens only if it `chooses`."""
    positions = inputs.positions.clamp(min=0)
    carried = previous.index_select(0, inputs.sources.clamp(min=0))
    token_ids = torch.where(inputs.sources == KNOWN, inputs.token_ids, carried).clamp(
        min=0
    )  # a failed row has no token
    rows = Rows(
        token_ids=token_ids,
        positions=positions,
        slots=inputs.slots,
        seeds=inputs.seeds,
        zeros=inputs.zeros.bool(),
        plan=DecodePlan(inputs.positions, inputs.block_tables),
    )
    passed = forward.run(rows, depth)
    logits = forward.model.head(passed.hidden)
    if not chooses:
        return RowOutput(logits, None, passed.gates)
    temperature = inputs.temperature.float()
    chosen = forward.model.ops.choose_tokens(logits, temperature, inputs.seeds, positions + 1)
    return RowOutput(logits, chosen, passed.gates)


class EagerDecode:
    """Runs every step as it comes, on a CPU; rows are padded to a multiple of ROW_TILE."""

    def __init__(self, forward: Forward, max_rows: int) -> None:
        self._forward = forward
        self.max_rows = max_rows + -max_rows % ROW_TILE

    def run(self, columns: DecodeColumns, depth: int, previous: Tensor) -> RowOutput:
        """See `DecodeLoop`."""
        count = len(columns)
        num_rows = count + -count % ROW_TILE
        arena = self._forward.arena
        flat = np.empty((NUM_COLUMNS, num_rows), np.int64)
        fill_columns(flat, columns, arena.null_block * arena.layout.block_size)
        tables = np.pad(columns.tables, ((0, num_rows - count), (0, 0)), mode="edge")
        inputs = inputs_of(torch.from_numpy(flat), torch.from_numpy(tables))
        return compute(self._forward, inputs, previous, depth, chooses=False).rows(0, count)


NUM_COLUMNS = 7


def fill_columns(
    flat: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", columns: DecodeColumns, null_slot: int
) -> None:
    """Write the columns, and padding rows after them, into [NUM_COLUMNS, N]."""
    count = len(columns)
    request = columns.request
    parts = (
        (columns.token_ids, 0),
        (columns.sources, KNOWN),
        (columns.positions, NO_POSITION),
        (columns.slots, null_slot),
        (request.seeds, 0),
        (request.zeros, 1),
        (request.temperature.view(np.int64), 0),
    )
    for row, (values, padding) in zip(flat, parts, strict=True):
        row[:count] = values
        row[count:] = padding


def inputs_of(flat: Tensor, block_tables: Tensor) -> DecodeInputs:
    """The parts of int64 [NUM_COLUMNS, N] that `fill_columns` wrote."""
    token_ids, sources, positions, slots, seeds, zeros, temperature = flat.unbind(0)
    return DecodeInputs(
        token_ids, sources, positions, slots, seeds, zeros, temperature.view(torch.float64), block_tables
    )
