"""The books' columns: which blocks each allocation has, and to which depth which of its positions were written.

One row per allocation, so that a step's decode rows are checked and noted in a few array operations. `begin_rows` and
`mark_rows` are exactly repeated `begin` and `mark` of one position. Called by the ledger only, which knows which rows
are alive.

**The written contract.** A step that would attend over positions [0, first) at depth d checks first that each of them
was written at least d deep, or is by then: begun by an earlier step, which the device runs before. It checks too that
the positions it writes have blocks and were never begun: what others may read is never written again. What has been
written, for all who read without a step, is what was marked.

    0 ............ written ............ begun ............ num_blocks * block_size
      marked           steps in flight       free to begin
"""

from collections.abc import Sequence

import numpy as np

from loopline.errors import WrittenContractBroken

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_FIRST_ROWS, _FIRST_WIDTH = 64, 64
_COUNTS = ("num_blocks", "written", "begun", "depth", "last_step", "published")


class BlockBooks:
    """Columns grown by doubling; rows of released allocations are used again.

    Invariants: written <= begun; `depth` is the smallest depth among a row's begun positions, so what the columns allow
    is allowed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.num_blocks = np.zeros(_FIRST_ROWS, np.int64)
        self.written = np.zeros(_FIRST_ROWS, np.int64)  # positions [0, written) have KV,
        self.begun = np.zeros(_FIRST_ROWS, np.int64)  # and those up to here will, once `last_step` has ended,
        self.depth = np.zeros(_FIRST_ROWS, np.int64)  # to this depth; see `mixed` for rows with several
        self.last_step = np.zeros(_FIRST_ROWS, np.int64)  # last step that may write the blocks
        self.published = np.zeros(_FIRST_ROWS, np.int64)  # leading blocks that others may read: never written again
        self.table = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), np.int64)  # block ids by position
        self.mixed: dict[int, list[tuple[int, int]]] = {}  # rows with several depths: (end position, depth), ascending
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))

    def take_row(self) -> int:
        if not self._free_rows:
            old = len(self.num_blocks)
            for name in _COUNTS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free_rows = list(range(2 * old - 1, old - 1, -1))
        row = self._free_rows.pop()
        for name in _COUNTS:
            getattr(self, name)[row] = 0
        return row

    def give_row(self, row: int) -> None:
        self.mixed.pop(row, None)
        self._free_rows.append(row)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        while end > self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        self.table[row, start:end] = block_ids
        self.num_blocks[row] = end

    def ids(self, row: int) -> IntArray:
        return self.table[row, : self.num_blocks[row]]

    def runs(self, row: int) -> list[tuple[int, int]]:
        """Begun runs of one row as (end position, depth)."""
        if row in self.mixed:
            return self.mixed[row]
        return [(int(self.begun[row]), int(self.depth[row]))] if self.begun[row] else []

    def set_written(self, row: int, end: int, depth: int) -> None:
        """Note that positions [0, end) of a row with nothing begun hold KV to `depth`."""
        self._extend(row, end, depth)
        self.written[row] = end

    def _extend(self, row: int, end: int, depth: int) -> None:
        """Note positions from the last begun one to `end` as begun at `depth`."""
        runs = list(self.runs(row))
        if runs and runs[-1][1] == depth:
            runs.pop()
        runs.append((end, depth))
        self.begun[row] = end
        self.depth[row] = min(one for _, one in runs)
        if len(runs) > 1:
            self.mixed[row] = runs

    # ---- the written contract

    def begin(self, row: int, first: int, count: int, depth: int, step: int, writes: bool) -> None:
        """Check one run of positions, and note that `step` writes them. Raises WrittenContractBroken."""
        end, written, begun = first + count, int(self.written[row]), int(self.begun[row])
        if self._begun_to(row, depth) < first:
            raise WrittenContractBroken(
                f"positions up to {first - 1} are needed at depth {depth}; "
                f"begun: {self.runs(row)}, of these written: {written}"
            )
        if end > self.num_blocks[row] * self._block_size:
            raise WrittenContractBroken(f"positions {first}..{end - 1} lie past {self.num_blocks[row]} blocks")
        if not writes:
            if self.written_to(row, depth) < end:
                raise WrittenContractBroken(f"positions {first}..{end - 1} are to be read and not written")
            return
        if first < begun:
            raise WrittenContractBroken(
                f"position {first} would be written again; {written} positions are, and {begun - written} more begun"
            )
        if written < first and self.last_step[row] >= step:
            raise WrittenContractBroken(
                f"positions up to {first - 1} are needed by step {step}; step {self.last_step[row]} writes them"
            )
        self._extend(row, end, depth)
        self.last_step[row] = max(self.last_step[row], step)

    def begin_rows(self, rows: IntArray, firsts: IntArray, depth: int, step: int) -> None:
        """`begin` with count 1 of each of `rows` at its position of `firsts`."""
        plain = (
            (self.begun[rows] == firsts)
            & (self.depth[rows] == depth)
            & (self.num_blocks[rows] * self._block_size > firsts)
            & ((self.written[rows] == firsts) | (self.last_step[rows] < step))
        )
        if self.mixed:
            plain &= ~np.isin(rows, list(self.mixed))
        if not plain.all():
            for index in np.flatnonzero(~plain):  # several depths, or a broken contract: one by one
                self.begin(int(rows[index]), int(firsts[index]), 1, depth, step, writes=True)
            rows = rows[plain]
        self.begun[rows] += 1
        self.last_step[rows] = np.maximum(self.last_step[rows], step)

    def mark(self, row: int, first: int, count: int, depth: int) -> None:
        """Note that positions [first, first + count) hold KV to `depth`; they follow what was written before, and
        those of them that were begun were begun at this depth."""
        written, begun, end = int(self.written[row]), int(self.begun[row]), first + count
        if first != written:
            raise WrittenContractBroken(f"position {first} is marked as written; {written} is the next that is not")
        depths = self._depths(row, first, min(end, begun))
        if depths - {depth}:
            raise WrittenContractBroken(
                f"positions {first}..{end - 1} are marked as written at depth {depth}; begun: {self.runs(row)}"
            )
        if end > begun:
            self._extend(row, end, depth)
        self.written[row] = end

    def mark_rows(self, rows: IntArray, firsts: IntArray, depth: int) -> None:
        """`mark` with count 1 of each of `rows` at its position of `firsts`."""
        plain = (self.written[rows] == firsts) & (self.begun[rows] > firsts) & (self.depth[rows] == depth)
        if self.mixed:
            plain &= ~np.isin(rows, list(self.mixed))
        if not plain.all():
            for index in np.flatnonzero(~plain):
                self.mark(int(rows[index]), int(firsts[index]), 1, depth)
            rows = rows[plain]
        self.written[rows] += 1

    def written_to(self, row: int, depth: int) -> int:
        """Positions from 0 on that were written at least `depth` deep without a gap."""
        return min(int(self.written[row]), self._begun_to(row, depth))

    def _begun_to(self, row: int, depth: int) -> int:
        """The same of positions that were begun."""
        end = 0
        for run_end, run_depth in self.runs(row):
            if run_depth < depth:
                break
            end = run_end
        return end

    def _depths(self, row: int, first: int, end: int) -> set[int]:
        """Depths at which positions [first, end) were begun."""
        found, start = set(), 0
        for run_end, run_depth in self.runs(row):
            if start < end and first < run_end:
                found.add(run_depth)
            start = run_end
        return found
