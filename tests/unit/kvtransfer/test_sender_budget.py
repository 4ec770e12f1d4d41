"""The sender where pushes wait for the budget of bytes in flight: two targets that poll when the test says."""

import numpy as np

from kvtransfer.budget import BudgetLimits
from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    ConnectPeer,
    CrowdChanged,
    Event,
    HandoffDrained,
    OpenHandoff,
    PeerConnected,
    PeerRemoved,
    Push,
    PushArrived,
    PushFailed,
)
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.receiver import Receiver
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.sender import Sender
from loopline.identity import Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import CloseState, PushRange
from loopline.wire.convert import decode_push_notice, encode_push_notice
from tests.unit.worker.clocks import OwnClock

BLOCK_BYTES, NUM_BLOCKS, TIMEOUT_S = 64, 16, 5.0
LIMITS = BudgetLimits(4 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES)
QUIET = CrowdChanged(frozenset(), False)


class Target:
    """A decode worker that lands what came only in `poll`."""

    def __init__(self, name: str, hub: LocalHub, clock: OwnClock) -> None:
        self.peer = Peer(WorkerId(name, 1), name, "host:1")
        self.agent = LocalAgent(self.peer.worker.agent_name, hub)
        self.region, self._arena = registered(self.agent)
        self.arrived: list[Event] = []
        self._receiver = Receiver(self.agent, decode_push_notice, clock, self.arrived.append)

    @property
    def name(self) -> str:
        return self.peer.worker.agent_name

    def poll(self) -> None:
        self._receiver.poll()

    def seqs(self) -> list[tuple[str, int]]:
        """(request, push) in the order of arrival."""
        notices = [event.notice for event in self.arrived if isinstance(event, PushArrived)]
        return [(notice.key.request_id, notice.range.seq) for notice in notices]


def registered(agent: LocalAgent) -> "tuple[RegionManifest, np.ndarray[tuple[int], np.dtype[np.uint8]]]":
    arena = np.zeros((NUM_BLOCKS + 1) * BLOCK_BYTES, dtype=np.uint8)
    span = ArenaSpan(
        base_address=arena.ctypes.data, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS, null_block=NUM_BLOCKS
    )
    return RegisteredRegion(agent, span).manifest, arena


