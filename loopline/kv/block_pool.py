"""Free blocks, kept as maximal runs so that an allocation is a few long runs and a handoff a few descriptors.

Knows nothing of requests, tokens or writers; `loopline.kv.ledger` does, and is the only caller.

Every free run is known by its start and by its end, and lies in a bucket by size class (bit length), so that taking and
giving back cost the number of runs touched, whatever the pool's size. Order inside a bucket is insertion order: the
same calls give the same blocks.
"""

from collections.abc import Iterable

from loopline.errors import InvariantBroken
from loopline.identity import BlockRun


class BlockPool:
    """Blocks 0..total-1. Invariant: free runs are disjoint, maximal, and their sizes sum to `num_free`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_free = 0
        self._size_at: dict[int, int] = {}  # start -> count
        self._start_before: dict[int, int] = {}  # end (exclusive) -> start
        self._buckets: list[dict[int, None]] = [{} for _ in range(total.bit_length() + 1)]
        if total:
            self._insert(0, total)
            self.num_free = total

    def take(self, count: int) -> tuple[BlockRun, ...] | None:
        """`count` blocks in few runs: the smallest size class that surely has one run of that length, else the largest
        runs. None if fewer are free; nothing is taken then."""
        if count > self.num_free:
            return None
        taken: list[BlockRun] = []
        while count > 0:
            start = self._find(count)
            size = min(count, self._size_at[start])
            self._cut(start, size)
            taken.append(BlockRun(start, size))
            count -= size
        return tuple(taken)

    def give_back(self, runs: Iterable[BlockRun]) -> None:
        """Make blocks free again; neighbours merge. What borders on itself being free already raises; audits see the
        rest."""
        for run in runs:
            self._merge_in(run.start, run.count)

    def free_runs(self) -> list[BlockRun]:
        """All free runs by start; for audits and reports, not for the hot path."""
        return [BlockRun(start, self._size_at[start]) for start in sorted(self._size_at)]

    def _find(self, count: int) -> int:
        """Start of the run to take from; some run exists."""
        own_class = count.bit_length()
        for start in self._buckets[own_class] if own_class < len(self._buckets) else ():
            if self._size_at[start] >= count:
                return start
            break  # one look at the own class keeps this O(1); the next class fits for sure
        for bucket in self._buckets[own_class + 1 :]:
            for start in bucket:
                return start
        for bucket in reversed(self._buckets[: own_class + 1]):
            for start in bucket:
                return start
        raise InvariantBroken(f"{self.num_free} blocks are counted as free and no run holds any")

    def _cut(self, start: int, size: int) -> None:
        whole = self._size_at[start]
        self._remove(start)
        if whole > size:
            self._insert(start + size, whole - size)
        self.num_free -= size

    def _merge_in(self, start: int, count: int) -> None:
        end = start + count
        if count < 1 or start < 0 or end > self.total or start in self._size_at or end in self._start_before:
            raise InvariantBroken(f"blocks {start}..{end - 1} of {self.total} cannot become free")
        self.num_free += count
        before = self._start_before.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if end in self._size_at:
            after = self._size_at[end]
            self._remove(end)
            end += after
        self._insert(start, end - start)

    def _insert(self, start: int, count: int) -> None:
        self._size_at[start] = count
        self._start_before[start + count] = start
        self._buckets[count.bit_length()][start] = None

    def _remove(self, start: int) -> None:
        count = self._size_at.pop(start)
        del self._start_before[start + count]
        del self._buckets[count.bit_length()][start]


def runs_of(block_ids: Iterable[int]) -> tuple[BlockRun, ...]:
    """Group block ids, in their order, into runs of consecutive ids."""
    runs: list[BlockRun] = []
    start = count = 0
    for block_id in block_ids:
        if count and block_id == start + count:
            count += 1
            continue
        if count:
            runs.append(BlockRun(start, count))
        start, count = block_id, 1
    if count:
        runs.append(BlockRun(start, count))
    return tuple(runs)


def ids_of(runs: Iterable[BlockRun]) -> list[int]:
    """The block ids of runs, in order."""
    return [block_id for run in runs for block_id in range(run.start, run.start + run.count)]
