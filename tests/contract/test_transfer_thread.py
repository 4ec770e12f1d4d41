"""The transfer thread with real copies: two threads in one process, over the local transport and over NIXL; and one
NIXL target in a process of its own that is stopped."""

import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest

from kvtransfer.agent import TransferAgent
from kvtransfer.commands import (
    Close,
    CloseReport,
    CommitHandoff,
    ConnectPeer,
    CrowdChanged,
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
    Quiesce,
    Quiesced,
    RemovePeer,
    TransferThreadFailed,
)
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.region import ArenaSpan
from kvtransfer.transfer_thread import NoticeCodec, TransferThread
from kvtransfer.verify import DIGEST_BYTES, digest_of
from loopline.clock import MonotonicClock
from loopline.identity import Cause, HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import CloseState, PushNotice, PushRange
from loopline.settings import TransferSettings
from loopline.wire.convert import decode_push_notice, encode_push_notice
from tests.contract.test_transport_processes import SIZE, OtherProcess

BLOCK_BYTES, NUM_BLOCKS = 512, 64
DEADLINE_S = 20.0
UCX = (("TLS", "tcp"), ("NET_DEVICES", "lo"))
CODEC = NoticeCodec(encode_push_notice, decode_push_notice)
EventT = TypeVar("EventT")


class Side:
    """A worker's transfer thread, its arena and every event so far."""

    def __init__(self, make: Callable[[str], TransferAgent], seed: int, settings: TransferSettings) -> None:
        worker = WorkerId(str(uuid.uuid4()), 1)
        self.peer = Peer(worker, f"worker-{seed}", "127.0.0.1:1")
        size = (NUM_BLOCKS + 1) * BLOCK_BYTES
        self.arena = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        span = ArenaSpan(
            base_address=self.arena.ctypes.data,
            block_bytes=BLOCK_BYTES,
            num_blocks=NUM_BLOCKS,
            null_block=NUM_BLOCKS,
        )
        self.events: list[Event] = []
        self._news = threading.Condition()
        self.thread = TransferThread(
            lambda: make(worker.agent_name),
            span,
            settings=settings,
            codec=CODEC,
            clock=MonotonicClock(),
            on_event=self._take,
            read_blocks=self.read_blocks if settings.verify == "digest" else None,
        )
        self.endpoint = self.thread.start()

    def _take(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, kind: type[EventT], count: int = 1) -> list[EventT]:
        """Wait until `count` events of a kind have come, and return all of them."""
        with self._news:
            found = self._news.wait_for(lambda: len(self.of(kind)) >= count, DEADLINE_S)
            assert found, f"no {count} {kind.__name__} among {self.events}"
            return self.of(kind)

    def wait_last(self, event: Event) -> None:
        """Wait until the last event of its kind is this one."""
        with self._news:
            assert self._news.wait_for(lambda: self.of(type(event))[-1:] == [event], DEADLINE_S), self.of(type(event))

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.events if isinstance(event, kind)]

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.block(index)) for index in block_ids]

    def block(self, index: int) -> bytes:
        return self.arena[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES].tobytes()


class Sides:
    """Makes sides of one transport and stops them."""

    def __init__(self, make: Callable[[str], TransferAgent]) -> None:
        self._make = make
        self._sides: list[Side] = []

    def start(self, push_timeout_s: float = 30.0, limit_blocks: int = 1024, verify: str = "off") -> Side:
        limit = limit_blocks * BLOCK_BYTES
        settings = TransferSettings(push_timeout_s=push_timeout_s, in_flight_limit_bytes=limit, verify=verify)
        self._sides.append(Side(self._make, len(self._sides), settings))
        return self._sides[-1]

    def connected(
        self, push_timeout_s: float = 30.0, limit_blocks: int = 1024, verify: str = "off"
    ) -> tuple[Side, Side]:
        source, target = self.start(push_timeout_s, limit_blocks, verify), self.start()
        source.thread.submit(ConnectPeer(target.peer, target.endpoint.metadata, target.endpoint.region))
        source.wait(PeerConnected)
        return source, target

    def stop(self) -> None:
        for side in self._sides:
            assert side.thread.stop()


