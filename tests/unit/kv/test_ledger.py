"""The written contract and the order of release, by example."""

import pytest

from loopline.errors import InvariantBroken, WrittenContractBroken
from loopline.kv.ledger import Ledger


def test_depth_is_part_of_the_contract() -> None:
    ledger = Ledger(8, 4)
    allocation = ledger.reserve(16, 16)
    assert allocation is not None
    ledger.begin_run(allocation, 0, 6, 2, step=1)
    ledger.mark_written(allocation, 0, 6, 2)
    with pytest.raises(WrittenContractBroken, match="depth 3"):
        ledger.begin_run(allocation, 6, 1, 3, step=2)
    ledger.begin_run(allocation, 6, 2, 1, step=2)
    with pytest.raises(WrittenContractBroken, match="marked as written at depth 2"):
        ledger.mark_written(allocation, 6, 2, 2)
    ledger.mark_written(allocation, 6, 2, 1)
    assert ledger.written_tokens(allocation, 1) == 8
    assert ledger.written_tokens(allocation, 2) == 6
    with pytest.raises(WrittenContractBroken):
        ledger.begin_run(allocation, 8, 1, 2, step=3)


def test_a_gap_cannot_be_marked_written() -> None:
    ledger = Ledger(8, 4)
    allocation = ledger.reserve(16, 16)
    assert allocation is not None
    with pytest.raises(WrittenContractBroken, match="0 is the next"):
        ledger.mark_written(allocation, 1, 2, 1)


def test_what_was_written_is_never_written_again() -> None:
    ledger = Ledger(8, 4)
    allocation = ledger.reserve(16, 16)
    assert allocation is not None
    ledger.mark_written(allocation, 0, 8, 3)
    for first in (0, 5, 7):
        with pytest.raises(WrittenContractBroken, match="again"):
            ledger.begin_run(allocation, first, 1, 3, step=1)
        ledger.begin_run(allocation, first, 1, 3, step=1, writes=False)
    with pytest.raises(WrittenContractBroken, match="not written"):
        ledger.begin_run(allocation, 8, 1, 3, step=1, writes=False)


def test_a_step_may_go_on_from_what_an_earlier_one_will_have_written() -> None:
    ledger = Ledger(8, 4)
    allocation = ledger.reserve(16, 16)
    assert allocation is not None
    ledger.begin_run(allocation, 0, 6, 2, step=1)
    with pytest.raises(WrittenContractBroken, match="step 1 writes them"):
        ledger.begin_run(allocation, 6, 1, 2, step=1)
    ledger.begin_run(allocation, 6, 1, 2, step=2)
    for first in (0, 6):
        with pytest.raises(WrittenContractBroken, match="again"):
            ledger.begin_run(allocation, first, 1, 2, step=3)
    with pytest.raises(WrittenContractBroken, match="not written"):
        ledger.begin_run(allocation, 6, 1, 2, step=3, writes=False)
    assert ledger.written_tokens(allocation, 1) == 0
    ledger.mark_written(allocation, 0, 6, 2)
    assert ledger.written_tokens(allocation, 2) == 6
    with pytest.raises(WrittenContractBroken, match="depth 3"):
        ledger.begin_run(allocation, 7, 1, 3, step=3)
    ledger.mark_written(allocation, 6, 1, 2)
    assert ledger.written_tokens(allocation, 2) == 7


def test_a_block_out_of_quarantine_waits_for_its_last_step() -> None:
    ledger = Ledger(4, 4)
    first = ledger.reserve(8, 8)
    assert first is not None
    ids = ledger.block_ids(first)
    ledger.begin_run(first, 0, 8, 1, step=7)
    ledger.quarantine(first, ids)
    ledger.step_done(6)
    ledger.free_quarantined(ids)
    assert (ledger.counts().free, ledger.counts().held) == (2, 2)
    ledger.audit()
    ledger.step_done(7)
    assert ledger.counts().free == 4
    ledger.audit()


def test_a_released_block_waits_for_its_last_step() -> None:
    ledger = Ledger(2, 4)
    first = ledger.reserve(8, 8)
    assert first is not None
    ledger.begin_run(first, 0, 8, 1, step=7)
    ledger.release(first)
    assert ledger.reserve(4, 4) is None
    assert ledger.counts().held == 2
    ledger.audit()
    ledger.step_done(6)
    assert ledger.reserve(4, 4) is None
    ledger.step_done(7)
    assert ledger.reserve(8, 8) is not None
    ledger.audit()


def test_another_ledgers_allocation_is_refused() -> None:
    foreign = Ledger(2, 4).reserve(4, 4)
    assert foreign is not None
    with pytest.raises(InvariantBroken):
        Ledger(2, 4).release(foreign)


def test_blocks_of_another_allocation_cannot_be_quarantined() -> None:
    ledger = Ledger(4, 4)
    one, two = ledger.reserve(4, 4), ledger.reserve(4, 4)
    assert one is not None and two is not None
    with pytest.raises(InvariantBroken, match="not of this allocation"):
        ledger.quarantine(one, ledger.block_ids(two))
    ledger.audit()
