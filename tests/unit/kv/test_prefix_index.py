"""Digests of blocks, the order of eviction and the numbered deltas, by example."""

from collections.abc import Callable
from hashlib import blake2b

import pytest

from loopline.errors import AuditFailed, InvariantBroken
from loopline.kv.digests import DIGEST_BYTES, BlockDigests, prefix_root
from loopline.kv.prefix_index import PrefixDelta, PrefixIndex

ROOT = prefix_root("weights", "layout", "4", "zeros", "")


def chain(*tokens: int) -> list[bytes]:
    """Digests of blocks of one token each."""
    digests = BlockDigests(ROOT, 1)
    digests.extend(tokens)
    return list(digests.digests)


def publish_chain(index: PrefixIndex, digests: list[bytes], block_ids: list[int]) -> None:
    for parent, digest, block_id in zip([None, *digests], digests, block_ids, strict=False):
        assert index.publish(digest, parent, block_id)


def unpin_all(index: PrefixIndex, block_ids: list[int], now: int) -> None:
    for block_id in block_ids:
        index.unpin(block_id, now)
    index.audit()


# ---- digests


def test_parts_of_a_root_do_not_run_into_each_other() -> None:
    roots = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), ("ab", "c", "")]
    assert len({prefix_root(*parts) for parts in roots}) == len(roots)
    assert prefix_root("ab", "c") == prefix_root("ab", "c")


def test_a_digest_is_the_same_everywhere() -> None:
    digests = BlockDigests(b"\x01" * DIGEST_BYTES, 2)
    digests.extend([1, 2, 3, 2**32 - 1])
    first = blake2b(b"\x01" * 16 + b"\x01\0\0\0\x02\0\0\0", digest_size=16).digest()
    assert list(digests.digests) == [first, blake2b(first + b"\x03\0\0\0\xff\xff\xff\xff", digest_size=16).digest()]
    assert ROOT.hex() == "c0441e48a6c111fc09de2840cbded7c8"


def test_each_block_is_hashed_once_and_only_when_it_is_whole() -> None:
    tokens = [7, 8, 9, 10, 11, 12, 13]
    digests = BlockDigests(ROOT, 3)
    for end in range(len(tokens) + 1):
        digests.extend(tokens[:end])
        assert digests.num_hashed == len(digests.digests) == end // 3
    at_once = BlockDigests(ROOT, 3)
    at_once.extend(tokens)
    assert digests.digests == at_once.digests


def test_a_digest_stands_for_all_before_it() -> None:
    assert chain(1, 2, 3)[:2] == chain(1, 2)
    assert not set(chain(1, 2, 3)) & set(chain(4, 2, 3))
    other = BlockDigests(prefix_root("other weights"), 1)
    other.extend([1, 2, 3])
    assert not set(chain(1, 2, 3)) & set(other.digests)


@pytest.mark.parametrize("tokens", [[1], [1, 2, -1, 3], [1, 2, 2**32, 3]])
def test_what_cannot_be_digested_changes_nothing(tokens: list[int]) -> None:
    digests = BlockDigests(ROOT, 2)
    digests.extend([1, 2])
    before = list(digests.digests)
    with pytest.raises(InvariantBroken):
        digests.extend(tokens)
    assert list(digests.digests) == before
    digests.extend([1, 2, 3, 4])
    whole = BlockDigests(ROOT, 2)
    whole.extend([1, 2, 3, 4])
    assert digests.digests == whole.digests


# ---- index


def test_leaves_go_first_whatever_the_order_of_release() -> None:
    for block_ids in ([5, 6, 7], [7, 6, 5]):
        index = PrefixIndex()
        publish_chain(index, chain(1, 2, 3), [5, 6, 7])
        assert index.num_evictable == 0
        unpin_all(index, block_ids, now=1)
        assert (index.num_cached, index.num_evictable) == (3, 3)
        assert [index.evict() for _ in range(3)] == [7, 6, 5]
        assert (index.num_cached, index.num_evictable) == (0, 0)


def test_the_chain_used_least_recently_goes_first() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2), [0, 1])
    publish_chain(index, chain(3, 4), [2, 3])
    unpin_all(index, [0, 1], now=1)
    unpin_all(index, [2, 3], now=2)
    for block_id in index.match(chain(1, 2)):  # used again: now the younger one
        index.pin(block_id)
    unpin_all(index, [0, 1], now=3)
    assert [index.evict() for _ in range(4)] == [3, 2, 1, 0]


def test_of_the_same_time_the_one_published_first_goes_first() -> None:
    index = PrefixIndex()
    for token, block_id in ((1, 9), (2, 4), (3, 6)):
        publish_chain(index, chain(token), [block_id])
    unpin_all(index, [6, 9, 4], now=1)
    assert [index.evict() for _ in range(3)] == [9, 4, 6]


def test_a_chain_shared_by_two_requests() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2, 3), [0, 1, 2])
    assert index.match(chain(1, 2, 9)) == [0, 1]  # the second request comes while the first holds them: no pin
    assert index.publish(chain(1, 2, 9)[2], chain(1, 2)[1], 3)
    index.unpin(2, now=1)  # the first request ends: its other blocks still have a holder
    index.audit()
    assert (index.num_evictable, index.evict()) == (1, 2)
    assert index.match(chain(1, 2, 3)) == [0, 1]
    assert index.match(chain(1, 2, 9)) == [0, 1, 3]
    with pytest.raises(InvariantBroken):
        index.evict()
    unpin_all(index, [0, 1, 3], now=2)
    assert [index.evict() for _ in range(3)] == [3, 1, 0]


