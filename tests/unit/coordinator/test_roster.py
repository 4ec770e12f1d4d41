import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.roster import Roster
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker, WorkerCounts

COUNTS = st.builds(WorkerCounts, st.integers(0, 4), st.integers(0, 4))


def names(roster: Roster) -> list[str]:
    return [worker.name for worker in roster.kept()]


def test_missing_workers_start_with_the_lowest_free_index() -> None:
    roster = Roster()
    change = roster.want(WorkerCounts(1, 2))
    assert [worker.name for worker in change.start] == ["prefill-0", "decode-0", "decode-1"]
    assert change.leave == ()
    assert roster.want(WorkerCounts(1, 2)).start == ()
    roster.ended("decode-0")
    assert roster.wanted == WorkerCounts(1, 1)
    assert roster.want(WorkerCounts(1, 2)).start == (KeptWorker("decode-0", Role.DECODE, False),)


def test_of_too_many_the_last_leave_and_keep_their_name_until_they_ended() -> None:
    roster = Roster()
    roster.want(WorkerCounts(1, 3))
    assert roster.want(WorkerCounts(1, 1)).leave == ("decode-1", "decode-2")
    assert roster.wanted == WorkerCounts(1, 1)
    assert roster.stays("decode-0") and not roster.stays("decode-1") and not roster.stays("decode-9")
    assert [worker.name for worker in roster.want(WorkerCounts(1, 2)).start] == ["decode-3"]
    roster.ended("decode-1")
    roster.ended("decode-1")
    assert names(roster) == ["prefill-0", "decode-0", "decode-2", "decode-3"]
    assert [worker.name for worker in roster.want(WorkerCounts(1, 3)).start] == ["decode-1"]


@given(st.lists(st.tuples(COUNTS, st.lists(st.integers(0, 9), max_size=3)), max_size=8))
def test_as_many_stay_as_were_wanted_last(steps: list[tuple[WorkerCounts, list[int]]]) -> None:
    roster = Roster()
    living: set[str] = set()
    for counts, ends in steps:
        change = roster.want(counts)
        started = [worker.name for worker in change.start]
        assert living.isdisjoint(started) and len(set(started)) == len(started)
        assert living.issuperset(change.leave)
        living.update(started)
        assert roster.wanted == counts
        assert sorted(living) == sorted(names(roster))
        leaving = [worker.name for worker in roster.kept() if worker.leaving]
        for name in {leaving[end % len(leaving)] for end in ends if leaving}:
            roster.ended(name)
            living.discard(name)
        assert roster.wanted == counts


@pytest.mark.parametrize("count", [0, 12])
def test_names_are_ordered_by_their_number(count: int) -> None:
    roster = Roster()
    roster.want(WorkerCounts(0, count))
    assert names(roster) == [f"decode-{index}" for index in range(count)]
