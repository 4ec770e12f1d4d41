"""Runs and descriptors: fewest runs, exact bytes, nothing outside of a region."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.manifest import (
    PairedRun,
    coalesce,
    most_push_blocks,
    null_descriptors,
    paired_descriptors,
    push_ranges,
)
from loopline.errors import TransferError
from loopline.identity import RegionManifest
from loopline.messages import PushRange

SOURCE = RegionManifest(4096, 100, 1 << 20, "DRAM", 0, 100)
TARGET = RegionManifest(1 << 40, 5000, 1 << 20, "VRAM", 3, 5000)
blocks = st.lists(st.integers(0, 30), max_size=40)


def test_pushes_cover_a_range_in_order() -> None:
    assert push_ranges(3, 3, 2) == ()
    assert push_ranges(3, 8, 2, first_seq=4) == (PushRange(4, 3, 2), PushRange(5, 5, 2), PushRange(6, 7, 1))
    assert push_ranges(0, 2, 99) == (PushRange(0, 0, 2),)


def test_a_push_holds_one_block_however_large_it_is() -> None:
    assert [most_push_blocks(most, 100) for most in (1, 100, 299, 300)] == [1, 1, 2, 3]
    assert most_push_blocks(None, 100) > 10**9


def test_runs_break_where_either_side_does() -> None:
    assert coalesce([1, 2, 3, 7, 8], [10, 11, 20, 21, 22]) == (
        PairedRun(1, 10, 2),
        PairedRun(3, 20, 1),
        PairedRun(7, 21, 2),
    )
    assert coalesce([], []) == ()
    assert coalesce([5, 4], [5, 4]) == (PairedRun(5, 5, 1), PairedRun(4, 4, 1))


def test_sides_of_different_lengths_are_a_fault() -> None:
    with pytest.raises(ValueError, match="2 source blocks for 1"):
        coalesce([1, 2], [1])


@given(source=blocks)
def test_runs_hold_the_same_blocks_in_order_and_none_could_be_merged(source: list[int]) -> None:
    target = sorted(source)
    runs = coalesce(source, target)
    pairs = [(run.source_start + i, run.target_start + i) for run in runs for i in range(run.num_blocks)]
    assert pairs == list(zip(source, target, strict=True))
    for left, right in pairwise(runs):
        assert (left.source_start + left.num_blocks, left.target_start + left.num_blocks) != right[:2]


def test_one_descriptor_a_run_with_64_bit_addresses() -> None:
    local, remote = paired_descriptors(SOURCE, TARGET, coalesce([1, 2, 9], [4998, 4999, 0]))
    assert local.rows.tolist() == [[4096 + (1 << 20), 2 << 20, 0], [4096 + (9 << 20), 1 << 20, 0]]
    assert remote.rows.tolist() == [[(1 << 40) + (4998 << 20), 2 << 20, 3], [1 << 40, 1 << 20, 3]]
    assert (local.memory_kind, remote.memory_kind) == ("DRAM", "VRAM")
    assert (len(local), local.num_bytes) == (2, 3 << 20)


@pytest.mark.parametrize(
    "run", [PairedRun(99, 0, 2), PairedRun(-1, 0, 1), PairedRun(0, 5000, 1), PairedRun(0, 4999, 2), PairedRun(0, 0, 0)]
)
def test_blocks_outside_of_a_region_are_refused(run: PairedRun) -> None:
    with pytest.raises(TransferError, match="not all inside"):
        paired_descriptors(SOURCE, TARGET, [PairedRun(0, 0, 1), run])


def test_regions_of_other_block_sizes_are_refused() -> None:
    with pytest.raises(TransferError, match="4096"):
        paired_descriptors(SOURCE, RegionManifest(0, 10, 4096, "DRAM", 0, 10), [PairedRun(0, 0, 1)])


def test_null_descriptors_repeat_the_null_block() -> None:
    assert null_descriptors(SOURCE, 2).rows.tolist() == [[4096 + (100 << 20), 1 << 20, 0]] * 2
