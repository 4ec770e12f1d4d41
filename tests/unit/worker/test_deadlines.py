"""Deadlines: given once, in order, to live keys only; ended keys do not pile up."""

from loopline.identity import HandoffKey
from loopline.worker.deadlines import Deadlines
from tests.unit.worker.clocks import OwnClock


def key(number: int) -> HandoffKey:
    return HandoffKey(f"r{number}", 1)


def test_live_keys_expire_once_and_in_order() -> None:
    clock, live = OwnClock(), {key(n) for n in range(3)}
    deadlines = Deadlines(clock, live.__contains__)
    for number, remaining_s in enumerate((3.0, 1.0, 2.0)):
        deadlines.add(key(number), remaining_s)
    assert deadlines.take_expired() == []
    live.remove(key(2))
    clock.time_s += 3.0
    assert deadlines.take_expired() == [key(1), key(0)]
    assert deadlines.take_expired() == []


def test_ended_keys_leave_long_before_their_time() -> None:
    live = {key(-1)}
    deadlines = Deadlines(clock := OwnClock(), live.__contains__)
    deadlines.add(key(-1), 3600.0)
    for number in range(10_000):
        live.add(key(number))
        deadlines.add(key(number), 3600.0)
        live.remove(key(number))
    assert len(deadlines) < 600
    clock.time_s += 3600.0
    assert deadlines.take_expired() == [key(-1)]


def test_many_live_keys_are_all_kept() -> None:
    deadlines = Deadlines(clock := OwnClock(), lambda _: True)
    for number in range(2_000):
        deadlines.add(key(number), 10.0)
    clock.time_s += 10.0
    assert len(deadlines.take_expired()) == 2_000