@pytest.fixture(params=["local", "nixl"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    for name, value in UCX:
        monkeypatch.setenv(f"UCX_{name}", value)
    hub = LocalHub()

    def make(name: str) -> TransferAgent:
        return LocalAgent(name, hub) if request.param == "local" else NixlAgent(name, TransferSettings(ucx=UCX))

    made = Sides(make)
    yield made
    made.stop()


def key(request: str, generation: int = 0) -> HandoffKey:
    return HandoffKey(request, generation)


def test_a_handoff_of_two_pushes(sides: Sides) -> None:
    source, target = sides.connected()
    connected = source.of(PeerConnected)[0]
    assert connected.peer == target.peer
    assert connected.bytes_per_s > 0
    first, second = PushRange(0, 2, 3), PushRange(1, 5, 1)
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 2, (10, 11, 20, 40)))
    source.thread.submit(Push(key("r"), first, (1, 2, 3)))
    source.thread.submit(Push(key("r"), second, (7,)))
    source.thread.submit(CommitHandoff(key("r")))
    cost = source.wait(HandoffDrained)[0].cost
    assert (cost.pushes, cost.descriptors, cost.num_bytes) == (2, 3, 4 * BLOCK_BYTES)  # 10-11, 20, 40
    arrived = target.wait(PushArrived, 2)
    assert {event.notice for event in arrived} == {PushNotice(key("r"), first), PushNotice(key("r"), second)}
    assert {event.agent_name for event in arrived} == {source.peer.worker.agent_name}
    assert [target.block(block) for block in (10, 11, 20, 40)] == [source.block(block) for block in (1, 2, 3, 7)]
    assert source.thread.in_flight_bytes() == 0
    source.thread.submit(Close(key("r"), "late"))
    assert source.wait(CloseReport) == [CloseReport(key("r"), CloseState.CLOSED, ("late",))]


def test_a_notice_carries_the_digest_of_what_was_sent(sides: Sides) -> None:
    """Equal to that of what has landed, until one byte there is changed."""
    source, target = sides.connected(verify="digest")
    targets = (10, 11, 20)
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 0, targets))
    source.thread.submit(Push(key("r"), PushRange(0, 0, 3), (1, 2, 3)))
    notice = target.wait(PushArrived)[0].notice
    assert len(notice.digest) == DIGEST_BYTES
    assert digest_of(target.read_blocks(targets)) == notice.digest
    target.arena[20 * BLOCK_BYTES + 7] ^= 1
    assert digest_of(target.read_blocks(targets)) != notice.digest
    assert target.thread.ignored() == ()


def test_connecting_again_repeats_the_answer(sides: Sides) -> None:
    source, target = sides.connected()
    source.thread.submit(ConnectPeer(target.peer, target.endpoint.metadata, target.endpoint.region))
    first, again = source.wait(PeerConnected, 2)
    assert first == again
    assert target.of(PushArrived) == []  # warm-up notices are dropped
    assert target.thread.ignored() == ()


def test_what_cannot_be_opened_is_refused(sides: Sides) -> None:
    source, target = sides.connected()
    stranger = WorkerId("stranger", 1)
    source.thread.submit(OpenHandoff(key("r"), stranger, 0, (1,)))
    source.thread.submit(Close(key("closed", 3), "asker"))
    source.thread.submit(OpenHandoff(key("closed", 2), target.peer.worker, 0, (1,)))
    source.thread.submit(OpenHandoff(key("closed", 3), target.peer.worker, 0, (1,)))
    refused = source.wait(HandoffRefused, 3)
    assert [event.cause for event in refused] == [Cause.PEER_LOST, Cause.STALE, Cause.TOMBSTONED]
    assert source.of(CloseReport) == [CloseReport(key("closed", 3), CloseState.CLOSED, ("asker",))]


def test_after_close_nothing_is_posted(sides: Sides) -> None:
    source, target = sides.connected()
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 0, (1, 2)))
    source.thread.submit(Push(key("r"), PushRange(0, 0, 1), (1,)))
    source.thread.submit(Close(key("r"), "one"))
    source.thread.submit(Push(key("r"), PushRange(1, 1, 1), (2,)))
    source.thread.submit(CommitHandoff(key("r")))
    source.thread.submit(Close(key("r"), "two"))
    waiters = [waiter for report in source.wait(CloseReport) for waiter in report.waiters]
    if waiters != ["one", "two"]:
        source.wait(CloseReport, 2)
    assert source.of(PushFailed)[0].range == PushRange(1, 1, 1)
    assert source.of(PushFailed)[0].cause is Cause.TOMBSTONED
    assert source.of(HandoffDrained) == []
    assert len(target.wait(PushArrived)) == 1


