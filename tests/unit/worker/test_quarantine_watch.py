"""When a worker gives itself up: only a quarantine that is over its limit for the whole time."""

import pytest

from loopline.identity import BlockCounts
from loopline.worker.quarantine_watch import QuarantineWatch


def counts(quarantined: int, total: int = 8) -> BlockCounts:
    return BlockCounts(free=total - quarantined, held=0, cached=0, quarantined=quarantined, total=total)


def test_it_says_so_once_and_not_before_its_time() -> None:
    watch = QuarantineWatch(0.5, 13.0)
    assert [watch.is_over(counts(5), now_s) for now_s in (100.0, 112.9, 113.0, 113.1, 200.0)] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert "5 of 8 blocks" in watch.describe(counts(5)) and "for 13 s" in watch.describe(counts(5))


def test_a_moment_at_the_limit_begins_the_time_anew() -> None:
    watch = QuarantineWatch(0.5, 13.0)
    seen = [(5, 100.0), (8, 110.0), (4, 112.0), (5, 112.5), (5, 125.0), (5, 125.5)]
    assert [watch.is_over(counts(blocks), now_s) for blocks, now_s in seen] == [False] * 5 + [True]


@pytest.mark.parametrize(("limit", "blocks"), [(1.0, 8), (0.5, 4), (0.5, 0)])
def test_at_the_limit_is_not_over_it(limit: float, blocks: int) -> None:
    watch = QuarantineWatch(limit, 1.0)
    assert not any(watch.is_over(counts(blocks), float(now_s)) for now_s in range(100))


def test_a_worker_without_blocks_has_nothing_in_quarantine() -> None:
    assert not QuarantineWatch(0.5, 0.0).is_over(counts(0, total=0), 1.0)