class Bench:
    """A sender with a small budget and links to two targets."""

    def __init__(self) -> None:
        hub = LocalHub()
        self.clock = OwnClock()
        self.events: list[Event] = []
        self._agent = LocalAgent("loopline-source", hub)
        region, self._arena = registered(self._agent)
        self.sender = Sender(self._agent, region, encode_push_notice, TIMEOUT_S, self.clock, self.events.append, LIMITS)
        self.one, self.two = (Target(name, hub, self.clock) for name in ("one", "two"))
        for target in (self.one, self.two):
            self.sender.connect(ConnectPeer(target.peer, target.agent.metadata(), target.region))
        self.rounds(2, self.one, self.two)
        assert [type(event) for event in self.take()] == [PeerConnected] * 2

    def rounds(self, count: int, *polling: Target) -> None:
        for _ in range(count):
            for target in polling:
                target.poll()
            self.sender.poll()

    def handoff(self, name: str, target: Target, num_pushes: int, commit: bool = True) -> HandoffKey:
        """Pushes of one block each."""
        key = HandoffKey(name, 0)
        self.sender.open(OpenHandoff(key, target.peer.worker, 0, tuple(range(num_pushes))))
        for seq in range(num_pushes):
            self.sender.push(Push(key, PushRange(seq, seq, 1), (seq,)))
        if commit:
            self.sender.commit(CommitHandoff(key))
        return key

    def take(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        return events


def test_pushes_wait_in_order_and_the_commit_waits_for_them() -> None:
    bench = Bench()
    key = bench.handoff("r", bench.one, 5)
    assert bench.sender.budget.counts().num_waiting == 3
    assert bench.sender.is_busy
    bench.rounds(1)
    assert bench.take() == [CrowdChanged(frozenset({bench.one.name}), False)]
    bench.sender.push(Push(key, PushRange(5, 5, 1), (5,)))  # after the commit
    assert [event.cause for event in bench.take() if isinstance(event, PushFailed)] == [Cause.TOMBSTONED]
    bench.clock.time_s += 2.0
    bench.rounds(6, bench.one)
    events = bench.take()
    assert events[0] == QUIET and [type(event) for event in events[1:]] == [HandoffDrained]
    assert bench.one.seqs() == [("r", seq) for seq in range(5)]
    counts = bench.sender.budget.counts()
    assert (counts.in_flight_bytes, counts.num_waiting, counts.waited_s) == (0, 0, 6.0)


def test_a_target_that_lands_nothing_does_not_hold_up_another() -> None:
    bench = Bench()
    bench.handoff("stuck", bench.one, 6)
    bench.handoff("fine", bench.two, 9)
    bench.rounds(20, bench.two)
    assert bench.two.seqs() == [("fine", seq) for seq in range(9)]
    drained = [event.key.request_id for event in bench.take() if isinstance(event, HandoffDrained)]
    assert drained == ["fine"]
    assert bench.sender.budget.by_peer == {bench.one.name: 2 * BLOCK_BYTES}


def test_a_push_past_its_deadline_makes_room_and_what_waits_behind_it_is_dropped() -> None:
    bench = Bench()
    bench.handoff("late", bench.one, 4)
    bench.handoff("next", bench.one, 1)
    bench.rounds(1)
    bench.take()
    bench.clock.time_s += TIMEOUT_S
    bench.rounds(1)
    events = bench.take()
    causes = [event.cause for event in events if isinstance(event, PushFailed)]
    assert sorted(causes) == [Cause.TOMBSTONED] * 2 + [Cause.TRANSFER_TIMEOUT] * 2
    assert events[-1] == QUIET  # `next` is in flight, alone
    bench.rounds(2, bench.one)
    assert bench.one.seqs() == [("late", 0), ("late", 1), ("next", 0)]
    ends = [event for event in bench.take() if isinstance(event, CloseReport | HandoffDrained)]
    assert [(event.key.request_id, type(event)) for event in ends] == [("late", CloseReport), ("next", HandoffDrained)]


def test_a_closed_handoff_leaves_the_queue_before_its_report() -> None:
    bench = Bench()
    key = bench.handoff("r", bench.one, 4, commit=False)
    bench.sender.close(Close(key, "asker"))
    assert [type(event) for event in bench.take()] == [PushFailed, PushFailed]
    bench.rounds(3, bench.one)
    assert bench.take() == [CloseReport(key, CloseState.CLOSED, ("asker",))]
    assert bench.one.seqs() == [("r", 0), ("r", 1)]


def test_a_new_generation_drops_what_waits_of_the_old_one() -> None:
    bench = Bench()
    old = bench.handoff("r", bench.one, 4)
    bench.sender.open(OpenHandoff(HandoffKey("r", 1), bench.two.peer.worker, 0, (0,)))
    bench.sender.push(Push(HandoffKey("r", 1), PushRange(0, 0, 1), (0,)))
    bench.sender.commit(CommitHandoff(HandoffKey("r", 1)))
    assert [event.range.seq for event in bench.take() if isinstance(event, PushFailed)] == [2, 3]
    bench.rounds(3, bench.one, bench.two)
    ends = [event.key for event in bench.take() if isinstance(event, CloseReport | HandoffDrained)]
    assert sorted(ends) == [old, HandoffKey("r", 1)]


def test_a_removed_peer_leaves_the_queue() -> None:
    bench = Bench()
    key = bench.handoff("r", bench.one, 4)
    other = bench.handoff("s", bench.two, 3)
    bench.sender.remove_peer(bench.one.peer.worker)
    events = bench.take()
    assert len([event for event in events if isinstance(event, PushFailed) and event.key == key]) == 4
    assert CloseReport(key, CloseState.FAILED) in events and PeerRemoved(bench.one.peer.worker) in events
    bench.rounds(4, bench.two)
    assert [event.key for event in bench.take() if isinstance(event, HandoffDrained)] == [other]
    assert bench.sender.budget.total == bench.sender.budget.counts().num_waiting == 0


def test_a_wrong_push_that_waited_closes_its_own_handoff_only() -> None:
    bench = Bench()
    bench.handoff("first", bench.one, 2)
    bad, good = HandoffKey("bad", 0), bench.handoff("good", bench.one, 1)
    bench.sender.open(OpenHandoff(bad, bench.one.peer.worker, 0, (0,)))
    for seq in (0, 0, 1):
        bench.sender.push(Push(bad, PushRange(seq, seq, 1), (0,)))  # one twice, one outside of the grant
    bench.rounds(8, bench.one)
    failed = [(event.range.seq, event.cause) for event in bench.take() if isinstance(event, PushFailed)]
    assert failed == [(0, Cause.TOMBSTONED), (1, Cause.TRANSFER_FAILED)]
    assert ("good", 0) in bench.one.seqs() and bench.one.seqs().count(("bad", 0)) == 1
    assert bench.sender.budget.counts().in_flight_bytes == 0
    assert good not in [event.key for event in bench.events if isinstance(event, CloseReport)]
