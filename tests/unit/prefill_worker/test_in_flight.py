"""The prefill worker where pushes wait for the budget of bytes in flight: a real engine on a tiny model, real copies in
one process, two decode workers that take what came only when the test says. One thread."""

import itertools
from collections import deque
from collections.abc import Iterator

import pytest

from kvtransfer.budget import BudgetLimits
from kvtransfer.commands import (
    Close,
    Command,
    CommitHandoff,
    ConnectPeer,
    CrowdChanged,
    Event,
    OpenHandoff,
    Push,
)
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.receiver import Receiver
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.sender import Sender
from loopline.engine.engine import Engine
from loopline.identity import BlockRun, Cause, HandoffKey, Peer, WorkerId
from loopline.kv.arena import allocate_arena
from loopline.messages import Cancel, Commit, Prefilled, PushRange, StartPrefill, WorkerMessage
from loopline.request import Request, SamplingParams
from loopline.settings import EngineSettings, SchedulerSettings
from loopline.wire.convert import decode_push_notice, encode_push_notice
from loopline.worker.events import CommitAnswered
from prefill_worker.gate import PushGate
from prefill_worker.handoff_out import HandoffOut
from prefill_worker.outgoing import PrefillPorts
from prefill_worker.policy import PrefillPolicy
from tests.support.golden import GOLDEN
from tests.unit.worker.clocks import OwnClock

BLOCK_SIZE, NUM_BLOCKS, CHUNK_TOKENS = 4, 40, 8
NAMES = itertools.count()


@pytest.fixture(scope="module")
def policy() -> PrefillPolicy:
    return PrefillPolicy(shares_prefixes=False)


@pytest.fixture(scope="module")
def engine(policy: PrefillPolicy) -> Engine:
    scheduler = SchedulerSettings(max_running=4, chunk_tokens=CHUNK_TOKENS)
    settings = EngineSettings(
        model_path=str(GOLDEN / "ouro_fp32"), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, scheduler=scheduler
    )
    return Engine(settings, policy)


class Target:
    """A decode worker's memory; bytes land in `poll` alone."""

    def __init__(self, engine: Engine, name: str, hub: LocalHub, clock: OwnClock) -> None:
        self.peer = Peer(WorkerId(name, 1), name, "nowhere:1")
        self.agent = LocalAgent(self.peer.worker.agent_name, hub)
        self.arena = allocate_arena(engine.layout, NUM_BLOCKS, "cpu")
        self.region = RegisteredRegion(self.agent, span_of(self.arena.base_address, engine)).manifest
        self.arrived: list[Event] = []
        self._receiver = Receiver(self.agent, decode_push_notice, clock, self.arrived.append)

    def poll(self) -> None:
        self._receiver.poll()


def span_of(base_address: int, engine: Engine) -> ArenaSpan:
    return ArenaSpan(
        base_address=base_address,
        block_bytes=engine.layout.block_bytes,
        num_blocks=NUM_BLOCKS,
        null_block=engine.arena.null_block,
    )


class Worker:
    """The prefill worker's core and sender. Limits are in blocks."""

    def __init__(self, engine: Engine, gate: PushGate, total: int, peer: int, push: int) -> None:
        hub, name = LocalHub(), f"budget{next(NAMES)}"
        self.engine, self.clock = engine, OwnClock()
        self.limits = BudgetLimits(*(blocks * engine.layout.block_bytes for blocks in (total, peer, push)))
        self.commands: deque[Command] = deque()
        self.events: deque[Event] = deque()
        self.said: list[WorkerMessage] = []
        self.commits: list[Commit] = []
        agent = LocalAgent(f"loopline-{name}", hub)
        region = RegisteredRegion(agent, span_of(engine.arena.base_address, engine)).manifest
        self.sender = Sender(agent, region, encode_push_notice, 60.0, self.clock, self.events.append, self.limits)
        ports = PrefillPorts(
            to_coordinator=self.said.append,
            to_transfer=self.commands.append,
            deliver_commit=lambda peer, commit: self.commits.append(commit),
            ask_prefix=lambda source, wanted: None,
            ask_close=lambda key, writer: None,
            identity=lambda: WorkerId(name, 1),
        )
        self.core = HandoffOut(engine, ports, self.clock, gate, self.limits.push_bytes)
        self.slow, self.fast = (Target(engine, f"{name}-{kind}", hub, self.clock) for kind in ("slow", "fast"))
        for target in (self.slow, self.fast):
            self.sender.connect(ConnectPeer(target.peer, target.agent.metadata(), target.region))
        self.turn(self.slow, self.fast)
        self.turn(self.slow, self.fast)
        self.said.clear()

    def start(self, name: str, target: Target, num_blocks: int, at: int = 0) -> HandoffKey:
        """A prompt of whole blocks, into the target's blocks from `at` on."""
        prompt = tuple((len(name) + 7 * i) % 250 for i in range(num_blocks * BLOCK_SIZE))
        request = Request(request_id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=3, loops=4))
        key = HandoffKey(name, 1)
        self.core.handle(StartPrefill(key, request, target.peer, 0, (BlockRun(at, num_blocks),), 60.0))
        return key

    def turn(self, *polling: Target) -> bool:
        """Everything once; what each target does only if it is `polling`. True if something moved."""
        for target in polling:
            target.poll()
        moved = self.sender.poll()
        while self.events:
            self.core.handle(self.events.popleft())
            moved = True
        outcome = self.engine.step()
        if outcome is not None:
            self.core.stepped(outcome)
        moved |= bool(self.commands) or outcome is not None
        while self.commands:
            self._carry_out(self.commands.popleft())
        return moved

    def _carry_out(self, command: Command) -> None:
        match command:
            case OpenHandoff():
                self.sender.open(command)
            case Push():
                self.sender.push(command)
            case CommitHandoff():
                self.sender.commit(command)
            case Close():
                self.sender.close(command)
            case _:
                raise AssertionError(command)

    def settle(self, *polling: Target) -> None:
        for _ in range(2_000):
            if not self.turn(*polling):
                return
        raise AssertionError("the worker does not settle")

    def prefilled(self) -> list[str]:
        return [message.key.request_id for message in self.said if isinstance(message, Prefilled)]

    def num_computed(self, name: str) -> int:
        """Tokens of a running request that have KV."""
        return self.engine.scheduler._running[name].num_computed

    def end(self) -> None:
        """Everything lands, every commit is answered: all blocks are free."""
        self.settle(self.slow, self.fast)
        for commit in self.commits:
            self.core.handle(CommitAnswered(commit.key, None, "decode"))
        assert self.core.handoffs() == ()
        assert self.sender.budget.counts().in_flight_bytes == self.sender.budget.counts().num_waiting == 0
        assert self.engine.ledger.num_free_blocks == NUM_BLOCKS
        self.engine.ledger.audit()


