"""The books' columns: which blocks each allocation has, and to which depth which of its positions were written.

One row per allocation, so that a step's decode rows are checked and noted in a few array operations. `begin_rows` and
`mark_rows` are exactly repeated `begin` and `mark` of one position. Called by the ledger only, which knows which rows
are alive.

**The written contract.** A step that would attend over positions [0, first) at depth d checks first that all of them
were written at least d deep, and that the positions it writes have blocks and were never written: what others may read
is never written again.
"""

from collections.abc import Sequence

import numpy as np

from loopline.errors import WrittenContractBroken

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_FIRST_ROWS, _FIRST_WIDTH = 64, 64
_COUNTS = ("num_blocks", "written", "depth", "last_step", "published")


class BlockBooks:
    """Columns grown by doubling; rows of released allocations are used again.

    Invariant: `depth` is the smallest depth among a row's written positions, so what the columns allow is allowed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.num_blocks = np.zeros(_FIRST_ROWS, np.int64)
        self.written = np.zeros(_FIRST_ROWS, np.int64)  # positions [0, written) have KV ...
        self.depth = np.zeros(_FIRST_ROWS, np.int64)  # ... to this depth; see `mixed` for rows with several
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
        """Written runs of one row as (end position, depth)."""
        if row in self.mixed:
            return self.mixed[row]
        return [(int(self.written[row]), int(self.depth[row]))] if self.written[row] else []

    def set_runs(self, row: int, runs: list[tuple[int, int]]) -> None:
        """Replace what is known of one row; `runs` is not empty."""
        self.written[row] = runs[-1][0]
        self.depth[row] = min(depth for _, depth in runs)
        if len(runs) > 1:
            self.mixed[row] = runs
        else:
            self.mixed.pop(row, None)

    # ---- the written contract

    def begin(self, row: int, first: int, count: int, depth: int, step: int, writes: bool) -> None:
        """Check one run of positions, and note that `step` may write them. Raises WrittenContractBroken."""
        if self.written_to(row, depth) < first:
            raise WrittenContractBroken(
                f"positions up to {first - 1} are needed at depth {depth}; written: {self.runs(row)}"
            )
        if first + count > self.num_blocks[row] * self._block_size:
            raise WrittenContractBroken(
                f"positions {first}..{first + count - 1} lie past {self.num_blocks[row]} blocks"
            )
        if not writes:
            if self.written_to(row, depth) < first + count:
                raise WrittenContractBroken(f"positions {first}..{first + count - 1} are to be read and not written")
            return
        if first < self.written[row]:
            raise WrittenContractBroken(f"position {first} would be written again; {self.written[row]} positions are")
        self.last_step[row] = max(self.last_step[row], step)

    def begin_rows(self, rows: IntArray, firsts: IntArray, depth: int, step: int) -> None:
        """`begin` with count 1 of each of `rows` at its position of `firsts`."""
        fine = (
            (self.written[rows] == firsts)
            & (self.depth[rows] >= depth)
            & (self.num_blocks[rows] * self._block_size > firsts)
        )
        if not fine.all():
            for index in np.flatnonzero(~fine):  # several depths, or a broken contract: one by one
                self.begin(int(rows[index]), int(firsts[index]), 1, depth, step, writes=True)
        self.last_step[rows] = step

    def mark(self, row: int, first: int, count: int, depth: int) -> None:
        """Note that positions [first, first + count) hold KV to `depth`; they follow what was written before."""
        end = int(self.written[row])
        if first != end:
            raise WrittenContractBroken(f"position {first} is marked as written; {end} is the next that is not")
        runs = list(self.runs(row))
        if runs and runs[-1][1] == depth:
            runs.pop()
        self.set_runs(row, [*runs, (first + count, depth)])

    def mark_rows(self, rows: IntArray, firsts: IntArray, depth: int) -> None:
        """`mark` with count 1 of each of `rows` at its position of `firsts`."""
        plain = (self.written[rows] == firsts) & (self.depth[rows] == depth)
        if self.mixed:
            plain &= ~np.isin(rows, list(self.mixed))
        if plain.all():
            self.written[rows] += 1
            return
        self.written[rows[plain]] += 1
        for index in np.flatnonzero(~plain):
            self.mark(int(rows[index]), int(firsts[index]), 1, depth)

    def written_to(self, row: int, depth: int) -> int:
        """Positions from 0 on that were written at least `depth` deep without a gap."""
        end = 0
        for run_end, run_depth in self.runs(row):
            if run_depth < depth:
                break
            end = run_end
        return end