def test_a_wrong_push_closes_its_own_handoff_only(sides: Sides) -> None:
    source, target = sides.connected()
    source.thread.submit(OpenHandoff(key("bad"), target.peer.worker, 0, (NUM_BLOCKS,)))
    source.thread.submit(OpenHandoff(key("good"), target.peer.worker, 0, (5,)))
    source.thread.submit(Push(key("bad"), PushRange(0, 0, 1), (1,)))
    source.thread.submit(Push(key("good"), PushRange(0, 0, 1), (1,)))
    source.thread.submit(CommitHandoff(key("good")))
    source.wait(HandoffDrained)
    assert source.wait(CloseReport)[0] == CloseReport(key("bad"), CloseState.CLOSED)
    assert source.of(PushFailed)[0].cause is Cause.TRANSFER_FAILED
    assert source.of(TransferThreadFailed) == []


def test_a_dead_target_fails_its_handoffs_and_the_thread_goes_on(sides: Sides) -> None:
    source, target = sides.connected()
    other = sides.start()
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 0, (1, 2)))
    source.thread.submit(Push(key("r"), PushRange(0, 0, 1), (1,)))
    target.wait(PushArrived)
    assert target.thread.stop()
    source.thread.submit(Push(key("r"), PushRange(1, 1, 1), (2,)))
    assert source.wait(PushFailed)[0].cause is Cause.TRANSFER_FAILED
    assert source.wait(CloseReport)[0].state in (CloseState.FAILED, CloseState.CLOSED)
    source.thread.submit(RemovePeer(target.peer.worker))
    source.wait(PeerRemoved)
    source.thread.submit(ConnectPeer(other.peer, other.endpoint.metadata, other.endpoint.region))
    source.wait(PeerConnected, 2)
    source.thread.submit(OpenHandoff(key("r", 1), other.peer.worker, 0, (1,)))
    source.thread.submit(Push(key("r", 1), PushRange(0, 0, 1), (1,)))
    source.thread.submit(CommitHandoff(key("r", 1)))
    source.wait(HandoffDrained)
    assert source.thread.in_flight_bytes() == 0


def test_removing_a_peer_ends_its_idle_handoffs(sides: Sides) -> None:
    source, target = sides.connected()
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 0, (1,)))
    source.thread.submit(RemovePeer(target.peer.worker))
    source.wait(PeerRemoved)
    assert source.of(CloseReport) == [CloseReport(key("r"), CloseState.CLOSED)]
    source.thread.submit(OpenHandoff(key("s"), target.peer.worker, 0, (1,)))
    assert source.wait(HandoffRefused)[0].cause is Cause.PEER_LOST


def test_a_peer_of_another_geometry_is_not_connected(sides: Sides) -> None:
    source, target = sides.start(), sides.start()
    region = target.endpoint.region
    other = type(region)(region.base_address, region.num_blocks, region.block_bytes * 2, "DRAM", 0, region.null_block)
    source.thread.submit(ConnectPeer(target.peer, target.endpoint.metadata, other))
    assert "1024" in source.wait(PeerConnectFailed)[0].reason
    source.thread.submit(ConnectPeer(target.peer, b"garbage", region))
    source.wait(PeerConnectFailed, 2)
    source.thread.submit(ConnectPeer(target.peer, target.endpoint.metadata, region))
    source.wait(PeerConnected)


def test_quiescence_is_reported(sides: Sides) -> None:
    source, target = sides.connected()
    target.thread.submit(Quiesce(source.peer.worker))
    assert target.wait(Quiesced) == [Quiesced(source.peer.worker)]


