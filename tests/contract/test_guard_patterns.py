"""What a writer that was stopped or killed in the middle of a push may still write: its quarantined blocks, and nothing
that was handed out again. A real decode core with its ledger and transfer thread, a writer in a process of its own, and
NIXL over tcp between them, where it is the receiver's own polls that land bytes.

Every block that the writer has no right to (any more) holds a guard pattern.
"""

import contextlib
import queue
import signal
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_worker.handoff_in import DecodePorts, HandoffIn
from decode_worker.policy import DecodePolicy
from kvtransfer.agent import TransferAgent
from kvtransfer.commands import Quiesced, TransferThreadFailed
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.receiver import QUIET_ROUNDS
from kvtransfer.transfer_thread import TransferThread
from loopline.clock import MonotonicClock
from loopline.engine.engine import Engine
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.kv.block_pool import ids_of
from loopline.messages import (
    Bind,
    Cancel,
    Granted,
    PeerGone,
    PushNotice,
    PushRange,
    Reserve,
    Reserved,
    WorkerMessage,
)
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings, FaultSettings, SchedulerSettings, TransferSettings
from loopline.wire.convert import encode_push_notice
from tests.contract.test_transfer_thread import CODEC, UCX
from tests.contract.test_transport_processes import OtherProcess
from tests.support.cluster import wait_until
from tests.support.golden import MODELS
from tests.support.pair import span_of
from tests.unit.worker.clocks import OwnClock

NUM_BLOCKS, BLOCK_SIZE = 64, 16
TAKEN_BLOCKS = 40
"""Of the request whose writer goes wrong: 31 MB, far more than a socket takes while its reader stands still."""
GUARD = 0xA5
QUIET_POLLS = 300
DEADLINE_S = 30.0
pytestmark = pytest.mark.timeout(300)


OTHER_WRITER = Peer(WorkerId("other", 1), "other", "127.0.0.1:2")
"""Who never writes."""


class CountingAgent(NixlAgent):
    """NIXL, and how often it was really polled."""

    num_polls = 0

    def take_notices(self) -> list[tuple[str, bytes]]:
        self.num_polls += 1
        return super().take_notices()


