"""The whole core with its host work done the naive way, for an engine to run on: `loopline.bench.naive` has the parts.

The decisions are the same, and so are the tokens. What is naive: digests are hashed again at every attempt to let a
request in and at every block that is to be found; nothing is remembered of attempts that failed; free blocks are
counted by a look at each block, promises by a sum over all who run; the ledger is called once for each decode row, and
once for each token of a chunk. Nothing here serves.
"""

from collections.abc import Collection

from loopline.bench.naive import begin_each, count_free, mark_each
from loopline.identity import Fingerprint
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Allocation, Ledger
from loopline.sched.admission import Admission
from loopline.sched.entry import Entry
from loopline.sched.policy import RolePolicy
from loopline.sched.scheduler import Scheduler
from loopline.sched.share import RowSteps
from loopline.settings import SchedulerSettings


class NaiveLedger(Ledger):
    """Invariant: `_num_holders` has for every block who holds it, 0 where it is free or only cached."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self._num_holders = [0] * total_blocks
        super().__init__(total_blocks, block_size)

    @property
    def num_free_blocks(self) -> int:
        """Counted by a scan."""
        return count_free(self._num_holders)

    @property
    def num_promised_blocks(self) -> int:
        """Summed over all that live."""
        return sum(allocation._promised for allocation in self._live)

    def begin_rows(self, rows: IntArray, firsts: IntArray, depth: int, step: int) -> None:
        """One call a row."""
        begin_each(self, self._allocations_of(rows), firsts.tolist(), depth, step)

    def mark_rows(self, rows: IntArray, firsts: IntArray, depth: int) -> None:
        """One call a row."""
        mark_each(self, self._allocations_of(rows), firsts.tolist(), depth)

    def begin_run(
        self, allocation: Allocation, first: int, count: int, depth: int, step: int, writes: bool = True
    ) -> None:
        """A look at every token's block, one call each."""
        for position in range(first, first + count):
            self._check_token(allocation, position)
        super().begin_run(allocation, first, count, depth, step, writes)

    def mark_written(self, allocation: Allocation, first: int, count: int, depth: int) -> None:
        """One call a token."""
        for position in range(first, first + count):
            super().mark_written(allocation, position, 1, depth)

    def _check_token(self, allocation: Allocation, position: int) -> int:
        self._check_live(allocation)
        return int(self._books.ids(allocation._row)[position // self.block_size])

    def _allocations_of(self, rows: IntArray) -> list[Allocation]:
        by_row = {allocation._row: allocation for allocation in self._live}
        return [by_row[row] for row in rows.tolist()]

    def _take(self, count: int) -> list[int]:
        return [self._held(block_id, 1) for block_id in super()._take(count)]

    def _give_back(self, block_ids: list[int]) -> None:
        super()._give_back([self._held(block_id, -1) for block_id in block_ids])

    def _pin(self, block_id: int) -> None:
        super()._pin(self._held(block_id, 1))

    def _unpin(self, block_id: int) -> None:
        super()._unpin(self._held(block_id, -1))

    def _held(self, block_id: int, more: int) -> int:
        self._num_holders[block_id] += more
        return block_id


class NaiveAdmission(Admission):
    """Looks at who waits at every tick, and hashes what it looks at."""

    def admit(self, num_running: int, running: Collection[str] = ()) -> list[Entry]:
        """See `Admission`."""
        self._stuck_at = None
        return super().admit(num_running, running)

    def hash_again(self, entry: Entry) -> None:
        """Digests of an entry's whole blocks, from its tokens."""
        if entry.digests is not None:
            digests = self.entry_of(entry.request).digests
            if digests is not None:
                digests.extend(entry.token_ids)
            entry.digests = digests

    def _waits_for_prefix(self, entry: Entry) -> bool:
        self.hash_again(entry)
        return super()._waits_for_prefix(entry)


class NaiveScheduler(Scheduler):
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        settings: SchedulerSettings,
        policy: RolePolicy,
        prefix_group: Fingerprint | None,
        prompt_rows: RowSteps,
    ) -> None:
        """As Scheduler; `ledger` may be any."""
        super().__init__(ledger, settings, policy, prefix_group, prompt_rows)
        group = prefix_group if policy.shares_prefixes else None
        self._naive = self._admission = NaiveAdmission(ledger, settings, policy, group)
        self.prefix_counts = self._naive.prefix_counts

    def _publish(self, entry: Entry) -> None:
        self._naive.hash_again(entry)
        super()._publish(entry)
