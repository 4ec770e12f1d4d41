"""Pool and ledger against plain oracles: sets of ids, and a list of who holds what."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from loopline.errors import InvariantBroken, WrittenContractBroken
from loopline.identity import BlockRun
from loopline.kv.block_pool import BlockPool, ids_of, runs_of
from loopline.kv.digests import BlockDigests, prefix_root
from loopline.kv.ledger import Allocation, Ledger

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 500 if SOAK else 40
TOTAL, BLOCK_SIZE, DEPTH = 24, 4, 2
TEXTS = ("one", "two")


class PoolMachine(RuleBasedStateMachine):
    """The pool against a set of free ids."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.free = set(range(TOTAL))

    @rule(target=taken, count=st.integers(0, TOTAL + 2))
    def take(self, count: int) -> tuple[BlockRun, ...]:
        runs = self.pool.take(count)
        if count > len(self.free):
            assert runs is None
            return ()
        assert runs is not None
        ids = ids_of(runs)
        assert len(ids) == count == len(set(ids))
        assert self.free.issuperset(ids)
        longest = max((run.count for run in runs_of(sorted(self.free))), default=0)
        if count <= longest // 2:
            assert len(runs) <= 1, "a run twice as long was free and the blocks were not contiguous"
        self.free.difference_update(ids)
        return runs

    @rule(runs=consumes(taken))
    def give_back(self, runs: tuple[BlockRun, ...]) -> None:
        self.pool.give_back(runs)
        self.free.update(ids_of(runs))

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_back_twice_is_refused(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.free)))
        before = self.pool.free_runs()
        starts_or_ends = any(block_id in (run.start, run.start + run.count - 1) for run in before)
        if starts_or_ends:
            with pytest.raises(InvariantBroken):
                self.pool.give_back((BlockRun(block_id, 1),))
            assert self.pool.free_runs() == before

    @invariant()
    def same_free_blocks(self) -> None:
        runs = self.pool.free_runs()
        assert ids_of(runs) == sorted(self.free)
        assert runs == list(runs_of(sorted(self.free))), "free runs are maximal"
        assert self.pool.num_free == len(self.free)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a table of holders, promises and cached digests, with steps that end late."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TOTAL, BLOCK_SIZE)
        self.most: dict[Allocation, int] = {}
        self.digests: dict[Allocation, list[bytes]] = {}
        self.last_step: dict[Allocation, int] = {}
        self.may_be_written: list[tuple[int, frozenset[int]]] = []  # released blocks and the step that may write them
        self.quarantined: list[tuple[int, list[int]]] = []  # the step that may write the blocks, and their ids
        self.begun: dict[Allocation, list[int]] = {}  # how many positions each step in flight writes, oldest first
        self.cached: dict[bytes, int] = {}  # digest -> block, held or not
        self.step = 0
        self.done = 0

    # ---- the oracle

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK_SIZE)

    def ids(self, allocation: Allocation) -> list[int]:
        return self.ledger.block_ids(allocation)

    def held_blocks(self) -> set[int]:
        return {block for one in self.most for block in self.ids(one)}

    def promised(self) -> int:
        return sum(max(0, self.blocks(most) - len(self.ids(one))) for one, most in self.most.items())

    def off_limits(self) -> set[int]:
        """Blocks that nobody may be given now."""
        waiting = {block for step, ids in self.may_be_written if step > self.done for block in ids}
        return self.held_blocks() | waiting | {block for _, ids in self.quarantined for block in ids}

    def taken(self, block_ids: list[int]) -> None:
        """Fresh blocks of an allocation: what they cached before is gone."""
        assert not set(block_ids) & self.before, "a block was handed out that somebody uses or may still write"
        for digest in [digest for digest, block in self.cached.items() if block in block_ids]:
            del self.cached[digest]

    # ---- rules

    @rule(target=held, now=st.integers(1, 40), more=st.integers(0, 60), text=st.sampled_from(TEXTS))
    def reserve(self, now: int, more: int, text: str) -> Allocation | None:
        digests = BlockDigests(prefix_root(text), BLOCK_SIZE)
        digests.extend(range(now))
        chain = list(digests.digests)
        hits = 0
        while hits < len(chain) and chain[hits] in self.cached:
            hits += 1
        shared = [self.cached[digest] for digest in chain[:hits]]
        self.before = self.off_limits()
        room = TOTAL - len(self.before) - self.promised() - len(set(shared) - self.before)
        allocation = self.ledger.reserve(now, now + more, chain, DEPTH)
        assert (allocation is not None) == (self.blocks(now + more) - hits <= room)
        if allocation is None:
            return None
        assert self.ids(allocation)[:hits] == shared
        assert self.ledger.written_tokens(allocation, DEPTH) == hits * BLOCK_SIZE
        assert len(self.ids(allocation)) == self.blocks(now)
        self.taken(self.ids(allocation)[hits:])
        self.most[allocation], self.digests[allocation] = now + more, chain
        self.last_step[allocation], self.begun[allocation] = 0, []
        return allocation

    @rule(allocation=held, share=st.floats(0, 1))
    def grow_inside_the_promise_never_fails(self, allocation: Allocation | None, share: float) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        self.before, old = self.off_limits(), len(self.ids(allocation))
        assert self.ledger.grow(allocation, max(1, int(self.most[allocation] * share)))
        self.taken(self.ids(allocation)[old:])

    @rule(allocation=held, count=st.integers(1, 9), as_row=st.booleans())
    def begin(self, allocation: Allocation | None, count: int, as_row: bool) -> None:
        """One step that writes the next positions of an allocation, after what earlier steps will have written."""
        if allocation not in self.most:
            return
        assert allocation is not None
        written = self.ledger.written_tokens(allocation, DEPTH)
        first = written + sum(self.begun[allocation])
        if first + count > len(self.ids(allocation)) * BLOCK_SIZE:
            with pytest.raises(WrittenContractBroken):
                self.ledger.begin_run(allocation, first, count, DEPTH, self.step + 1)
            return
        if self.begun[allocation]:
            with pytest.raises(WrittenContractBroken):
                self.ledger.begin_run(allocation, first, count, DEPTH, self.last_step[allocation])
        self.step += 1
        if as_row:
            count = 1
            rows = np.array([self.ledger.row_of(allocation)])
            self.ledger.begin_rows(rows, np.array([first]), DEPTH, self.step)
        else:
            self.ledger.begin_run(allocation, first, count, DEPTH, self.step)
        self.begun[allocation].append(count)
        self.last_step[allocation] = self.step
        assert self.ledger.written_tokens(allocation, DEPTH) == written
        for wrong in (first + count + 1, first + count - 1):
            with pytest.raises(WrittenContractBroken):
                self.ledger.begin_run(allocation, wrong, 1, DEPTH, self.step + 1)

    @rule(allocation=held)
    def mark(self, allocation: Allocation | None) -> None:
        """The oldest of its steps is committed."""
        if allocation not in self.most or not self.begun[allocation]:
            return
        assert allocation is not None
        written, count = self.ledger.written_tokens(allocation, DEPTH), self.begun[allocation].pop(0)
        self.ledger.mark_written(allocation, written, count, DEPTH)
        assert self.ledger.written_tokens(allocation, DEPTH) == written + count

    @rule(allocation=held)
    def publish(self, allocation: Allocation | None) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        self.ledger.publish(allocation, self.digests[allocation], DEPTH)
        whole = self.ledger.written_tokens(allocation, DEPTH) // BLOCK_SIZE
        for digest, block in list(zip(self.digests[allocation], self.ids(allocation), strict=False))[:whole]:
            if self.cached.setdefault(digest, block) != block:
                break
        if (
            whole
            and self.cached.get(self.digests[allocation][0] if self.digests[allocation] else b"")
            == (self.ids(allocation)[0])
        ):
            with pytest.raises(WrittenContractBroken):
                self.ledger.begin_run(allocation, 0, 1, DEPTH, self.step + 1)

    @rule(ended=st.integers(0, 3))
    def steps_end(self, ended: int) -> None:
        self.done = min(self.step, self.done + ended)
        self.ledger.step_done(self.done)

    @rule(allocation=consumes(held))
    def release(self, allocation: Allocation | None) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        ids = frozenset(self.ids(allocation))
        self.ledger.release(allocation)
        self.forget(allocation, ids)
        with pytest.raises(InvariantBroken):
            self.ledger.release(allocation)

    @rule(allocation=consumes(held), data=st.data())
    def quarantine(self, allocation: Allocation | None, data: st.DataObject) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        ids = self.ids(allocation)
        kept = data.draw(st.lists(st.sampled_from(ids), unique=True))
        shared = [block for block in ids if block in self.cached.values()]
        lent = [block for block in shared if block in kept]
        if lent != shared[: len(lent)]:
            with pytest.raises(InvariantBroken, match="come before"):
                self.ledger.quarantine(allocation, kept)
            kept = ids  # as workers do: all of them
        self.ledger.quarantine(allocation, kept)
        self.quarantined.append((self.last_step[allocation], kept))
        self.forget(allocation, frozenset(ids) - frozenset(kept))

    def forget(self, allocation: Allocation, freed: frozenset[int]) -> None:
        del self.most[allocation], self.digests[allocation], self.begun[allocation]
        private = freed - frozenset(self.cached.values())
        self.may_be_written.append((self.last_step.pop(allocation), private))

    @precondition(lambda self: self.quarantined)
    @rule()
    def free_quarantined(self) -> None:
        last_step, ids = self.quarantined.pop()
        self.ledger.free_quarantined(ids)
        self.may_be_written.append((last_step, frozenset(ids) - frozenset(self.cached.values())))

    @invariant()
    def books_add_up(self) -> None:
        self.ledger.audit()
        assert self.ledger.num_promised_blocks == self.promised()
        counts = self.ledger.counts()
        assert counts.free + counts.cached == TOTAL - len(self.off_limits())
        assert self.ledger.num_free_blocks == counts.free + counts.cached
        assert counts.cached == len(set(self.cached.values()) - self.off_limits())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)


