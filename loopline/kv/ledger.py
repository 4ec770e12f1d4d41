"""Who holds which blocks, what may still be claimed, and what has been written: the books of one arena.

Callers hold an opaque `Allocation` and never see the pool. Nothing here does I/O or knows torch. The scheduler
reserves, grows and releases; a worker's handoff code reads block ids and quarantines.

    free --reserve/grow--> held --release--> (until the last step that may write them ended) --> free
                             `--quarantine--> quarantined --free_quarantined--> free

**Promises.** A reservation may name more tokens than it holds blocks for; the rest is promised: blocks that stay free
but that no other reservation can have. A request inside its promise can always grow, so nothing that runs can starve.

**The written contract.** Per allocation the ledger keeps, as runs of positions, the depth to which KV was written. A
step that would attend over positions [0, first) at depth d checks first that all of them were written at least d deep.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loopline.errors import AuditFailed, InvariantBroken, WrittenContractBroken
from loopline.identity import BlockCounts
from loopline.kv.block_pool import BlockPool, ids_of, runs_of


@dataclass(eq=False)
class Allocation:
    """The blocks of one request. Opaque: read through the ledger that made it."""

    _block_ids: list[int]
    _promised: int  # blocks it may still grow by
    _written: list[tuple[int, int]] = field(default_factory=list)  # (end position, depth), ascending, from position 0
    _last_step: int = 0  # last step that may write its blocks
    _released: bool = False


class Ledger:
    """Books of one arena. Invariant: free + held + cached + quarantined = total, and promised <= free; see `audit`."""

    def __init__(self, total_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(total_blocks)
        self._promised = 0
        self._live: dict[Allocation, None] = {}
        self._num_held = 0  # of live allocations, and of released ones that wait for a step
        self._waiting: deque[tuple[int, list[int]]] = deque()  # (step, block ids), steps ascending
        self._quarantined: dict[int, None] = {}
        self._step_done = 0

    # ---- queries

    @property
    def total_blocks(self) -> int:
        return self._pool.total

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation could take now, promised ones included. Kept, never scanned."""
        return self._pool.num_free

    @property
    def num_promised_blocks(self) -> int:
        """Of the free blocks, those that holders may still grow into."""
        return self._promised

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        return BlockCounts(
            free=self._pool.num_free,
            held=self._num_held,
            cached=0,
            quarantined=len(self._quarantined),
            total=self._pool.total,
        )

    def block_ids(self, allocation: Allocation) -> Sequence[int]:
        """Block ids in the order of positions; do not change them."""
        return allocation._block_ids

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def written_tokens(self, allocation: Allocation, depth: int) -> int:
        """Positions from 0 on that were written at least `depth` deep without a gap."""
        end = 0
        for run_end, run_depth in allocation._written:
            if run_depth < depth:
                break
            end = run_end
        return end

    # ---- holding

    def reserve(self, num_tokens: int, max_tokens: int) -> Allocation | None:
        """Hold blocks for `num_tokens` and promise the rest up to `max_tokens`. None if there is no room."""
        now = self.blocks_for(num_tokens)
        later = max(0, self.blocks_for(max_tokens) - now)
        if now + later > self._pool.num_free - self._promised:
            return None
        runs = self._pool.take(now)
        if runs is None:
            raise InvariantBroken(f"{now} blocks are within {self._pool.num_free} free ones and were not given")
        allocation = Allocation(ids_of(runs), later)
        self._promised += later
        self._num_held += now
        self._live[allocation] = None
        return allocation

    def grow(self, allocation: Allocation, num_tokens: int) -> bool:
        """Hold blocks for `num_tokens` in all. Inside the promise this cannot fail; past it, False means no room."""
        self._check_live(allocation)
        more = self.blocks_for(num_tokens) - len(allocation._block_ids)
        if more <= 0:
            return True
        from_promise = min(more, allocation._promised)
        if more - from_promise > self._pool.num_free - self._promised:
            return False
        runs = self._pool.take(more)
        if runs is None:
            raise InvariantBroken(f"{more} promised blocks are not free ({self._pool.num_free} are)")
        allocation._promised -= from_promise
        self._promised -= from_promise
        allocation._block_ids.extend(ids_of(runs))
        self._num_held += more
        return True

    def release(self, allocation: Allocation) -> None:
        """Give everything back: the one place where a request's blocks end, whatever ended it.

        Blocks become free once the last step that may write them has ended. Releasing twice is a bug and raises.
        """
        self._check_live(allocation)
        allocation._released = True
        del self._live[allocation]
        self._promised -= allocation._promised
        allocation._promised = 0
        self._free_after(allocation._last_step, allocation._block_ids)

    def quarantine(self, allocation: Allocation, block_ids: Sequence[int]) -> None:
        """Release `allocation`, except that `block_ids` of it stay off limits: a remote writer may still write them."""
        self._check_live(allocation)
        kept = dict.fromkeys(block_ids)
        missing = kept.keys() - set(allocation._block_ids)
        if missing:
            raise InvariantBroken(f"blocks {sorted(missing)} are not of this allocation")
        self._num_held -= len(kept)
        self._quarantined.update(kept)
        allocation._block_ids = [block_id for block_id in allocation._block_ids if block_id not in kept]
        self.release(allocation)

    def free_quarantined(self, block_ids: Sequence[int]) -> None:
        """End the quarantine of blocks: their writer is known to write no more."""
        missing = [block_id for block_id in block_ids if block_id not in self._quarantined]
        if missing:
            raise InvariantBroken(f"blocks {missing} are not quarantined")
        for block_id in block_ids:
            del self._quarantined[block_id]
        self._pool.give_back(runs_of(sorted(block_ids)))

    # ---- writing

    def begin_run(self, allocation: Allocation, first: int, count: int, depth: int, step: int) -> None:
        """Check that a step may compute positions [first, first + count) at `depth`, and note that it may write them.

        Raises WrittenContractBroken if an earlier position was not written that deep, or a position has no block.
        """
        self._check_live(allocation)
        if self.written_tokens(allocation, depth) < first:
            raise WrittenContractBroken(
                f"positions up to {first - 1} are needed at depth {depth}; written: {allocation._written}"
            )
        if first + count > len(allocation._block_ids) * self.block_size:
            raise WrittenContractBroken(
                f"positions {first}..{first + count - 1} lie past {len(allocation._block_ids)} blocks"
            )
        allocation._last_step = max(allocation._last_step, step)

    def mark_written(self, allocation: Allocation, first: int, count: int, depth: int) -> None:
        """Note that positions [first, first + count) hold KV to `depth` now; earlier positions keep theirs."""
        self._check_live(allocation)
        written = allocation._written
        known_end = written[-1][0] if written else 0
        if first > known_end:
            raise WrittenContractBroken(f"positions {known_end}..{first - 1} before the written run are unwritten")
        while written and written[-1][0] > first:
            end, old_depth = written.pop()
            start = written[-1][0] if written else 0
            if start < first:
                written.append((first, old_depth))
            if end > first + count:
                raise WrittenContractBroken(f"position {first} is written again while positions to {end - 1} follow")
        if written and written[-1][1] == depth:
            written.pop()
        written.append((first + count, depth))

    def step_done(self, step: int) -> None:
        """Step `step` and every earlier one have ended on the device: what waited for them becomes free."""
        self._step_done = max(self._step_done, step)
        while self._waiting and self._waiting[0][0] <= self._step_done:
            _, block_ids = self._waiting.popleft()
            self._give_back(block_ids)

    # ---- audit

    def audit(self) -> None:
        """Recount everything from the records; raises AuditFailed that names what differs."""
        owners: dict[int, str] = {}
        groups = [("live", allocation._block_ids) for allocation in self._live]
        groups += [("waiting", block_ids) for _, block_ids in self._waiting]
        groups += [("quarantined", list(self._quarantined)), ("free", ids_of(self._pool.free_runs()))]
        for name, block_ids in groups:
            for block_id in block_ids:
                if block_id in owners or not 0 <= block_id < self.total_blocks:
                    raise AuditFailed(f"block {block_id} is {name} and {owners.get(block_id, 'outside the arena')}")
                owners[block_id] = name
        if len(owners) != self.total_blocks:
            raise AuditFailed(f"{self.total_blocks - len(owners)} blocks belong to nobody")
        if not self.counts().adds_up:
            raise AuditFailed(f"{self.counts()} does not add up")
        promised = sum(allocation._promised for allocation in self._live)
        if promised != self._promised or promised > self._pool.num_free:
            raise AuditFailed(
                f"{self._promised} blocks counted as promised, {promised} are, {self._pool.num_free} free"
            )

    def _free_after(self, step: int, block_ids: list[int]) -> None:
        if step <= self._step_done:
            self._give_back(block_ids)
        elif block_ids:
            at = len(self._waiting)
            while at and self._waiting[at - 1][0] > step:
                at -= 1
            self._waiting.insert(at, (step, block_ids))

    def _give_back(self, block_ids: list[int]) -> None:
        self._num_held -= len(block_ids)
        self._pool.give_back(runs_of(sorted(block_ids)))

    def _check_live(self, allocation: Allocation) -> None:
        if allocation._released or allocation not in self._live:
            raise InvariantBroken("this allocation was released, or is another ledger's")