class Target:
    """A decode worker's engine core, ledger and transfer thread; the transport stands still from the first notice until
    `go_on`. The test's thread is the engine thread: events are handled in `pump`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: list[WorkerMessage] = []
        self.agent: CountingAgent | None = None
        self.polls_when_quiet = -1
        self.num_failures = 0
        self._silence = OwnClock()
        self._inbox: queue.Queue[object] = queue.Queue()
        settings = TransferSettings(ucx=UCX)
        clock = MonotonicClock()

        def make_agent() -> TransferAgent:
            self.agent = CountingAgent(f"target-{uuid.uuid4()}", settings)
            return FaultyAgent(self.agent, (FaultSettings(do="stop_polling", seconds=1.0),), self._silence)

        self.thread = TransferThread(
            make_agent, span_of(engine), settings=settings, codec=CODEC, clock=clock, on_event=self._take
        )
        self.metadata = self.thread.start().metadata.hex()
        ports = DecodePorts(
            self.said.append, self.thread.submit, lambda key, writer: None, lambda: WorkerId("target", 1)
        )
        self.core = HandoffIn(engine, ports, clock)
        self.bytes: NDArray[np.uint8] = engine.arena.tensor.numpy().view(np.uint8).reshape(NUM_BLOCKS + 1, -1)
        self.bytes[:] = GUARD

    def _take(self, event: object) -> None:
        """In the transfer thread."""
        if isinstance(event, Quiesced):
            self.polls_when_quiet = self.num_polls()
        self.num_failures += isinstance(event, TransferThreadFailed)
        self._inbox.put(event)

    def go_on(self) -> None:
        """Poll again."""
        self._silence.time_s += 1.0

    def stand_still(self) -> None:
        """Until the transfer thread has said again, and again after a second, that it cannot poll."""
        before = self.num_failures
        self.pump(lambda: self.num_failures >= before + 2, "reports of a transport that stands still")

    def num_polls(self) -> int:
        assert self.agent is not None
        return self.agent.num_polls

    def pump(self, until: Callable[[], object], what: str) -> None:
        """Handle what has come in until something is so."""

        def is_so() -> object:
            while not self._inbox.empty():
                self.core.handle(self._inbox.get())
            return until()

        wait_until(is_so, what, DEADLINE_S)

    def poll_on(self) -> None:
        """Until the agent was polled many times more."""
        before = self.num_polls()
        self.pump(lambda: self.num_polls() >= before + QUIET_POLLS, "more polls")

    def reserve(self, key: HandoffKey, num_blocks: int) -> Cause | None:
        """Hold that many blocks; the cause if they are refused."""
        params = SamplingParams(loops=4, max_tokens=1)
        request = Request(request_id=key.request_id, prompt_ids=(65,) * (num_blocks * BLOCK_SIZE), params=params)
        self.core.handle(Reserve(key, request, DEADLINE_S))
        answer = self.said[-1]
        assert isinstance(answer, Reserved)
        return answer.cause

    def grant(self, key: HandoffKey, writer: Peer) -> list[int]:
        """The blocks that this writer, and nobody else, may write."""
        self.core.handle(Bind(key, writer))
        answer = self.said[-1]
        assert isinstance(answer, Granted)
        return ids_of(answer.runs)

    def quarantined(self) -> int:
        return self.engine.ledger.counts().quarantined

    def writers_are_gone(self, *workers: WorkerId) -> None:
        """Their processes are proven gone: then every block is free."""
        for worker in workers:
            self.core.handle(PeerGone(worker, proven=True))
        counts = self.engine.ledger.counts
        self.pump(lambda: counts().free == NUM_BLOCKS, "every block is free")

    def guarded(self, but: list[int]) -> bool:
        """Every block but these still holds the pattern."""
        others = [block for block in range(NUM_BLOCKS) if block not in but]
        return bool((self.bytes[others] == GUARD).all())


class Writer:
    """A process that is bound as a writer, pushes one block, and is in the middle of a push of all others."""

    def __init__(self, target: Target) -> None:
        self.worker = WorkerId(str(uuid.uuid4()), 1)
        self.peer = Peer(self.worker, "writer", "127.0.0.1:1")
        self.process = OtherProcess(self.worker.agent_name, TAKEN_BLOCKS * target.engine.layout.block_bytes)
        self.process.say("describe")
        self.process.hear()
        self._target = target

    def push(self, key: HandoffKey, seq: int, blocks: list[int], first: int) -> None:
        """Post one push of consecutive blocks."""
        assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        block_bytes = self._target.engine.layout.block_bytes
        address = self._target.engine.arena.base_address + blocks[0] * block_bytes
        notice = encode_push_notice(PushNotice(key, PushRange(seq, first, len(blocks)))).hex()
        self.process.say(f"push {address} {len(blocks) * block_bytes} {self._target.metadata} {notice}")

    def begin(self, key: HandoffKey, blocks: list[int]) -> None:
        """One block arrives; the target falls silent; the other blocks are on their way."""
        self.push(key, 0, blocks[:1], 0)
        self.process.hear()
        self.process.say("drive")
        assert self.process.hear() == {"ended": ["done"]}
        self.push(key, 1, blocks[1:], 1)
        self.process.hear()
        self.process.say("drive")

    def is_mid_push(self, blocks: list[int]) -> bool:
        """Has a part of the large push landed, and not all of it?"""
        landed = self._target.bytes[blocks[1:]] != GUARD
        return bool(landed.any() and not landed.all())


@pytest.fixture(scope="module")
def engine() -> Engine:
    scheduler = SchedulerSettings(max_running=4)
    settings = EngineSettings(
        model_path=str(MODELS / "tiny-ouro"), dtype="fp32", num_blocks=NUM_BLOCKS, scheduler=scheduler
    )
    return Engine(settings, DecodePolicy())


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UCX:
        monkeypatch.setenv(f"UCX_{name}", value)


@contextlib.contextmanager
def started(engine: Engine) -> Iterator[tuple[Target, Writer]]:
    """A target and its writer. In the end both are gone and every block is free."""
    target = Target(engine)
    writer = Writer(target)
    try:
        yield target, writer
        writer.process.kill()
        target.writers_are_gone(writer.worker, OTHER_WRITER.worker)
    finally:
        writer.process.end()
        assert target.thread.stop()


@pytest.mark.usefixtures("tcp")
def test_a_writer_that_wakes_up_writes_into_quarantined_blocks_only(engine: Engine) -> None:
    with started(engine) as (target, writer):
        first, second, third = (HandoffKey(name, 1) for name in ("first", "second", "third"))
        assert target.reserve(first, TAKEN_BLOCKS) is None
        blocks = target.grant(first, writer.peer)
        writer.begin(first, blocks)
        writer.process.signal(signal.SIGSTOP)
        target.go_on()
        target.poll_on()
        assert writer.is_mid_push(blocks)
        target.core.handle(Cancel(first, Cause.CANCELLED))
        late = blocks[1:]
        assert target.quarantined() == len(late)
        assert target.reserve(second, NUM_BLOCKS - len(late)) is None
        assert not set(target.grant(second, OTHER_WRITER)) & set(late)
        others = [block for block in range(NUM_BLOCKS) if block not in late]
        target.bytes[others] = GUARD
        target.core.handle(PeerGone(writer.worker, proven=False))
        target.poll_on()
        assert target.quarantined() == len(late)  # time alone frees nothing, nor does a suspicion
        assert target.reserve(third, 1) is Cause.NO_ROOM
        writer.process.signal(signal.SIGCONT)
        target.pump(lambda: not target.quarantined(), "the large push arrives")
        assert writer.process.hear() == {"ended": ["done", "done"]}
        assert (target.bytes[late] == 1).all()
        assert target.reserve(third, len(late)) is None
        target.bytes[late] = GUARD
        target.poll_on()
        assert target.guarded(but=[])
        for key in (second, third):
            target.core.handle(Cancel(key, Cause.CANCELLED))


def kill_in_mid_push(target: Target, writer: Writer) -> bool:
    """One round. Returns whether bytes came after the writer's end."""
    key, again = HandoffKey("killed", 1), HandoffKey("again", 1)
    assert target.reserve(key, TAKEN_BLOCKS) is None
    blocks = target.grant(key, writer.peer)
    writer.begin(key, blocks)
    writer.process.kill()
    num_polls = target.num_polls()
    target.core.handle(PeerGone(writer.worker, proven=False))
    target.core.handle(PeerGone(writer.worker, proven=True))
    target.stand_still()
    assert target.guarded(but=blocks[:1])
    assert target.quarantined() == TAKEN_BLOCKS
    assert target.reserve(again, NUM_BLOCKS) is Cause.NO_ROOM
    target.go_on()
    target.pump(lambda: not target.quarantined(), "the blocks are free")
    assert target.polls_when_quiet - num_polls >= QUIET_ROUNDS
    came_late = writer.is_mid_push(blocks)
    again = HandoffKey("again", 2)
    assert target.reserve(again, NUM_BLOCKS) is None
    target.bytes[:] = GUARD
    target.poll_on()
    assert target.guarded(but=[])
    target.core.handle(Cancel(again, Cause.CANCELLED))
    return came_late


@pytest.mark.usefixtures("tcp")
@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_bytes_of_a_killed_writer_reach_no_block_that_was_handed_out_again(engine: Engine, rounds: int) -> None:
    """The target stands still while the writer is killed in the middle of a push and while its end is proven: what the
    kernel still has of it lands with the polls that come then, and before the blocks are free."""
    num_late = 0
    for _ in range(rounds):
        with started(engine) as (target, writer):
            num_late += kill_in_mid_push(target, writer)
    assert num_late, "no byte came late in any round: nothing was tried"
