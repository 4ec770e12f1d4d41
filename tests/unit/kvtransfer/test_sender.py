"""The sender without its thread: a clock that the test owns, a target that polls when the test says, and handles that
can be made to fail. No other process, no waiting."""

import numpy as np
import pytest

from kvtransfer.agent import PENDING, Handle, HandleState, HandleStatus
from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    ConnectPeer,
    Event,
    HandoffDrained,
    HandoffRefused,
    OpenHandoff,
    PeerConnected,
    PeerConnectFailed,
    PeerRemoved,
    Push,
    PushArrived,
    PushFailed,
    Quiesced,
    TransferCost,
)
from kvtransfer.links import WARM_UP_NOTICE
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.manifest import null_descriptors
from kvtransfer.push_counts import PushResult
from kvtransfer.receiver import QUIET_ROUNDS, QUIET_S, Receiver
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.sender import MAX_WAITERS, Sender
from loopline.errors import InvariantBroken
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import CloseState, PushNotice, PushRange
from loopline.wire.convert import decode_push_notice, encode_push_notice

BLOCK_BYTES, NUM_BLOCKS, TIMEOUT_S = 64, 16, 5.0
KEY = HandoffKey("r", 1)
TARGET = Peer(WorkerId("target", 1), "decode-0", "host:1")