def test_a_raising_callback_does_not_end_the_thread(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    source, target = sides.connected()
    calls: list[Event] = []
    take = source._take

    def fail_once(event: Event) -> None:
        calls.append(event)
        if len(calls) == 1:
            raise RuntimeError("the callee is broken")
        take(event)

    source.thread._on_event = fail_once
    source.thread.submit(Close(key("a")))
    source.thread.submit(Close(key("b")))
    assert source.wait(CloseReport) == [CloseReport(key("b"), CloseState.CLOSED)]
    assert "CloseReport" in caplog.text
    target.thread.submit(Close(key("c")))
    target.wait(CloseReport)


def hand_off(source: Side, target: Peer, name: str, num_pushes: int) -> None:
    """Pushes of one block each, into the same block numbers."""
    source.thread.submit(OpenHandoff(key(name), target.worker, 0, tuple(range(num_pushes))))
    for seq in range(num_pushes):
        source.thread.submit(Push(key(name), PushRange(seq, seq, 1), (seq,)))
    source.thread.submit(CommitHandoff(key(name)))


def test_pushes_beyond_the_budget_wait_and_arrive(sides: Sides) -> None:
    source, target = sides.connected(limit_blocks=4)
    seen: list[int] = []
    take = target._take

    def look(event: Event) -> None:
        seen.append(source.thread.in_flight_bytes())
        take(event)

    target.thread._on_event = look
    assert source.endpoint.max_push_bytes == 2 * BLOCK_BYTES
    hand_off(source, target.peer, "r", 40)
    assert source.wait(HandoffDrained)[0].cost.pushes == 40
    target.wait(PushArrived, 40)
    assert max(seen) <= 2 * BLOCK_BYTES  # one peer's share
    assert [target.block(index) for index in range(40)] == [source.block(index) for index in range(40)]
    counts = source.thread.budget_counts()
    assert (counts.in_flight_bytes, counts.limit_bytes, counts.num_waiting) == (0, 4 * BLOCK_BYTES, 0)


def test_a_push_larger_than_the_whole_budget_goes_alone(sides: Sides) -> None:
    source, target = sides.connected(limit_blocks=2)
    source.thread.submit(OpenHandoff(key("r"), target.peer.worker, 0, tuple(range(20))))
    for seq in range(2):
        blocks = range(10 * seq, 10 * seq + 10)
        source.thread.submit(Push(key("r"), PushRange(seq, blocks[0], 10), tuple(blocks)))
    source.thread.submit(CommitHandoff(key("r")))
    source.wait(HandoffDrained)
    target.wait(PushArrived, 2)
    assert [target.block(index) for index in range(20)] == [source.block(index) for index in range(20)]


@pytest.mark.parametrize("sides", ["nixl"], indirect=True)
def test_a_stopped_process_does_not_hold_up_another_target(sides: Sides) -> None:
    source, target = sides.connected(limit_blocks=4)
    worker = WorkerId(str(uuid.uuid4()), 1)
    process = OtherProcess(worker.agent_name)
    try:
        stopped, num_pushes = Peer(worker, "stopped", "127.0.0.1:1"), 12
        process.say("describe")
        told = process.hear()
        region = RegionManifest(told["address"], SIZE // BLOCK_BYTES - 1, BLOCK_BYTES, "DRAM", 0, NUM_BLOCKS)
        process.say("expect 2")
        source.thread.submit(ConnectPeer(stopped, bytes.fromhex(told["metadata"]), region))
        source.wait(PeerConnected, 2)
        process.hear()
        process.signal(signal.SIGSTOP)
        hand_off(source, stopped, "stuck", num_pushes)
        hand_off(source, target.peer, "fine", num_pushes)
        assert [event.key for event in source.wait(HandoffDrained)] == [key("fine")]
        assert source.thread.in_flight_bytes(worker) == 2 * BLOCK_BYTES
        assert source.thread.budget_counts().num_waiting == num_pushes - 2
        source.wait_last(CrowdChanged(frozenset({worker.agent_name}), False))
        process.say(f"expect {num_pushes}")
        process.signal(signal.SIGCONT)
        assert [event.key for event in source.wait(HandoffDrained, 2)] == [key("fine"), key("stuck")]
        answer = process.hear()
        assert len(answer["notices"]) == num_pushes
        # Beside the blocks the warm-up has written, null block to null block.
        blocks = [source.block(index) for index in (*range(num_pushes), NUM_BLOCKS)]
        assert answer["sum"] == sum(sum(block) for block in blocks)
    finally:
        process.end()
