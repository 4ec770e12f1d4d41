"""Pool and ledger against plain oracles: sets of ids, and a list of who holds what."""

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from loopline.errors import InvariantBroken, WrittenContractBroken
from loopline.identity import BlockRun
from loopline.kv.block_pool import BlockPool, ids_of, runs_of
from loopline.kv.ledger import Allocation, Ledger

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 500 if SOAK else 40
TOTAL, BLOCK_SIZE = 24, 4


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
    """The ledger against a table of holders, promises and a model of steps that lag behind."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TOTAL, BLOCK_SIZE)
        self.most: dict[Allocation, int] = {}
        self.last_step: dict[Allocation, int] = {}
        self.may_be_written: list[tuple[int, frozenset[int]]] = []  # released blocks and the step that may write them
        self.quarantined: list[list[int]] = []
        self.step = 0
        self.done = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK_SIZE)

    def owned(self) -> int:
        return sum(len(self.ledger.block_ids(one)) for one in self.most) + sum(len(ids) for ids in self.quarantined)

    @rule(target=held, now=st.integers(1, 40), more=st.integers(0, 60))
    def reserve(self, now: int, more: int) -> Allocation | None:
        counts = self.ledger.counts()
        allocation = self.ledger.reserve(now, now + more)
        wanted = self.blocks(now + more)
        assert (allocation is not None) == (wanted <= counts.free - self.promised())
        if allocation is None:
            return None
        assert len(self.ledger.block_ids(allocation)) == self.blocks(now)
        self.most[allocation] = now + more
        self.last_step[allocation] = 0
        return allocation

    def promised(self) -> int:
        return sum(max(0, self.blocks(most) - len(self.ledger.block_ids(one))) for one, most in self.most.items())

    @rule(allocation=held, share=st.floats(0, 1))
    def grow_inside_the_promise_never_fails(self, allocation: Allocation | None, share: float) -> None:
        if allocation in self.most:
            assert allocation is not None
            assert self.ledger.grow(allocation, max(1, int(self.most[allocation] * share)))

    @rule(allocation=held, count=st.integers(1, 9))
    def compute(self, allocation: Allocation | None, count: int) -> None:
        """One step that writes the next positions of an allocation, and ends later."""
        if allocation not in self.most:
            return
        assert allocation is not None
        first = self.ledger.written_tokens(allocation, 1)
        if first + count > len(self.ledger.block_ids(allocation)) * BLOCK_SIZE:
            with pytest.raises(WrittenContractBroken):
                self.ledger.begin_run(allocation, first, count, 1, self.step + 1)
            return
        self.step += 1
        self.ledger.begin_run(allocation, first, count, 1, self.step)
        self.ledger.mark_written(allocation, first, count, 1)
        self.last_step[allocation] = self.step
        with pytest.raises(WrittenContractBroken):
            self.ledger.begin_run(allocation, first + count + 1, 1, 1, self.step)

    @rule(ended=st.integers(0, 3))
    def steps_end(self, ended: int) -> None:
        self.done = min(self.step, self.done + ended)
        self.ledger.step_done(self.done)

    @rule(allocation=consumes(held))
    def release(self, allocation: Allocation | None) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        ids = frozenset(self.ledger.block_ids(allocation))
        self.ledger.release(allocation)
        self.forget(allocation, ids)
        with pytest.raises(InvariantBroken):
            self.ledger.release(allocation)

    @rule(allocation=consumes(held), data=st.data())
    def quarantine(self, allocation: Allocation | None, data: st.DataObject) -> None:
        if allocation not in self.most:
            return
        assert allocation is not None
        ids = list(self.ledger.block_ids(allocation))
        kept = data.draw(st.lists(st.sampled_from(ids), unique=True))
        self.ledger.quarantine(allocation, kept)
        self.quarantined.append(kept)
        self.forget(allocation, frozenset(ids) - frozenset(kept))

    def forget(self, allocation: Allocation, freed: frozenset[int]) -> None:
        del self.most[allocation]
        self.may_be_written.append((self.last_step.pop(allocation), freed))

    @precondition(lambda self: self.quarantined)
    @rule()
    def free_quarantined(self) -> None:
        ids = self.quarantined.pop()
        self.ledger.free_quarantined(ids)
        if ids:
            with pytest.raises(InvariantBroken):
                self.ledger.free_quarantined(ids)

    @invariant()
    def books_add_up(self) -> None:
        self.ledger.audit()
        assert self.ledger.num_promised_blocks == self.promised()
        waiting = [ids for step, ids in self.may_be_written if step > self.done]
        assert self.ledger.counts().free == TOTAL - self.owned() - sum(map(len, waiting))
        out = {block for one in self.most for block in self.ledger.block_ids(one)}
        for ids in waiting:
            assert not out & ids, "a block was handed out before the step that may write it had ended"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