def test_a_second_copy_stays_private() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2), [0, 1])
    assert not index.publish(chain(1)[0], None, 7)
    assert not index.publish(chain(1, 2)[1], chain(1)[0], 8)
    assert not index.holds(7)
    assert index.publish(chain(1)[0], None, 0), "what is published so already is no second copy"
    assert index.num_cached == 2
    index.audit()


def test_a_block_may_be_published_again_after_it_was_evicted() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2), [0, 1])
    unpin_all(index, [0, 1], now=1)
    assert index.evict() == 1
    assert index.match(chain(1, 2)) == [0]
    index.pin(0)
    assert index.publish(chain(1, 2)[1], chain(1)[0], 5), "the same digest, in another block"
    assert index.publish(chain(8)[0], None, 1), "the same block, under another digest"
    assert index.match(chain(1, 2)) == [0, 5]
    index.audit()


def test_what_must_not_be_published() -> None:
    index = PrefixIndex()
    one, two = chain(1, 2)
    publish_chain(index, [one, two], [0, 1])
    publish_chain(index, chain(9), [2])
    with pytest.raises(InvariantBroken, match="is cached as"):
        index.publish(chain(5)[0], None, 0)
    with pytest.raises(InvariantBroken, match="not cached"):
        index.publish(chain(5, 6)[1], chain(5)[0], 7)
    with pytest.raises(InvariantBroken, match="another parent"):
        index.publish(two, chain(9)[0], 1)
    index.unpin(2, now=1)
    with pytest.raises(InvariantBroken, match="nobody holds"):
        index.publish(chain(9, 1)[1], chain(9)[0], 7)
    with pytest.raises(InvariantBroken, match="nobody holds"):
        index.publish(chain(9)[0], None, 2)
    index.audit()
    assert (index.num_cached, index.num_evictable) == (3, 1)


def test_holders_come_and_go_one_at_a_time() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1), [0])
    calls: list[Callable[[], object]] = [lambda: index.pin(0), lambda: index.pin(1), lambda: index.unpin(1, 5)]
    index.audit()
    for call in calls:
        with pytest.raises(InvariantBroken):
            call()
    index.unpin(0, now=5)
    with pytest.raises(InvariantBroken, match="had none"):
        index.unpin(0, now=5)
    index.pin(0)
    with pytest.raises(InvariantBroken, match="goes back"):
        index.unpin(0, now=4)
    index.audit()
    assert index.num_evictable == 0


def test_the_audit_sees_a_holder_that_does_not_hold_its_chain() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2), [0, 1])
    index.unpin(0, now=1)
    with pytest.raises(AuditFailed, match="block 1 is held, and block 0"):
        index.audit()


def test_using_one_block_again_and_again_costs_no_memory() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1), [0])
    publish_chain(index, chain(2, 3), [1, 2])
    unpin_all(index, [1, 2], now=0)
    for now in range(200):
        index.unpin(0, now)
        index.audit()
        index.pin(0)
        assert len(index._heap) <= 2 * index.num_cached + 8
    index.unpin(0, now=200)
    assert [index.evict() for _ in range(3)] == [2, 1, 0]


# ---- deltas


def test_deltas_are_numbered_and_in_order() -> None:
    index = PrefixIndex()
    assert index.take_deltas() is None
    assert index.snapshot() == (0, ())
    one, two = chain(1, 2)
    publish_chain(index, [one, two], [0, 1])
    assert index.take_deltas() == PrefixDelta(1, published=(one, two), evicted=())
    assert index.take_deltas() is None
    unpin_all(index, [0, 1], now=1)
    assert [index.evict(), index.evict()] == [1, 0]
    assert index.take_deltas() == PrefixDelta(2, published=(), evicted=(two, one))


def test_what_came_and_went_is_no_news() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1), [0])
    assert index.take_deltas() is not None
    publish_chain(index, chain(2), [1])
    unpin_all(index, [0, 1], now=1)
    assert [index.evict(), index.evict()] == [0, 1]
    publish_chain(index, chain(1), [7])
    assert index.take_deltas() is None


def test_a_snapshot_is_the_state_that_the_next_delta_changes() -> None:
    index = PrefixIndex()
    publish_chain(index, chain(1, 2), [0, 1])
    assert index.take_deltas() is not None
    unpin_all(index, [0, 1], now=1)
    assert [index.evict(), index.evict()] == [1, 0]
    publish_chain(index, chain(3), [0])
    assert index.snapshot() == (1, tuple(chain(1, 2)))
    assert index.take_deltas() == PrefixDelta(2, published=tuple(chain(3)), evicted=tuple(reversed(chain(1, 2))))
    assert index.snapshot() == (2, tuple(chain(3)))


def test_past_the_limit_the_watcher_sees_a_gap() -> None:
    index = PrefixIndex(max_pending=2)
    publish_chain(index, chain(1), [0])
    first = index.take_deltas()
    assert first is not None and first.number == 1
    publish_chain(index, chain(2, 3, 4), [1, 2, 3])  # state 2, whose delta is dropped
    publish_chain(index, chain(5), [4])
    assert index.snapshot() == (2, (*chain(1), *chain(2, 3, 4)))
    assert index.take_deltas() == PrefixDelta(3, published=tuple(chain(5)), evicted=())
    publish_chain(index, chain(6, 7, 8), [5, 6, 7])
    gap = index.take_deltas()
    assert gap == PrefixDelta(5, published=(), evicted=()), "a gap is shown even if nothing came after it"
    assert index.take_deltas() is None
    assert len(index.snapshot()[1]) == index.num_cached == 8
