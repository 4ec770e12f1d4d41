from coordinator.hung import HungLooks
from loopline.identity import WorkerState

LOST, READY = WorkerState.LOST, WorkerState.READY


def test_who_is_lost_twice_in_a_row_hangs() -> None:
    looks = HungLooks(3.0)
    assert looks.look({"a": READY, "b": READY}, ["a", "b"]) == []
    assert looks.look({"a": LOST, "b": READY}, ["a", "b"]) == []
    assert looks.look({"a": READY, "b": LOST}, ["a", "b"]) == []  # it came back
    assert looks.look({"a": LOST, "b": LOST}, ["a", "b"]) == ["b"]
    assert looks.look({"a": LOST, "b": LOST}, ["a"]) == ["a"]  # the other one has ended


def test_who_does_not_join_a_later_coordinator_hangs_after_more_looks() -> None:
    looks = HungLooks(1.0)
    assert looks.look({"a": READY}, ["a", "loading"]) == []
    assert [looks.look({}, ["a", "loading"]) for _ in range(6)] == [[], [], [], [], [], ["a"]]
    assert looks.look({"a": READY}, ["a", "loading"]) == []
    assert looks.look({"other": LOST}, ["a", "loading"]) == []  # no process of this launcher
