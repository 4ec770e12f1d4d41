"""Who holds which blocks, what may still be claimed, and what has been written: the books of one arena.

Callers hold an opaque `Allocation` and never see the pool. Nothing here does I/O or knows torch. The scheduler
reserves, grows, publishes and releases; a worker's handoff code reads block ids and quarantines.

    free --reserve/grow--> held --release--> waiting (until the last step that may write them has ended) --> free
      ^                     | ^ `--quarantine--> quarantined --free_quarantined--> waiting or free
      |             publish | | reserve with a hit
      `---- evicted ---- cached (held by nobody, found by its digest)

**Promises.** A reservation may name more tokens than it holds blocks for; the rest is promised: blocks that stay free
but that no other reservation can have. A request inside its promise can always grow, so nothing that runs can starve.

Which positions were written, and how deep, is `loopline.kv.block_books`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loopline.errors import AuditFailed, InvariantBroken
from loopline.identity import BlockCounts
from loopline.kv.block_books import BlockBooks, IntArray
from loopline.kv.block_pool import BlockPool, ids_of, runs_of
from loopline.kv.prefix_index import PrefixIndex


@dataclass(eq=False)
class Allocation:
    """The blocks of one request. Opaque: read through the ledger that made it."""

    _row: int
    _promised: int  # blocks it may still grow by
    _may_publish: bool = True
    _released: bool = False


class Ledger:
    """Books of one arena. Invariant: free + held + cached + quarantined = total, and promises are covered by blocks
    that are free or cached; see `audit`."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.prefix = PrefixIndex()
        self._pool = BlockPool(total_blocks)
        self._books = BlockBooks(block_size)
        self._promised = 0
        self._live: dict[Allocation, None] = {}
        self._holders: dict[int, int] = {}  # block id -> holders, of blocks that the prefix index knows
        self._num_held = 0  # blocks of live allocations, and of released ones that wait for a step; shared ones once
        self._waiting: deque[tuple[int, list[int]]] = deque()  # (step, block ids), steps ascending
        self._quarantined: dict[int, int] = {}  # block id -> last step that may write it
        self._lent: dict[int, int] = {}  # shared blocks that a quarantine holds: how many times
        self._step_done = 0
        self._time = 0  # logical: counts releases, for the order of eviction

    # ---- queries

    @property
    def total_blocks(self) -> int:
        return self._pool.total

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation could take now, promised and cache-only ones included. Kept, never scanned."""
        return self._pool.num_free + self.prefix.num_evictable

    @property
    def num_promised_blocks(self) -> int:
        """Of the free blocks, those that holders may still grow into."""
        return self._promised

    def counts(self) -> BlockCounts:
        """Blocks by state. Shared ones that only a quarantine holds are quarantined: nobody can have them before it
        ends."""
        num_lent = sum(1 for block_id, times in self._lent.items() if self._holders[block_id] == times)
        return BlockCounts(
            free=self._pool.num_free,
            held=self._num_held - num_lent,
            cached=self.prefix.num_evictable,
            quarantined=len(self._quarantined) + num_lent,
            total=self._pool.total,
        )

    def block_ids(self, allocation: Allocation) -> list[int]:
        """Block ids in the order of positions."""
        ids: list[int] = self._books.ids(allocation._row).tolist()
        return ids

    def block_table(self, allocation: Allocation) -> IntArray:
        """`block_ids` as a view of int64; valid until the next change of any allocation."""
        return self._books.ids(allocation._row)

    def block_tables(self, rows: IntArray, width: int) -> IntArray:
        """The first `width` block ids of several allocations (`row_of`): a new int64 array [rows, width]."""
        return self._books.table[rows, :width]

    def row_of(self, allocation: Allocation) -> int:
        """Where this allocation's books are; for `begin_rows` and its like, until it is released."""
        return allocation._row

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def written_tokens(self, allocation: Allocation, depth: int) -> int:
        """Positions from 0 on that were written at least `depth` deep without a gap."""
        return self._books.written_to(allocation._row, depth)

    # ---- holding

    def reserve(
        self, num_tokens: int, max_tokens: int, digests: Sequence[bytes] = (), depth: int = 0
    ) -> Allocation | None:
        """Hold blocks for `num_tokens` and promise the rest up to `max_tokens`. None if there is no room.

        Cached blocks that match `digests` (of the first whole blocks of these tokens, at `depth`) are shared instead of
        taken; their positions count as written (`written_tokens`).
        """
        hits = self.prefix.match(digests)
        now = self.blocks_for(num_tokens)
        later = max(0, self.blocks_for(max_tokens) - now)
        unheld = sum(1 for block_id in hits if not self._holders[block_id])
        if now - len(hits) + later > self.num_free_blocks - unheld - self._promised:
            return None
        for block_id in hits:
            self._pin(block_id)
        allocation = Allocation(self._books.take_row(), later)
        self._books.append(allocation._row, hits)
        self._books.published[allocation._row] = len(hits)
        self._books.append(allocation._row, self._take(now - len(hits)))
        if hits:
            self._books.set_written(allocation._row, len(hits) * self.block_size, depth)
        self._promised += later
        self._live[allocation] = None
        return allocation

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens` in all. Inside the promise this cannot fail; past it, False means no room."""
        self._check_live(allocation)
        more = self.blocks_for(num_tokens) - int(self._books.num_blocks[allocation._row])
        if more <= 0:
            return True
        from_promise = min(more, allocation._promised)
        if more - from_promise > self.num_free_blocks - self._promised:
            return False
        allocation._promised -= from_promise
        self._promised -= from_promise
        self._books.append(allocation._row, self._take(more))
        return True

    def short_rows(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Indices into `rows` of the allocations that hold blocks for fewer than `num_tokens` tokens."""
        return np.flatnonzero(self._books.num_blocks[rows] * self.block_size < num_tokens)

    def release(self, allocation: Allocation) -> None:
        """Give everything back: the one place where a request's blocks end, whatever ended it.

        Blocks that the prefix index knows stay cached; others become free once the last step that may write them has
        ended. Releasing twice is a bug and raises.
        """
        self._check_live(allocation)
        self._end(allocation, self.block_ids(allocation))

    def quarantine(self, allocation: Allocation, block_ids: Sequence[int]) -> None:
        """Release `allocation`, except that `block_ids` of it stay off limits: a remote peer may still use them.

        Shared blocks among them can still be found: nobody writes a shared block, so others may go on reading it. They
        must be the allocation's first ones, because who holds a block of a chain holds all before it.
        """
        self._check_live(allocation)
        kept = dict.fromkeys(block_ids)
        last_step = int(self._books.last_step[allocation._row])
        held = self.block_ids(allocation)
        missing = kept.keys() - set(held)
        if missing:
            raise InvariantBroken(f"blocks {sorted(missing)} are not of this allocation")
        shared = [block_id for block_id in held if block_id in self._holders]
        lent = [block_id for block_id in shared if block_id in kept]
        if lent != shared[: len(lent)]:
            raise InvariantBroken(f"shared blocks {lent} are to be kept without all of {shared} that come before")
        for block_id in kept:
            if block_id in self._holders:
                self._lent[block_id] = self._lent.get(block_id, 0) + 1
            else:
                self._num_held -= 1
                self._quarantined[block_id] = last_step
        self._end(allocation, [block_id for block_id in held if block_id not in kept])

    def free_quarantined(self, block_ids: Sequence[int]) -> None:
        """End the quarantine of blocks: their peer is known to use them no more. Those that a submitted step may still
        write become free once it has ended."""
        missing = [one for one in block_ids if one not in self._quarantined and one not in self._lent]
        if missing:
            raise InvariantBroken(f"blocks {missing} are not quarantined")
        private: dict[int, list[int]] = {}  # by the last step that may write them
        for block_id in block_ids:
            if block_id in self._quarantined:
                private.setdefault(self._quarantined.pop(block_id), []).append(block_id)
        for block_id in block_ids:
            if block_id in self._lent:
                self._lent[block_id] -= 1
                if not self._lent[block_id]:
                    del self._lent[block_id]
                self._unpin(block_id)
        for last_step in sorted(private):
            self._num_held += len(private[last_step])
            self._give_back_after(last_step, private[last_step])

    # ---- sharing

    def publish(self, allocation: Allocation, digests: Sequence[bytes], depth: int) -> int:
        """Let others find the leading whole blocks that `digests` name, as far as they are written to `depth`.

        Returns how many blocks became findable. Where another block is known under a digest already, this allocation's
        copy and everything after it stays private.
        """
        self._check_live(allocation)
        whole = self.written_tokens(allocation, depth) // self.block_size
        ids = self._books.ids(allocation._row)
        before = published = int(self._books.published[allocation._row])
        for index in range(before, min(whole, len(digests))):
            if not allocation._may_publish:
                break
            block_id, parent = int(ids[index]), digests[index - 1] if index else None
            if not self.prefix.publish(digests[index], parent, block_id):
                allocation._may_publish = False
                break
            self._holders[block_id] = 1
            published += 1
        self._books.published[allocation._row] = published
        return published - before

    # ---- writing

    def begin_run(
        self, allocation: Allocation, first: int, count: int, depth: int, step: int, writes: bool = True
    ) -> None:
        """Check that a step may compute positions [first, first + count) at `depth`, and note that it writes them.

        `writes` False: their KV is there already and is only read. Raises WrittenContractBroken if an earlier position
        was neither written that deep nor begun so by an earlier step, or a position has no block or was begun before.
        What a step began and never wrote is void when its allocation is released, and only then.
        """
        self._check_live(allocation)
        self._books.begin(allocation._row, first, count, depth, step, writes)

    def begin_rows(self, rows: IntArray, firsts: IntArray, depth: int, step: int) -> None:
        """`begin_run` with count 1 for the allocations of `rows` (`row_of`), each at its position of `firsts`."""
        self._books.begin_rows(rows, firsts, depth, step)

    def mark_written(self, allocation: Allocation, first: int, count: int, depth: int) -> None:
        """Note that positions [first, first + count) hold KV to `depth` now; earlier positions keep theirs."""
        self._check_live(allocation)
        self._books.mark(allocation._row, first, count, depth)

    def mark_rows(self, rows: IntArray, firsts: IntArray, depth: int) -> None:
        """`mark_written` with count 1 for the allocations of `rows`, each at its position of `firsts`."""
        self._books.mark_rows(rows, firsts, depth)

    def step_done(self, step: int) -> None:
        """Step `step` and every earlier one have ended on the device: what waited for them becomes free."""
        self._step_done = max(self._step_done, step)
        while self._waiting and self._waiting[0][0] <= self._step_done:
            _, block_ids = self._waiting.popleft()
            self._give_back(block_ids)

    # ---- audit

    def audit(self) -> None:
        """Recount everything from the records; raises AuditFailed that names what differs."""
        self.prefix.audit()
        holders: dict[int, int] = dict(self._lent)
        owners: dict[int, str] = {}
        private = [("quarantined", list(self._quarantined)), ("free", ids_of(self._pool.free_runs()))]
        private += [("waiting", block_ids) for _, block_ids in self._waiting]
        for allocation in self._live:
            ids = self.block_ids(allocation)
            for block_id in ids:
                if block_id in self._holders:
                    holders[block_id] = holders.get(block_id, 0) + 1
            private.append(("held", [block_id for block_id in ids if block_id not in self._holders]))
        private.append(("shared", list(self._holders)))
        for name, block_ids in private:
            for block_id in block_ids:
                if block_id in owners or not 0 <= block_id < self.total_blocks:
                    raise AuditFailed(f"block {block_id} is {name} and {owners.get(block_id, 'outside the arena')}")
                owners[block_id] = name
        if len(owners) != self.total_blocks:
            raise AuditFailed(f"{self.total_blocks - len(owners)} blocks belong to nobody")
        for block_id, count in self._holders.items():
            if count != holders.get(block_id, 0):
                raise AuditFailed(f"block {block_id} counts {count} holders and has {holders.get(block_id, 0)}")
        self._audit_counts()

    def _audit_counts(self) -> None:
        counts = self.counts()
        evictable = sum(1 for count in self._holders.values() if not count)
        if not counts.adds_up or counts.cached != evictable:
            raise AuditFailed(f"{counts} does not add up; {evictable} shared blocks have no holder")
        promised = sum(allocation._promised for allocation in self._live)
        if promised != self._promised or promised > self.num_free_blocks:
            raise AuditFailed(f"{self._promised} blocks counted as promised, {promised} are; {counts}")

    # ---- inside

    def _take(self, count: int) -> list[int]:
        """Blocks off the pool, evicting as many cached ones as it lacks; the caller has checked that there are."""
        evicted = [self.prefix.evict() for _ in range(count - self._pool.num_free)]
        for block_id in evicted:
            del self._holders[block_id]
        self._pool.give_back(runs_of(sorted(evicted)))
        runs = self._pool.take(count)
        if runs is None:
            raise InvariantBroken(f"{count} blocks are promised and {self._pool.num_free} are free")
        self._num_held += count
        return ids_of(runs)

    def _pin(self, block_id: int) -> None:
        self._holders[block_id] += 1
        if self._holders[block_id] == 1:
            self.prefix.pin(block_id)
            self._num_held += 1

    def _unpin(self, block_id: int) -> None:
        self._holders[block_id] -= 1
        if not self._holders[block_id]:
            self._num_held -= 1
            self.prefix.unpin(block_id, self._time)

    def _end(self, allocation: Allocation, block_ids: list[int]) -> None:
        """Take an allocation off the books; `block_ids` are those of it that nobody keeps."""
        allocation._released = True
        del self._live[allocation]
        self._promised -= allocation._promised
        self._time += 1
        private = []
        for block_id in reversed(block_ids):  # a block's holders hold what comes before it in the chain, too
            if block_id in self._holders:
                self._unpin(block_id)
            else:
                private.append(block_id)
        last_step = int(self._books.last_step[allocation._row])
        self._books.give_row(allocation._row)
        self._give_back_after(last_step, private)

    def _give_back_after(self, last_step: int, block_ids: list[int]) -> None:
        """Blocks that nobody holds and that are counted as held: free now, or once `last_step` has ended."""
        if last_step <= self._step_done:
            self._give_back(block_ids)
        elif block_ids:
            at = len(self._waiting)
            while at and self._waiting[at - 1][0] > last_step:
                at -= 1
            self._waiting.insert(at, (last_step, block_ids))

    def _give_back(self, block_ids: list[int]) -> None:
        self._num_held -= len(block_ids)
        self._pool.give_back(runs_of(sorted(block_ids)))

    def _check_live(self, allocation: Allocation) -> None:
        if allocation._released or allocation not in self._live:
            raise InvariantBroken("this allocation was released, or is another ledger's")