RUNS = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, -1]), st.integers(1, 5), st.integers(1, 3)), max_size=8)


@settings(max_examples=EXAMPLES * 4, deadline=None)
@given(RUNS)
def test_a_run_is_exactly_its_positions_one_by_one(runs: list[tuple[int, int, int]]) -> None:
    """`begin_run` and `mark_written` of a run against single positions, and both against the columns' fast path."""
    ledger = Ledger(TOTAL, BLOCK_SIZE)
    whole, single, column = (ledger.reserve(28, 28) for _ in range(3))
    assert whole is not None and single is not None and column is not None
    row = np.array([ledger.row_of(column)])

    def outcome(act: Callable[[], None]) -> bool:
        try:
            act()
        except WrittenContractBroken:
            return False
        return True

    def by_run(first: int, count: int, depth: int) -> None:
        ledger.begin_run(whole, first, count, depth, 1)
        ledger.mark_written(whole, first, count, depth)

    def one_by_one(first: int, count: int, depth: int) -> None:
        for position in range(first, first + count):
            ledger.begin_run(single, position, 1, depth, 1)
            ledger.begin_rows(row, np.array([position]), depth, 1)
            ledger.mark_written(single, position, 1, depth)
            ledger.mark_rows(row, np.array([position]), depth)

    for offset, count, depth in runs:
        first = max(0, ledger.written_tokens(whole, 1) + offset)
        expected = outcome(lambda f=first, c=count, d=depth: by_run(f, c, d))
        assert outcome(lambda f=first, c=count, d=depth: one_by_one(f, c, d)) == expected
        if not expected:
            return
        for at_depth in (1, 2, 3):
            assert (
                ledger.written_tokens(whole, at_depth)
                == ledger.written_tokens(single, at_depth)
                == ledger.written_tokens(column, at_depth)
            )