class OwnClock:
    """Time as the test sets it."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class FailingAgent(LocalAgent):
    """A local agent whose handles fail when the test says so. What was posted may still land, as on a network."""

    def __init__(self, name: str, hub: LocalHub) -> None:
        super().__init__(name, hub)
        self.broken: dict[Handle, HandleStatus] = {}

    def poll(self, handle: Handle) -> HandleStatus:
        return self.broken.get(handle) or super().poll(handle)


class Bench:
    """A sender with a link to a target, and every event of both sides."""

    def __init__(self, connect: bool = True) -> None:
        hub = LocalHub()
        self.clock = OwnClock()
        self.agent, self.target = FailingAgent("loopline-source", hub), LocalAgent(TARGET.worker.agent_name, hub)
        self.arenas = [np.zeros((NUM_BLOCKS + 1) * BLOCK_BYTES, dtype=np.uint8) for _ in range(2)]
        self.regions = [
            RegisteredRegion(
                agent,
                ArenaSpan(
                    base_address=arena.ctypes.data,
                    block_bytes=BLOCK_BYTES,
                    num_blocks=NUM_BLOCKS,
                    null_block=NUM_BLOCKS,
                ),
            ).manifest
            for agent, arena in zip((self.agent, self.target), self.arenas, strict=True)
        ]
        self.events: list[Event] = []
        self.arrived: list[Event] = []
        self.receiver = Receiver(self.target, decode_push_notice, self.clock, self.arrived.append)
        self.sender = Sender(self.agent, self.regions[0], encode_push_notice, TIMEOUT_S, self.clock, self.events.append)
        if connect:
            self.connect()

    def connect(self) -> None:
        self.sender.connect(ConnectPeer(TARGET, self.target.metadata(), self.regions[1]))
        self.rounds(2)
        assert isinstance(self.events.pop(), PeerConnected)

    def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            self.receiver.poll()
            self.sender.poll()

    def open(self, num_blocks: int, key: HandoffKey = KEY) -> None:
        self.sender.open(OpenHandoff(key, TARGET.worker, 0, tuple(range(num_blocks))))

    def push(self, seq: int, key: HandoffKey = KEY) -> Handle:
        """Push block `seq` of the request as push `seq`."""
        before = set(self.agent._writes)
        self.sender.push(Push(key, PushRange(seq, seq, 1), (seq + 5,)))
        (handle,) = set(self.agent._writes) - before
        return handle

    def break_handle(self, handle: Handle) -> None:
        self.agent.broken[handle] = HandleStatus(HandleState.FAILED, "broken by the test")

    def take(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        return events


def test_the_cost_counts_one_descriptor_a_run() -> None:
    bench = Bench()
    bench.sender.open(OpenHandoff(KEY, TARGET.worker, 4, (0, 1, 2, 9, 10, 3)))
    bench.sender.push(Push(KEY, PushRange(0, 4, 3), (5, 6, 7)))  # one run
    bench.sender.push(Push(KEY, PushRange(1, 7, 3), (8, 9, 2)))  # 9-10, then 3
    assert bench.sender.budget.total == 6 * BLOCK_BYTES
    bench.rounds()
    bench.sender.commit(CommitHandoff(KEY))
    assert bench.take() == [HandoffDrained(KEY, TransferCost(2, 3, 6 * BLOCK_BYTES, "local"))]
    assert (bench.sender.budget.total, bench.sender.budget.by_peer) == (0, {})


def test_one_failed_push_waits_for_its_siblings() -> None:
    bench = Bench()
    bench.open(4)
    handles = [bench.push(seq) for seq in range(4)]
    bench.break_handle(handles[1])
    bench.sender.poll()
    failed, broken = bench.take()
    assert failed == PushFailed(KEY, PushRange(1, 1, 1), Cause.TRANSFER_FAILED, "broken by the test")
    assert broken == PeerConnectFailed(TARGET, "broken by the test")
    bench.sender.close(Close(KEY, "asker"))
    bench.sender.push(Push(KEY, PushRange(4, 0, 1), (1,)))
    assert [type(event) for event in bench.take()] == [PushFailed]
    assert bench.sender.budget.total == 3 * BLOCK_BYTES
    bench.rounds()
    assert bench.take() == [CloseReport(KEY, CloseState.FAILED, ("asker",))]


def test_the_undisturbed_path_still_ends_at_once() -> None:
    bench = Bench()
    bench.open(4)
    for seq in range(4):
        bench.push(seq)
    bench.sender.commit(CommitHandoff(KEY))
    assert bench.take() == []
    bench.rounds()
    assert [type(event) for event in bench.take()] == [HandoffDrained]
    assert len(bench.arrived) == 4


def test_a_late_push_leaves_the_budget_and_its_end_is_waited_for() -> None:
    bench = Bench()
    bench.open(2)
    bench.push(0)
    bench.clock.time_s += TIMEOUT_S - 0.1
    bench.sender.poll()
    assert bench.take() == []
    bench.clock.time_s += 0.2
    bench.sender.poll()
    bench.sender.poll()
    assert bench.take() == [PushFailed(KEY, PushRange(0, 0, 1), Cause.TRANSFER_TIMEOUT, "not terminal after 5 s")]
    assert bench.sender.budget.total == 0
    assert not bench.sender.is_busy
    bench.sender.close(Close(KEY, "asker"))
    assert bench.take() == []  # still in flight: no answer
    bench.rounds()
    assert bench.take() == [CloseReport(KEY, CloseState.CLOSED, ("asker",))]  # it did arrive: nothing is unknown


def test_a_late_push_that_fails_in_the_end_is_reported_once() -> None:
    bench = Bench()
    bench.open(1)
    handle = bench.push(0)
    bench.clock.time_s += TIMEOUT_S
    bench.sender.poll()
    bench.break_handle(handle)
    bench.sender.poll()
    assert [type(event) for event in bench.take()] == [PushFailed, PeerConnectFailed, CloseReport]


def test_a_broken_link_takes_no_handoff_until_it_is_made_anew() -> None:
    bench = Bench()
    bench.open(3)
    first, slow = bench.push(0), bench.push(1)
    bench.break_handle(first)
    bench.sender.poll()
    bench.take()
    bench.open(1, HandoffKey("s", 0))
    assert bench.take() == [HandoffRefused(HandoffKey("s", 0), Cause.PEER_LOST, "no link to loopline-target")]
    bench.sender.connect(ConnectPeer(TARGET, bench.target.metadata(), bench.regions[1]))
    bench.sender.poll()
    assert bench.agent.poll(slow).state is HandleState.PENDING  # making it anew would have failed this one
    bench.rounds(4)
    assert [type(event) for event in bench.take()] == [CloseReport, PeerConnected]


def test_a_push_that_never_ends_holds_up_a_broken_link_no_longer_than_its_deadline() -> None:
    bench = Bench()
    other = HandoffKey("s", 0)
    bench.open(1)
    bench.open(2, other)
    bench.break_handle(bench.push(0))
    endless = bench.push(1, other)
    bench.agent.broken[endless] = PENDING
    bench.rounds(4)
    bench.take()
    bench.sender.connect(ConnectPeer(TARGET, bench.target.metadata(), bench.regions[1]))
    bench.rounds(4)
    assert bench.take() == []
    bench.clock.time_s += TIMEOUT_S + 1
    bench.rounds(4)
    late, connected = bench.take()
    assert (type(late), type(connected)) == (PushFailed, PeerConnected)
    bench.break_handle(endless)
    bench.rounds()
    assert bench.take() == [CloseReport(other, CloseState.FAILED)]  # and the new link is not broken by it
    bench.open(1, HandoffKey("t", 0))
    assert bench.take() == []


def test_a_warm_up_without_an_answer_fails_and_can_be_tried_again() -> None:
    bench = Bench(connect=False)
    bench.sender.connect(ConnectPeer(TARGET, bench.target.metadata(), bench.regions[1]))
    assert bench.sender.is_busy
    bench.clock.time_s += TIMEOUT_S + 1
    bench.sender.poll()
    assert bench.take() == [PeerConnectFailed(TARGET, "no answer to the warm-up write in 5 s")]
    bench.connect()


def test_a_connect_while_one_is_under_way_adds_nothing() -> None:
    bench = Bench(connect=False)
    for _ in range(3):
        bench.sender.connect(ConnectPeer(TARGET, bench.target.metadata(), bench.regions[1]))
    bench.rounds(3)
    assert [type(event) for event in bench.take()] == [PeerConnected]


def test_warm_up_writes_touch_the_null_block_only() -> None:
    bench = Bench(connect=False)
    bench.arenas[0][:] = 7
    bench.connect()
    assert set(bench.arenas[1][: NUM_BLOCKS * BLOCK_BYTES].tolist()) == {0}
    assert set(bench.arenas[1][NUM_BLOCKS * BLOCK_BYTES :].tolist()) == {7}
    assert bench.arrived == []


def test_removing_a_peer_ends_everything_to_it() -> None:
    bench = Bench()
    bench.open(1)
    bench.push(0)
    bench.open(1, HandoffKey("idle", 0))
    bench.sender.remove_peer(TARGET.worker)
    events = bench.take()
    assert [type(event) for event in events] == [PushFailed, CloseReport, CloseReport, PeerRemoved]
    assert events[1] == CloseReport(KEY, CloseState.FAILED)
    assert events[2] == CloseReport(HandoffKey("idle", 0), CloseState.CLOSED)


@pytest.mark.parametrize("part", [PushRange(0, 1, 1), PushRange(0, 0, 2), PushRange(0, 0, 0)])
def test_a_push_outside_of_the_grant_posts_nothing_and_closes(part: PushRange) -> None:
    bench = Bench()
    bench.open(1)
    bench.sender.push(Push(KEY, part, (1,) * part.num_blocks))
    failed, closed = bench.take()
    assert isinstance(failed, PushFailed)
    assert failed.cause is Cause.TRANSFER_FAILED
    assert closed == CloseReport(KEY, CloseState.CLOSED)
    bench.rounds()
    assert bench.arrived == []


def test_equal_askers_are_answered_once() -> None:
    bench = Bench()
    bench.open(1)
    bench.push(0)
    for waiter in ("a", "b", "a"):
        bench.sender.close(Close(KEY, waiter))
    bench.rounds()
    assert bench.take() == [CloseReport(KEY, CloseState.CLOSED, ("a", "b"))]


def test_garbage_notices_are_counted() -> None:
    bench = Bench()
    bench.open(1)
    bench.push(0)
    sides = [null_descriptors(region, 1) for region in bench.regions]
    for notice in (b"garbage", b"\xff\xff", WARM_UP_NOTICE):
        bench.agent.post_write(TARGET.worker.agent_name, *sides, notice)
    bench.rounds()
    assert bench.arrived == [PushArrived("loopline-source", PushNotice(KEY, PushRange(0, 0, 1)))]
    assert bench.receiver.ignored() == (("invalid", 2),)


def test_quiescence_needs_rounds_and_time_and_starts_anew_when_something_comes() -> None:
    bench = Bench()
    source = WorkerId("source", 1)
    bench.receiver.quiesce(source)
    bench.rounds(QUIET_ROUNDS + 1)
    assert bench.arrived == []  # enough rounds, no time
    bench.clock.time_s += QUIET_S + 1
    bench.open(1)
    bench.push(0)
    bench.rounds()
    assert [type(event) for event in bench.arrived] == [PushArrived]
    bench.clock.time_s += QUIET_S + 1
    bench.rounds(QUIET_ROUNDS - 1)
    assert len(bench.arrived) == 1  # enough time, too few rounds
    bench.rounds()
    assert bench.arrived[1:] == [Quiesced(source)]


@pytest.mark.parametrize(
    "change", [{"null_block": 3}, {"num_blocks": 0}, {"block_bytes": 0}, {"base_address": 0}, {"memory_kind": "HBM"}]
)
def test_a_span_that_is_no_arena_is_a_bug(change: dict[str, int]) -> None:
    span = {"base_address": 64, "block_bytes": 64, "num_blocks": 4, "null_block": 4, "memory_kind": "DRAM"}
    with pytest.raises(InvariantBroken):
        ArenaSpan(**{**span, **change})


def test_askers_of_a_close_that_hangs_do_not_pile_up() -> None:
    bench = Bench()
    bench.open(1)
    handle = bench.push(0)
    for number in range(100):
        bench.sender.close(Close(KEY, f"asker {number}"))
    bench.break_handle(handle)
    bench.sender.poll()
    (report,) = [event for event in bench.take() if isinstance(event, CloseReport)]
    assert report.waiters == tuple(f"asker {number}" for number in range(100 - MAX_WAITERS, 100))


def test_pushes_are_counted_by_how_they_ended_with_their_bytes_and_seconds() -> None:
    bench = Bench()
    bench.open(4)
    bench.push(0)
    bench.clock.time_s += 0.25
    bench.rounds()
    failed = bench.push(1)
    bench.push(2)  # late
    bench.break_handle(failed)
    bench.sender.poll()
    bench.clock.time_s += TIMEOUT_S + 0.1
    bench.sender.poll()
    bench.rounds()  # its end comes after all, and counts for nothing
    counts = bench.sender.push_counts
    assert counts.results == {PushResult.DONE: 1, PushResult.FAILED: 1, PushResult.LATE: 1}
    assert counts.num_bytes == BLOCK_BYTES
    assert (counts.seconds.count, counts.seconds.sum) == (1, pytest.approx(0.25))


def test_a_push_that_cannot_be_posted_is_a_failed_one() -> None:
    bench = Bench()
    bench.open(1)
    bench.sender.push(Push(KEY, PushRange(0, 5, 1), (1,)))
    assert bench.sender.push_counts.results == {PushResult.FAILED: 1}
