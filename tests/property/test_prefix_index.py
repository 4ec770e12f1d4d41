"""The prefix index against a plain oracle: a table of chains, a list in the order of use, a scan for the leaf to evict.

Requests hold chains as the ledger would make them: they pin what matches, publish what they compute, may race with one
another for the same prefix, and let go in any order.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loopline.errors import InvariantBroken
from loopline.kv.digests import BlockDigests, prefix_root
from loopline.kv.prefix_index import PrefixDelta, PrefixIndex

SOAK = os.environ.get("LOOPLINE_SOAK") == "1"
EXAMPLES = 500 if SOAK else 40
NUM_BLOCKS, DEEPEST = 8, 4
ROOT = prefix_root("test")

Path = tuple[int, ...]  # the tokens of a chain, one a block: a block's name in the oracle
PATHS: st.SearchStrategy[Path] = st.lists(st.integers(0, 1), min_size=1, max_size=DEEPEST).map(tuple)


@cache
def digests_of(path: Path) -> tuple[bytes, ...]:
    digests = BlockDigests(ROOT, 1)
    digests.extend(path)
    return tuple(digests.digests)


@dataclass(eq=False)
class Held:
    """A request: what it will compute, how much of the cached chain it holds, and whether it was refused."""

    path: Path
    num_cached: int
    is_refused: bool = False


@dataclass
class Oracle:
    """Who is cached where, in the order of publishing, and who is unused, in the order of use."""

    block_of: dict[Path, int] = field(default_factory=dict)
    unused: list[tuple[int, Path]] = field(default_factory=list)  # (time, path)

    def match(self, path: Path) -> list[int]:
        ends = range(1, len(path) + 1)
        missing = next((end for end in ends if path[:end] not in self.block_of), len(path) + 1)
        return [self.block_of[path[:end]] for end in range(1, missing)]

    def next_to_go(self) -> Path | None:
        published = list(self.block_of)
        inner = {path[:-1] for path in published}
        leaves = [(time, published.index(path), path) for time, path in self.unused if path not in inner]
        return min(leaves)[2] if leaves else None

    def use(self, path: Path) -> None:
        self.unused = [one for one in self.unused if one[1] != path]

    def forget(self, path: Path) -> int:
        self.use(path)
        return self.block_of.pop(path)

    def cached(self) -> set[bytes]:
        return {digests_of(path)[-1] for path in self.block_of}


class PrefixIndexMachine(RuleBasedStateMachine):
    """Every call and its result are noted and done again on a second index at the end: it must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self.oracle = Oracle()
        self.requests: list[Held] = []
        self.now = 0
        self.watched: set[bytes] = set()
        self.watched_number = 0

    @initialize(limit=st.sampled_from([1, 3, 100]))
    def start(self, limit: int) -> None:
        self.limit = limit
        self.index = PrefixIndex(limit)

    def do(self, name: str, *args: Any) -> Any:
        result = getattr(self.index, name)(*args)
        self.calls.append((name, args, result))
        return result

    def refuse(self, call: Callable[[], object]) -> None:
        before = (self.index.num_cached, self.index.num_evictable, self.index.snapshot())
        with pytest.raises(InvariantBroken):
            call()
        assert before == (self.index.num_cached, self.index.num_evictable, self.index.snapshot())

    def holders(self, path: Path) -> int:
        return sum(one.path[: len(path)] == path and one.num_cached >= len(path) for one in self.requests)

    # ---- requests

    @rule(path=PATHS, count=st.integers(0, DEEPEST))
    def arrive(self, path: Path, count: int) -> None:
        self.compute(self.admit(path), count)

    @rule(paths=st.lists(PATHS, min_size=2, max_size=5), together=st.booleans(), random=st.randoms())
    def serve(self, paths: list[Path], together: bool, random: Random) -> None:
        """A few requests come and go, one after the other, or together and racing for what they share."""
        for group in [paths] if together else [[path] for path in paths]:
            requests = [self.admit(path) for path in group]
            for request in requests:
                self.compute(request, DEEPEST)
            for request in random.sample(requests, len(requests)):
                self.leave(request, random.choice((0, 1)), random.sample(range(1, DEEPEST + 1), DEEPEST))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), later=st.integers(0, 2), ends=st.permutations(range(1, DEEPEST + 1)))
    def finish(self, data: st.DataObject, later: int, ends: list[int]) -> None:
        self.leave(data.draw(st.sampled_from(self.requests)), later, ends)

    @precondition(lambda self: self.can_publish())
    @rule(data=st.data(), count=st.integers(1, DEEPEST))
    def publish(self, data: st.DataObject, count: int) -> None:
        self.compute(data.draw(st.sampled_from(self.can_publish())), count)

    def can_publish(self) -> list[Held]:
        return [one for one in self.requests if not one.is_refused and one.num_cached < len(one.path)]

    def admit(self, path: Path) -> Held:
        block_ids = self.do("match", digests_of(path))
        assert block_ids == self.oracle.match(path)
        for end, block_id in enumerate(block_ids, start=1):
            if not self.holders(path[:end]):
                self.do("pin", block_id)
                self.oracle.use(path[:end])
        request = Held(path, len(block_ids))
        self.requests.append(request)
        return request

    def compute(self, request: Held, count: int) -> None:
        """The request's next blocks, in free blocks or in those of what was used least recently."""
        for end in range(request.num_cached + 1, min(len(request.path), request.num_cached + count) + 1):
            free = [block for block in range(NUM_BLOCKS) if not self.index.holds(block)]
            if not free and not self.index.num_evictable:
                return
            path = request.path[:end]
            digests = digests_of(path)
            block_id: int = free[0] if free else self.evict_one()
            is_new: bool = self.do("publish", digests[-1], digests[-2] if end > 1 else None, block_id)
            assert is_new == (path not in self.oracle.block_of)
            if not is_new:
                request.is_refused = True  # another request was faster: the rest of this one stays private
                return
            self.oracle.block_of[path] = block_id
            request.num_cached = end

    def leave(self, request: Held, later: int, ends: list[int]) -> None:
        """Let go of the blocks of a request in any order, `later` after the last one that left."""
        self.requests.remove(request)
        self.now += later
        for path in [request.path[:end] for end in ends if end <= request.num_cached]:
            if not self.holders(path):
                self.do("unpin", self.oracle.block_of[path], self.now)
                self.oracle.unused.append((self.now, path))

    @rule()
    def evict(self) -> None:
        if self.oracle.unused:
            self.evict_one()
        else:
            assert self.oracle.next_to_go() is None
            self.refuse(self.index.evict)

    def evict_one(self) -> int:
        path = self.oracle.next_to_go()
        assert path is not None, "a cache-only block cannot be evicted"
        block_id = int(self.do("evict"))
        assert block_id == self.oracle.forget(path)
        return block_id

    # ---- what a ledger must not do

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def misuse(self, block_id: int) -> None:
        path = next((path for path, block in self.oracle.block_of.items() if block == block_id), None)
        elsewhere = digests_of((9,))[0]
        if path is None:
            self.refuse(lambda: self.index.pin(block_id))
            self.refuse(lambda: self.index.unpin(block_id, self.now))
            self.refuse(lambda: self.index.publish(digests_of((9, 9))[1], elsewhere, block_id))
            return
        self.refuse(lambda: self.index.publish(elsewhere, None, block_id))
        if self.holders(path):
            self.refuse(lambda: self.index.pin(block_id))
            self.refuse(lambda: self.index.unpin(block_id, -1))
        else:
            self.refuse(lambda: self.index.unpin(block_id, self.now))
            self.refuse(lambda: self.index.publish(digests_of((*path, 9))[-1], digests_of(path)[-1], NUM_BLOCKS))

    # ---- a watcher

    @rule(joins_late=st.booleans())
    def watch(self, joins_late: bool) -> None:
        """It follows the deltas, and asks for a snapshot when it sees a gap; then it knows what is cached. One that
        starts from a snapshot at any other time continues with the next delta."""
        if joins_late:
            self.watched_number, digests = self.do("snapshot")
            self.watched = set(digests)
            assert len(self.watched) == len(digests)
        delta: PrefixDelta | None = self.do("take_deltas")
        if delta is not None:
            assert not set(delta.published) & set(delta.evicted)
            assert len(delta.published) + len(delta.evicted) <= self.limit
            if delta.number == self.watched_number + 1:
                assert self.watched.isdisjoint(delta.published) and self.watched.issuperset(delta.evicted)
                self.watched = (self.watched | set(delta.published)) - set(delta.evicted)
            else:
                assert delta.number > self.watched_number
                number, digests = self.do("snapshot")
                assert number == delta.number
                self.watched = set(digests)
            self.watched_number = delta.number
        assert self.watched == self.oracle.cached()

    # ---- always

    @invariant()
    def books_agree(self) -> None:
        self.index.audit()
        assert self.index.num_cached == len(self.oracle.block_of)
        assert self.index.num_evictable == len(self.oracle.unused)
        blocks = set(self.oracle.block_of.values())
        assert blocks == {block for block in range(NUM_BLOCKS) if self.index.holds(block)}
        for path in self.oracle.block_of:
            assert self.index.match([*digests_of(path), b"unknown"]) == self.oracle.match(path)

    def teardown(self) -> None:
        """The same calls give the same answers, and in the end everything can be evicted."""
        if not self.calls:
            return
        again = PrefixIndex(self.limit)
        assert [getattr(again, name)(*args) for name, args, _ in self.calls] == [got for _, _, got in self.calls]
        for path, block_id in self.oracle.block_of.items():
            if self.holders(path):
                again.unpin(block_id, self.now)
        again.audit()
        evicted = [again.evict() for _ in range(again.num_evictable)]
        assert sorted(evicted) == sorted(self.oracle.block_of.values())
        assert again.num_cached == 0


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 8),
    ends=st.lists(st.integers(0, 40), max_size=6).map(sorted),
)
def test_digests_grow_as_if_hashed_at_once(tokens: list[int], block_size: int, ends: list[int]) -> None:
    at_once, in_pieces = BlockDigests(ROOT, block_size), BlockDigests(ROOT, block_size)
    at_once.extend(tokens)
    for end in (*ends, len(tokens)):
        in_pieces.extend(tokens[: max(end, in_pieces.num_hashed * block_size)])
    assert in_pieces.digests == at_once.digests
    assert in_pieces.num_hashed == at_once.num_hashed == len(tokens) // block_size


@given(parts=st.lists(st.lists(st.text("ab", max_size=3), max_size=4), min_size=2, max_size=2))
def test_roots_are_equal_only_for_equal_parts(parts: list[list[str]]) -> None:
    one, other = parts
    assert (prefix_root(*one) == prefix_root(*other)) == (one == other)


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
