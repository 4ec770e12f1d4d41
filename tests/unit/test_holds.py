"""How long something is kept away from, by how soon it fails again."""

import pytest

from loopline.holds import FIRST_HOLD_S, MOST_HOLD_S, Holds


def test_a_hold_is_longer_only_where_it_comes_soon_after_the_last() -> None:
    holds, now_s = Holds[str](), 100.0

    def length_s() -> float:
        """Of a hold after a failure now, to half a second."""
        nonlocal now_s
        holds.failed("it", now_s)
        began_s = now_s
        while holds.has("it", now_s):
            now_s += 0.5
        return now_s - began_s

    assert [length_s() for _ in range(7)] == [1, 2, 4, 8, 16, MOST_HOLD_S, MOST_HOLD_S]
    now_s += MOST_HOLD_S - 1
    assert length_s() == MOST_HOLD_S
    now_s += MOST_HOLD_S
    assert length_s() == FIRST_HOLD_S


@pytest.mark.parametrize("takes_s", [0.0, 0.5, 5.0, 30.05, 300.0])
def test_what_is_tried_as_soon_as_it_may_is_held_longer_each_time_however_long_it_takes_to_fail(takes_s: float) -> None:
    holds, now_s, lengths = Holds[str](), 100.0, []
    for _ in range(7):
        begun_s, now_s = now_s, now_s + takes_s
        length_s = holds.failed("it", now_s, begun_s)
        assert length_s is not None
        lengths.append(length_s)
        now_s += length_s
    assert lengths == [1, 2, 4, 8, 16, MOST_HOLD_S, MOST_HOLD_S]
    begun_s = now_s + MOST_HOLD_S
    assert holds.failed("it", begun_s + takes_s, begun_s) == FIRST_HOLD_S, "it was left alone for long enough"


def test_what_was_begun_before_the_failure_that_is_known_is_no_new_try() -> None:
    holds = Holds[str]()
    assert holds.failed("it", 100.0, 70.0) == FIRST_HOLD_S
    assert holds.failed("it", 102.0, 71.0) == 2.0, "it fails soon after"
    holds = Holds[str]()
    assert holds.failed("it", 100.0, 70.0) == FIRST_HOLD_S
    assert holds.failed("it", 100.0 + FIRST_HOLD_S + MOST_HOLD_S, 71.0) == FIRST_HOLD_S


def test_what_fails_while_it_is_held_says_nothing_new_and_others_are_not_held() -> None:
    holds = Holds[str](1.0, 8.0)
    assert holds.failed("one", 10.0) == 1.0
    assert holds.failed("one", 10.9) is None
    assert [*holds.at(10.9)] == ["one"] and not holds.has("other", 10.9)
    assert not holds.has("one", 11.0)
    holds.forget(lambda what: what == "one")
    assert holds.failed("one", 11.0) == 1.0
