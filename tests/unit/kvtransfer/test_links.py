"""A link whose peer was away and is paired again: it is checked before requests go over it, and one that stays silent
is made anew when that costs nobody anything."""

from dataclasses import replace

from kvtransfer.agent import PENDING, Handle
from kvtransfer.commands import ConnectPeer, HandoffRefused, OpenHandoff, PeerConnected, PeerConnectFailed
from kvtransfer.links import CHECK_S
from loopline.identity import HandoffKey, WorkerId
from tests.unit.kvtransfer.test_sender import TARGET, TIMEOUT_S, Bench

AGAIN = replace(TARGET, worker=WorkerId(TARGET.worker.uuid, 2))


def connect_again(bench: Bench) -> Handle:
    """Pair with the peer's next life; the handle of the check."""
    before = set(bench.agent._writes)
    bench.sender.connect(ConnectPeer(AGAIN, bench.target.metadata(), bench.regions[1]))
    (check,) = set(bench.agent._writes) - before
    return check


def is_usable(bench: Bench) -> bool:
    bench.sender.open(OpenHandoff(HandoffKey("probe", 1), AGAIN.worker, 0, (0,)))
    return not any(isinstance(event, HandoffRefused) for event in bench.take())


def test_a_link_that_still_leads_there_is_ready_again_after_one_write() -> None:
    bench = Bench()
    rate = bench.sender._links._links[TARGET.worker.agent_name].bytes_per_s
    connect_again(bench)
    assert bench.take() == []
    bench.rounds(2)
    (connected,) = bench.take()
    assert isinstance(connected, PeerConnected)
    assert connected.peer == AGAIN and connected.bytes_per_s == rate  # a write of one block measures nothing


def test_nothing_is_opened_over_a_link_that_is_silent() -> None:
    bench = Bench()
    bench.agent.broken[connect_again(bench)] = PENDING
    bench.rounds(2)
    assert not is_usable(bench)


def test_a_silent_link_is_made_anew_when_nothing_is_in_flight() -> None:
    bench = Bench()
    bench.agent.broken[connect_again(bench)] = PENDING
    bench.rounds(2)
    assert bench.take() == []
    bench.clock.time_s += CHECK_S + 0.1
    bench.rounds(4)
    (connected,) = bench.take()
    assert isinstance(connected, PeerConnected) and connected.peer == AGAIN
    assert is_usable(bench)


def test_pushes_in_flight_over_a_silent_link_are_waited_for_even_when_they_are_late() -> None:
    """The end of their handles, and not the end of the link, is what frees their blocks."""
    bench = Bench()
    link = bench.sender._links._links[TARGET.worker.agent_name]
    bench.open(1)
    push = bench.push(0)
    bench.agent.broken[push] = PENDING
    check = connect_again(bench)
    bench.agent.broken[check] = PENDING
    bench.clock.time_s += TIMEOUT_S + CHECK_S
    bench.rounds(4)
    assert not any(isinstance(event, PeerConnected | PeerConnectFailed) for event in bench.take())
    del bench.agent.broken[push]  # the network is back, and the check is the last to hear of it
    bench.rounds()
    bench.clock.time_s += CHECK_S - 0.1
    bench.rounds()
    del bench.agent.broken[check]
    bench.rounds(2)
    assert bench.sender._links._links[TARGET.worker.agent_name] is link  # it was not made anew
    events = bench.take()
    assert any(isinstance(event, PeerConnected) for event in events)
    assert not any(isinstance(event, PeerConnectFailed) for event in events)
    assert is_usable(bench)


def test_a_check_that_fails_breaks_the_link() -> None:
    bench = Bench()
    bench.break_handle(connect_again(bench))
    bench.rounds()
    (failed,) = bench.take()
    assert isinstance(failed, PeerConnectFailed) and "broken by the test" in failed.reason
    bench.sender.connect(ConnectPeer(AGAIN, bench.target.metadata(), bench.regions[1]))
    bench.rounds(3)
    assert [type(event) for event in bench.take()] == [PeerConnected]
