"""The tracker against scripted workers: streams interleave in any way, commands and reports are lost or come twice,
workers fail and die, clients cancel, time passes, deadlines too.

What must hold: every token once and in order; every request ends exactly once; nothing that ended, and nothing of an
older generation, stays held at a living worker once it has read its commands; and a reply timeout after the last fault
no request waits for what a worker has lost.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.effects import Deliver, Effect, End, Requeue, Send
from coordinator.life import Books, State
from coordinator.tracker import Tracker
from loopline.identity import BlockRun, Cause, HandoffKey, Peer, WorkerId
from loopline.messages import (
    Bind,
    Cancel,
    Granted,
    HandoffStats,
    LocalPrefillStarted,
    Prefilled,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
    StepTokens,
    TokenRow,
)
from loopline.request import FinishReason, Request, SamplingParams
from tests.unit.coordinator.builders import VirtualClock

PROMPT = 3
ROLES = ("prefill", "decode")
STATS = HandoffStats(pushes=1, descriptors=1, num_bytes=1, transport="scripted", prefill_s=0.0)
DEADLINE_S = 50.0
REPLY_TIMEOUT_S = 5.0
Report = Reserved | Granted | LocalPrefillStarted | Prefilled | StepTokens | RequestFailed
CAUSES = st.sampled_from([Cause.NO_ROOM, Cause.DRAINING, Cause.INTERNAL, Cause.TRANSFER_FAILED, Cause.TOO_LARGE])


def token_at(request_id: str, position: int) -> int:
    """What every worker samples there: the answer does not depend on who computes it."""
    return (int(request_id[1:]) * 31 + position * 7) % 97


def blocks_of(key: HandoffKey) -> tuple[BlockRun, ...]:
    """Every generation has blocks of its own."""
    return (BlockRun(key.generation, 1),)


@dataclass
class Held:
    """What a scripted worker holds of one request."""

    key: HandoffKey
    request: Request
    next_position: int = 0  # of a decode worker that runs it; 0: not started
    target: WorkerId | None = None  # of a prefill worker: where the handoff goes


@dataclass
class ScriptedWorker:
    """Reads commands in order, writes reports in order. A prefill worker gives its handoff to the decode worker at
    once.
    """

    peer: Peer
    inbox: deque[object] = field(default_factory=deque)
    outbox: deque[Report] = field(default_factory=deque)
    holds: dict[str, Held] = field(default_factory=dict)
    tombstones: dict[str, int] = field(default_factory=dict)
    handled_at_s: float = 0.0  # when its inbox was empty

    def books(self, now_s: float) -> Books:
        if not self.inbox:
            self.handled_at_s = now_s
        return Books(self.handled_at_s, frozenset(held.key for held in self.holds.values()))

    def read_one(self, refusal: Cause | None) -> None:
        command = self.inbox.popleft()
        if isinstance(command, Cancel):
            self._cancel(command.key)
        elif isinstance(command, Reserve):
            self._reserve(command, refusal)
        elif isinstance(command, Bind):
            self._bind(command, refusal)
        elif isinstance(command, StartLocalPrefill):
            self._start_local(command.key, refusal)
        elif isinstance(command, StartPrefill):
            self._start(command, refusal)

    def _cancel(self, key: HandoffKey) -> None:
        self.tombstones[key.request_id] = key.generation
        held = self.holds.get(key.request_id)
        if held is not None and held.key.generation <= key.generation:
            del self.holds[key.request_id]

    def _reserve(self, command: Reserve, refusal: Cause | None) -> None:
        assert command.key.generation > self.tombstones.get(command.key.request_id, 0)
        assert command.key.request_id not in self.holds, "an older generation was not cancelled first"
        if refusal is None:
            self.holds[command.key.request_id] = Held(command.key, command.request)
        self.outbox.append(Reserved(command.key, cause=refusal))

    def _bind(self, command: Bind, refusal: Cause | None) -> None:
        if command.key.request_id in self.holds:
            if refusal is not None:
                del self.holds[command.key.request_id]
            self.outbox.append(Granted(command.key, command.writer.worker, 0, blocks_of(command.key), refusal))

    def _start_local(self, key: HandoffKey, refusal: Cause | None) -> None:
        held = self.holds.get(key.request_id)
        if held is not None:
            if refusal is None:
                held.next_position = held.request.num_known_tokens
            else:
                del self.holds[key.request_id]
            self.outbox.append(LocalPrefillStarted(key, refusal))

    def _start(self, command: StartPrefill, refusal: Cause | None) -> None:
        assert command.runs == blocks_of(command.key), "blocks that were granted to another generation"
        assert command.key.generation > self.tombstones.get(command.key.request_id, 0)
        if refusal is None:
            self.holds[command.key.request_id] = Held(command.key, command.request, target=command.target.worker)
        else:
            self.outbox.append(RequestFailed(command.key, refusal, "scripted"))

    def run_step(self, workers: dict[WorkerId, "ScriptedWorker"]) -> None:
        """A prefill worker computes what it was given; a decode worker makes one token of every request that runs."""
        rows = []
        for request_id, held in list(self.holds.items()):
            if held.target is not None:
                del self.holds[request_id]
                self._hand_over(held, workers.get(held.target))
            elif held.next_position:
                rows.append(make_row(held.request, held.next_position))
                held.next_position += 1
                if rows[-1].finish is not None:
                    del self.holds[request_id]
        if rows:
            self.outbox.append(StepTokens(1, tuple(rows)))

    def _hand_over(self, mine: Held, target: "ScriptedWorker | None") -> None:
        row = make_row(mine.request, mine.request.num_known_tokens)
        self.outbox.append(Prefilled(mine.key, mine.request.attempt, row, STATS))
        theirs = target.holds.get(mine.key.request_id) if target is not None else None
        if theirs is not None and theirs.key == mine.key and row.finish is None:
            theirs.next_position = row.position


def make_row(request: Request, position: int) -> TokenRow:
    is_last = position - PROMPT + 1 >= request.params.max_tokens
    token_id = token_at(request.request_id, position)
    finish = FinishReason.LENGTH if is_last else None
    return TokenRow(request.request_id, request.attempt, position, token_id, 1, finish)


class TrackerMachine(RuleBasedStateMachine):
    """The coordinator's side is the dispatcher's, in short."""

    @initialize()
    def start(self) -> None:
        self.clock = VirtualClock()
        self.tracker = Tracker(self.clock, REPLY_TIMEOUT_S)
        self.workers: dict[WorkerId, ScriptedWorker] = {}
        self.num_workers = self.num_requests = 0
        self.queued: list[str] = []
        self.delivered: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self.reports: list[tuple[WorkerId, Report]] = []
        for role in ("prefill", "decode", "decode"):
            self.add_worker(role)

    def add_worker(self, role: str) -> None:
        self.num_workers += 1
        worker = WorkerId(f"{role}-{self.num_workers}", 1)
        self.workers[worker] = ScriptedWorker(Peer(worker, worker.uuid, "nowhere"))

    def pick(self, data: st.DataObject, role: str) -> ScriptedWorker:
        return data.draw(st.sampled_from([w for w in self.workers.values() if w.peer.name.startswith(role)]))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker, message):
                    if worker in self.workers:
                        self.workers[worker].inbox.append(message)
                case Deliver(request_id, row):
                    assert request_id not in self.ends
                    assert row.position == PROMPT + len(self.delivered[request_id])
                    assert row.token_id == token_at(request_id, row.position)
                    self.delivered[request_id].append(row.position)
                case Requeue(request_id):
                    self.queued.append(request_id)
                case End(request_id, outcome):
                    self.ends[request_id] = self.ends.get(request_id, 0) + 1
                    assert outcome.usage.completion_tokens == len(self.delivered[request_id])
                    self.queued = [name for name in self.queued if name != request_id]

    # ---- the coordinator's own moves --------------------------------------------------------------------------------

    @rule(max_tokens=st.integers(1, 6))
    def submit(self, max_tokens: int) -> None:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        params = SamplingParams(max_tokens=max_tokens)
        self.tracker.admit(Request(request_id=request_id, prompt_ids=(1,) * PROMPT, params=params), DEADLINE_S)
        self.queued.append(request_id)
        self.delivered[request_id] = []

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        request_id = self.queued.pop(0)
        takes_whole = data.draw(st.booleans())  # one worker is now a decode worker and now a unified one
        self.carry_out(self.tracker.reserve(request_id, self.pick(data, "decode").peer, takes_whole=takes_whole))

    @precondition(lambda self: self.tracker.awaiting_prefill())
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.tracker.awaiting_prefill()))
        self.carry_out(self.tracker.bind(request_id, self.pick(data, "prefill").peer))

    @precondition(lambda self: self.tracker.awaiting_prefill())
    @rule(data=st.data())
    def start_local(self, data: st.DataObject) -> None:
        self.carry_out(self.tracker.start_local(data.draw(st.sampled_from(self.tracker.awaiting_prefill()))))

    @precondition(lambda self: self.num_requests)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "deadline", "stop"]))
    def end(self, data: st.DataObject, how: str) -> None:
        request_id = f"r{data.draw(st.integers(1, self.num_requests))}"
        self.carry_out(getattr(self.tracker, how)(request_id))

    # ---- workers and the network ------------------------------------------------------------------------------------

    @precondition(lambda self: any(worker.inbox for worker in self.workers.values()))
    @rule(data=st.data(), refusal=st.none() | st.none() | CAUSES)
    def worker_reads(self, data: st.DataObject, refusal: Cause | None) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.inbox]))
        worker.read_one(refusal)

    @precondition(lambda self: any(worker.inbox for worker in self.workers.values()))
    @rule(data=st.data())
    def a_command_is_lost(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.inbox]))
        if not isinstance(worker.inbox[0], Cancel):
            worker.inbox.popleft()

    @rule(seconds=st.sampled_from([0.5, 2.0, REPLY_TIMEOUT_S]), is_excused=st.sampled_from([False, False, False, True]))
    def time_passes(self, seconds: float, is_excused: bool) -> None:
        self.clock.s += seconds
        if is_excused:
            self.tracker.excuse()
        self.look()

    def look(self) -> None:
        books = {worker: scripted.books(self.clock.s) for worker, scripted in self.workers.items()}
        before = {name: self.tracker.state(name) for name in self.tracker_names()}
        self.carry_out(self.tracker.look(books))
        for name, state in before.items():
            if state is State.QUEUED:
                assert self.tracker.state(name) is State.QUEUED

    def tracker_names(self) -> list[str]:
        return [name for name in (f"r{n}" for n in range(1, self.num_requests + 1)) if name in self.tracker]

    @rule(data=st.data(), role=st.sampled_from(ROLES))
    def worker_steps(self, data: st.DataObject, role: str) -> None:
        self.pick(data, role).run_step(self.workers)

    @rule(data=st.data(), role=st.sampled_from(ROLES), cause=st.sampled_from([Cause.PEER_LOST, Cause.INTERNAL]))
    def worker_gives_up(self, data: st.DataObject, role: str, cause: Cause) -> None:
        worker = self.pick(data, role)
        if worker.holds:
            held = worker.holds.pop(data.draw(st.sampled_from(sorted(worker.holds))))
            worker.outbox.append(RequestFailed(held.key, cause, "scripted"))

    @precondition(lambda self: any(worker.outbox for worker in self.workers.values()))
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "arrives", "twice", "lost"]))
    def report(self, data: st.DataObject, fate: str) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.outbox]))
        message = worker.outbox.popleft()
        self.reports.append((worker.peer.worker, message))
        for _ in range({"arrives": 1, "twice": 2, "lost": 0}[fate]):
            self.take(worker.peer.worker, message)

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def old_reports_come_again(self, data: st.DataObject) -> None:
        for worker, message in self.reports[-data.draw(st.integers(1, 20)) :]:
            self.take(worker, message)

    @rule(data=st.data(), role=st.sampled_from(ROLES))
    def a_worker_dies(self, data: st.DataObject, role: str) -> None:
        worker = self.pick(data, role).peer
        del self.workers[worker.worker]
        self.carry_out(self.tracker.on_worker_lost(worker.worker, worker.name))
        self.add_worker(role)

    def take(self, worker: WorkerId, message: Report) -> None:
        take = {
            Reserved: self.tracker.on_reserved,
            Granted: self.tracker.on_granted,
            LocalPrefillStarted: self.tracker.on_local_started,
            Prefilled: self.tracker.on_prefilled,
            StepTokens: self.tracker.on_step_tokens,
            RequestFailed: self.tracker.on_request_failed,
        }[type(message)]
        self.carry_out(take(worker, message))  # type: ignore[operator]

    @rule(rounds=st.integers(1, 4), fate=st.sampled_from(["arrives", "twice"]), is_backwards=st.booleans())
    def all_goes_well_for_a_while(self, rounds: int, fate: str, is_backwards: bool) -> None:
        for _ in range(rounds):
            by_role = {role: [w for w in self.workers.values() if w.peer.name.startswith(role)] for role in ROLES}
            for number, request_id in enumerate(self.queued):
                decode = by_role["decode"][number % len(by_role["decode"])]
                self.carry_out(self.tracker.reserve(request_id, decode.peer, takes_whole=number % 3 == 2))
            self.queued = []
            for number, request_id in enumerate(self.tracker.awaiting_prefill()):
                if number % 2:
                    self.carry_out(self.tracker.start_local(request_id))
                else:
                    self.carry_out(self.tracker.bind(request_id, by_role["prefill"][0].peer))
            for worker in sorted(self.workers.values(), key=lambda w: w.peer.name, reverse=is_backwards):
                while worker.inbox:
                    worker.read_one(None)
                worker.run_step(self.workers)
                while worker.outbox:
                    self.reports.append((worker.peer.worker, worker.outbox.popleft()))
                    for _ in range({"arrives": 1, "twice": 2}[fate]):
                        self.take(*self.reports[-1])

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_request_is_somewhere_once(self) -> None:
        for number in range(1, self.num_requests + 1):
            request_id = f"r{number}"
            is_queued = request_id in self.tracker and self.tracker.state(request_id) is State.QUEUED
            assert self.queued.count(request_id) == int(is_queued)
            assert self.ends.get(request_id, 0) == int(request_id not in self.tracker)

    @invariant()
    def only_living_workers_have_been_given_something(self) -> None:
        assert set(self.tracker.assigned()) <= set(self.workers)

    def teardown(self) -> None:
        if not hasattr(self, "tracker"):
            return
        self.read_everything()
        for _ in range(2):
            self.clock.s += REPLY_TIMEOUT_S
            self.look()
        self.read_everything()
        for name in self.tracker_names():
            state = self.tracker.state(name)
            asked = (State.RESERVING, State.BINDING, State.STARTING_LOCAL)
            assert state not in asked, "it waits for an answer that was lost"
            for given in self.tracker.assignment(name):
                is_computing = state is State.PREFILLING or given.uuid.startswith("decode")
                assert not is_computing or name in self.workers[given].holds, "it waits for a worker that lost it"
        for worker in self.workers.values():
            for request_id in worker.holds:
                assert request_id in self.tracker, "it ended, and nobody told this worker"
                given = self.tracker.assigned().get(worker.peer.worker, ())
                assert request_id in [row.request_id for row in given]
        self.clock.s += DEADLINE_S
        for number in range(1, self.num_requests + 1):
            self.carry_out(self.tracker.deadline(f"r{number}"))
        self.read_everything()
        assert all(not worker.holds for worker in self.workers.values())
        assert self.ends == {f"r{number}": 1 for number in range(1, self.num_requests + 1)}
        assert len(self.tracker) == 0 and self.tracker.assigned() == {} and self.queued == []

    def read_everything(self) -> None:
        for worker in self.workers.values():
            while worker.inbox:
                worker.read_one(None)


TrackerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTracker = TrackerMachine.TestCase
