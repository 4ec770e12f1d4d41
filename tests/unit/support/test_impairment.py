"""The bad line of the network tests: what it loses, what it delays, and in which order the rest arrives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.netns.impairment import Impairment, Line


def line_with(impairment: Impairment, seed: int = 1, limit: int = 4096) -> Line:
    line = Line(seed, limit)
    line.impairment = impairment
    return line


def packets(count: int) -> list[bytes]:
    return [n.to_bytes(4, "big") for n in range(count)]


def test_a_good_line_gives_everything_at_once() -> None:
    line = Line(0)
    for packet in packets(5):
        line.put(packet, 1.0)
    assert line.take(1.0) == packets(5)
    assert line.num_lost == 0 and line.next_s() is None


def test_a_packet_arrives_after_its_delay_and_not_before() -> None:
    line = line_with(Impairment(delay_s=0.5))
    line.put(b"a", 1.0)
    line.put(b"b", 1.25)
    assert line.next_s() == 1.5
    assert line.take(1.499) == []
    assert line.take(1.5) == [b"a"]
    assert line.take(1.75) == [b"b"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_about_as_many_are_lost_as_was_asked_for(seed: int) -> None:
    line = line_with(Impairment(loss=0.05), seed)
    for packet in packets(10_000):
        line.put(packet, 0.0)
        line.take(0.0)
    assert 400 <= line.num_lost <= 600


def test_who_is_lost_depends_on_the_seed_alone() -> None:
    def arrived(seed: int, delay_s: float) -> list[bytes]:
        line = line_with(Impairment(loss=0.3, delay_s=delay_s), seed)
        for moment, packet in enumerate(packets(200)):
            line.put(packet, float(moment))
        return line.take(1e9)

    assert arrived(5, 0.0) == arrived(5, 3.0)
    assert arrived(5, 0.0) != arrived(6, 0.0)


def test_a_cut_line_drops_what_is_on_its_way_and_what_comes() -> None:
    line = line_with(Impairment(delay_s=1.0))
    line.put(b"on its way", 0.0)
    line.impairment = Impairment(is_cut=True)
    line.put(b"comes", 0.5)
    assert line.take(9.0) == [] and len(line) == 0
    assert line.num_lost == 2
    line.impairment = Impairment()
    line.put(b"after it", 9.0)
    assert line.take(9.0) == [b"after it"]


def test_a_full_line_loses_what_comes_on_top() -> None:
    line = line_with(Impairment(delay_s=1.0), limit=2)
    for packet in packets(3):
        line.put(packet, 0.0)
    assert line.num_lost == 1
    assert line.take(1.0) == packets(2)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1), st.floats(0, 0.9)), max_size=40),
    st.integers(0, 2**32),
)
def test_no_packet_passes_another_and_each_arrives_or_is_lost(
    steps: list[tuple[float, float, float]], seed: int
) -> None:
    """Whatever delay and loss are changed to in between."""
    line, now_s, sent, arrived = Line(seed), 0.0, packets(len(steps)), []
    for packet, (pause_s, delay_s, loss) in zip(sent, steps, strict=True):
        now_s += pause_s
        line.impairment = Impairment(loss=loss, delay_s=delay_s)
        line.put(packet, now_s)
        arrived += line.take(now_s)
    arrived += line.take(now_s + 10.0)
    assert arrived == sorted(arrived) and set(arrived) <= set(sent)
    assert len(arrived) + line.num_lost == len(sent)