@pytest.fixture
def make(engine: Engine, policy: PrefillPolicy) -> Iterator[list[Worker]]:
    """Put the worker in; it is checked at the end."""
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.end()
    policy.gate.peer_share = 1.0


def test_past_the_budget_no_new_chunk_is_begun_and_others_go_on(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    worker = Worker(engine, policy.gate, total=4, peer=2, push=1)
    make.append(worker)
    worker.start("to slow", worker.slow, 10)
    worker.start("to fast", worker.fast, 10)
    worker.settle(worker.fast)
    assert worker.prefilled() == ["to fast"]
    assert worker.num_computed("to slow") == CHUNK_TOKENS  # 2 blocks: its peer's share, and nothing beyond it
    assert worker.sender.budget.by_peer == {worker.slow.peer.worker.agent_name: worker.limits.peer_bytes}
    assert worker.engine.step() is None
    for name in ("late", "later"):  # the engine still takes what can go
        worker.start(name, worker.fast, 3, at=10)
        worker.settle(worker.fast)
    assert worker.prefilled() == ["to fast", "late", "later"]
    worker.settle(worker.slow)
    assert worker.prefilled()[-1] == "to slow"


def test_chunks_in_the_queue_wait_in_order_and_the_commit_names_every_push(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    worker = Worker(engine, policy.gate, total=2, peer=1, push=1)
    make.append(worker)
    worker.start("r", worker.slow, 5)
    worker.settle()
    assert worker.num_computed("r") == CHUNK_TOKENS
    assert worker.sender.budget.counts().num_waiting == 1
    worker.settle(worker.slow)
    (commit,) = worker.commits
    assert commit.pushes == tuple(PushRange(seq, seq, 1) for seq in range(5))
    (prefilled,) = [message for message in worker.said if isinstance(message, Prefilled)]
    assert (prefilled.stats.pushes, prefilled.stats.num_bytes) == (5, 5 * engine.layout.block_bytes)


def test_a_prompt_larger_than_the_whole_budget_goes_through(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    """Less than a block for all: one push at a time."""
    worker = Worker(engine, policy.gate, total=1, peer=1, push=1)
    worker.limits = BudgetLimits(7, 3, 3)
    worker.sender.budget.limits = worker.limits
    make.append(worker)
    worker.start("r", worker.slow, 9)
    worker.start("s", worker.fast, 9)
    worker.settle(worker.slow, worker.fast)
    assert sorted(worker.prefilled()) == ["r", "s"]


def test_a_cancelled_request_frees_what_waited(engine: Engine, policy: PrefillPolicy, make: list[Worker]) -> None:
    worker = Worker(engine, policy.gate, total=2, peer=1, push=1)
    make.append(worker)
    key = worker.start("r", worker.slow, 5)
    worker.settle()
    worker.core.handle(Cancel(key, Cause.CANCELLED))
    worker.settle()
    assert worker.sender.budget.counts().num_waiting == 0
    assert worker.engine.ledger.counts().held == 5  # one push still reads them
    worker.settle(worker.slow)
    assert worker.prefilled() == []


def test_chunks_are_cut_to_the_largest_push(engine: Engine, policy: PrefillPolicy, make: list[Worker]) -> None:
    worker = Worker(engine, policy.gate, total=100, peer=100, push=1)
    make.append(worker)
    worker.start("r", worker.fast, 3)
    worker.settle(worker.fast)
    assert worker.commits[0].pushes == (PushRange(0, 0, 1), PushRange(1, 1, 1), PushRange(2, 2, 1))
    assert len(worker.fast.arrived) == 3


def test_the_gate_knows_whose_pushes_would_wait() -> None:
    gate = PushGate()
    gate.enter("r", "a", 1)
    gate.enter("s", "b", 1)
    assert gate.may_compute("r") and gate.may_compute("unknown")
    gate.changed(CrowdChanged(frozenset({"a"}), False))
    assert (gate.may_compute("r"), gate.may_compute("s")) == (False, True)
    gate.changed(CrowdChanged(frozenset(), True))
    assert (gate.may_compute("r"), gate.may_compute("s"), gate.may_compute("unknown")) == (False, False, True)
    gate.leave("r")
    gate.leave("r")
    assert gate.may_compute("r")


def test_a_peer_that_takes_nothing_leaves_slots_and_blocks_to_others(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    """Small requests, far from the budget: they are computed, and keep slots and blocks because nothing lands."""
    worker = Worker(engine, policy.gate, total=100, peer=100, push=100)
    make.append(worker)
    policy.gate.peer_share = 0.5
    for number in range(6):
        worker.start(f"slow {number}", worker.slow, 2, at=2 * number)
    worker.settle(worker.fast)
    assert worker.prefilled() == ["slow 0", "slow 1"]  # of four slots
    for number in range(6):
        worker.start(f"fast {number}", worker.fast, 2, at=2 * number)
    worker.settle(worker.fast)
    assert worker.prefilled()[2:] == [f"fast {number}" for number in range(6)]
    worker.settle(worker.slow)
    assert worker.prefilled()[8:] == [f"slow {number}" for number in range(2, 6)]


def test_a_large_request_for_one_peer_leaves_blocks_to_others(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    worker = Worker(engine, policy.gate, total=100, peer=100, push=100)
    make.append(worker)
    policy.gate.peer_share = 0.5
    worker.start("slow 0", worker.slow, 15)
    worker.start("slow 1", worker.slow, 6)  # 21 of 40
    worker.settle(worker.fast)
    worker.start("fast", worker.fast, 24)  # more than its share, and alone
    worker.settle(worker.fast)
    assert worker.prefilled() == ["slow 0", "fast"]
    worker.settle(worker.slow)
    assert worker.prefilled()[-1] == "slow 1"


def test_blocks_of_handoffs_that_were_given_up_count_until_they_are_free(
    engine: Engine, policy: PrefillPolicy, make: list[Worker]
) -> None:
    worker = Worker(engine, policy.gate, total=100, peer=100, push=100)
    make.append(worker)
    policy.gate.peer_share = 0.5
    key = worker.start("given up", worker.slow, 15)
    worker.settle(worker.fast)
    worker.core.handle(Cancel(key, Cause.CANCELLED))
    for number in range(2):
        worker.start(f"slow {number}", worker.slow, 3, at=20 + 3 * number)
    worker.settle(worker.fast)
    assert worker.prefilled() == ["given up", "slow 0"]  # one always may; 15 + 3 + 3 of 40 are too many
    worker.settle(worker.slow)
    assert worker.prefilled()[-1] == "slow 1"


def test_a_single_peer_has_the_whole_worker() -> None:
    gate = PushGate()
    gate.peer_share = 0.5
    for name in ("r", "s", "t"):
        gate.enter(name, "a", 10)
    gate.num_peers = 1
    assert gate.may_start("t", ["r", "s"], 4, 20)
    gate.num_peers = 2
    assert not gate.may_start("t", ["r", "s"], 4, 60)  # slots
    gate.leave("s")
    assert not gate.may_start("t", ["r"], 4, 20) and gate.may_start("t", ["r"], 4, 40)  # blocks
    gate.leave("r")
    assert gate.may_start("t", [], 1, 1) and gate.may_start("unknown", ["r", "s"], 1, 1)


def test_small_requests_do_not_pass_a_large_one_for_the_same_peer() -> None:
    gate = PushGate()
    gate.peer_share, gate.num_peers = 0.5, 2
    for name, agent, num_blocks in (("running", "a", 10), ("large", "a", 45), ("small", "a", 5), ("other", "b", 45)):
        gate.enter(name, agent, num_blocks)
    assert not gate.may_start("large", ["running"], 8, 100)
    assert not gate.may_start("small", ["running"], 8, 100)  # it came later
    assert gate.may_start("other", ["running"], 8, 100)
    gate.leave("running")
    assert gate.may_start("large", [], 8, 100)
    assert gate.may_start("small", ["large"], 8, 100)
