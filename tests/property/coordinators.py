"""What the membership machine is made of: a virtual event loop, coordinators that really are dispatchers, scripted
worker processes that live several lives, clients that go on elsewhere."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordinator.dispatcher import Dispatcher
from coordinator.effects import Ending, Outcome
from coordinator.registry import Refused
from coordinator.streams import ClientStream, Finish, Tokens, WorkerStream
from loopline.identity import Cause, Peer, Role, WorkerId
from loopline.messages import Pair, PairReady, Prefilled, StepTokens, TokenRow, WorkerMessage
from loopline.request import FinishReason, Limits, Request, SamplingParams
from tests.property.test_tracker import Held, ScriptedWorker
from tests.unit.coordinator.builders import STATS, VirtualClock, heartbeat, register

PROMPT = 3
LEASE_S = 3.0
T = TypeVar("T")


def token_at(seed: int, position: int) -> int:
    """What every worker samples there, under every coordinator."""
    return (seed * 31 + position * 7) % 97


def make_row(request: Request, position: int) -> TokenRow:
    is_last = position - len(request.prompt_ids) + 1 >= request.params.max_tokens
    finish = FinishReason.LENGTH if is_last else None
    token_id = token_at(request.params.seed, position)
    return TokenRow(request.request_id, request.attempt, position, token_id, 1, finish)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers go by a clock that tests move; nothing ever waits."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._virtual = clock

    def time(self) -> float:
        return self._virtual.s

    def do(self, call: Callable[[], T]) -> T:
        """Call in the loop, and let everything that can run do so."""

        async def main() -> T:
            result = call()
            for _ in range(8):
                await asyncio.sleep(0)
            return result

        return self.run_until_complete(main())


class Coordinator:
    """One life of a coordinator. It may be alive and deserted."""

    def __init__(self, clock: VirtualClock, epoch: int) -> None:
        self.dispatcher = Dispatcher(
            clock=clock,
            epoch=epoch,
            lease_s=LEASE_S,
            reply_timeout_s=1e6,  # the scripted workers' heartbeats do not say what they have
            peer_share=1.0,
            queue_limit=100,
            unread_tokens=1000,
            limits=Limits(vocab_size=100, context_tokens=1000, max_loops=4, arena_tokens=1000),
            probe_params=SamplingParams(max_tokens=2),
            probe_token_id=0,
        )
        self._task = asyncio.ensure_future(self.dispatcher.run())

    @property
    def epoch(self) -> int:
        return self.dispatcher.epoch

    def kill(self) -> None:
        """Its timers may still fire, as nothing that anybody sees."""
        self._task.cancel()
        self.dispatcher.close_workers()

    @property
    def num_assigned(self) -> int:
        return sum(len(view.assigned) for view in self.dispatcher.snapshot().workers)


class Engine(ScriptedWorker):
    """The tracker's scripted worker, with tokens that depend on the request's seed."""

    def run_step(self, workers: dict[WorkerId, ScriptedWorker]) -> None:
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

    def _hand_over(self, mine: Held, target: ScriptedWorker | None) -> None:
        row = make_row(mine.request, mine.request.num_known_tokens)
        self.outbox.append(Prefilled(mine.key, mine.request.attempt, row, STATS))
        theirs = target.holds.get(mine.key.request_id) if target is not None else None
        if theirs is not None and theirs.key == mine.key and row.finish is None:
            theirs.next_position = row.position


@dataclass
class Sent:
    """A message on its way: from which life, in which coordinator's epoch."""

    worker: WorkerId
    epoch: int
    message: WorkerMessage


@dataclass
class Process:
    """A worker process; every attachment is a life of its own, with an engine that holds nothing at first."""

    name: str
    role: Role
    pid: int
    life: int = 0
    home: Coordinator | None = None
    engine: Engine | None = None
    is_hung: bool = False
    on_the_way: list[Sent] = field(default_factory=list)
    _stream: WorkerStream | None = None

    @property
    def uuid(self) -> str:
        return f"uuid-{self.name}-{self.pid}"

    @property
    def worker(self) -> WorkerId:
        return WorkerId(self.uuid, self.life)

    def attach(self, home: Coordinator) -> None:
        """Begin the next life; nothing happens where the coordinator does not take it yet."""
        self.life += 1
        message = register(self.name, self.role, epoch=self.life, uuid=self.uuid, pid=self.pid)
        joined = home.dispatcher.join(message)
        if isinstance(joined, Refused):
            assert joined.retry, joined.reason
            return
        self._stream, self.home = joined, home
        self.engine = Engine(Peer(self.worker, self.name, "nowhere"))
        self._say(heartbeat())

    def detach(self, *, is_noticed: bool) -> None:
        """The stream breaks: the worker gives up what it runs; its coordinator notices now or by the lease."""
        if self.home is not None and is_noticed:
            self.home.dispatcher.lose(self.worker, "its stream ended")
        self.home = self.engine = self._stream = None

    def beat(self) -> None:
        if self.home is not None and not self.is_hung:
            self._say(heartbeat())

    def read(self, refusal: Cause | None = None, most: int = 1000) -> None:
        """Obey up to `most` commands; the end of the stream ends the life."""
        assert self.engine is not None and self._stream is not None
        for _ in range(most):
            command = take_now(self._stream.next_message())
            if command is _NOTHING:
                return
            if command is None:
                self.detach(is_noticed=False)
                return
            if isinstance(command, Pair):
                self._say(PairReady(command.decode.worker, "scripted", 1e9))
            self.engine.inbox.append(command)
            self.engine.read_one(refusal)
            self._collect()

    def step(self, engines: dict[WorkerId, ScriptedWorker]) -> None:
        assert self.engine is not None
        self.engine.run_step(engines)
        self._collect()

    def _collect(self) -> None:
        assert self.engine is not None
        while self.engine.outbox:
            self._say(self.engine.outbox.popleft())

    def _say(self, message: Any) -> None:
        assert self.home is not None
        self.on_the_way.append(Sent(self.worker, self.home.epoch, message))


_NOTHING = object()


def take_now(awaitable: Any) -> Any:
    """What a coroutine returns without waiting; _NOTHING where it would wait."""
    try:
        awaitable.send(None)
    except StopIteration as stop:
        return stop.value
    awaitable.close()
    return _NOTHING


@dataclass
class Client:
    """One answer, asked for again wherever a coordinator is alive, as `loopline.client` does."""

    number: int
    max_tokens: int
    deadline_at_s: float
    tokens: list[int] = field(default_factory=list)
    ends: list[Outcome] = field(default_factory=list)
    home: Coordinator | None = None
    request_id: str = ""
    num_calls: int = 0
    _stream: ClientStream | None = None

    def ask(self, home: Coordinator, now_s: float) -> None:
        """A new request for the same answer."""
        self.num_calls += 1
        self.request_id = f"r{self.number}-{self.num_calls}"
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.number)
        request = Request(
            request_id=self.request_id, prompt_ids=(1,) * PROMPT, params=params, generated_ids=tuple(self.tokens)
        )
        self._stream = home.dispatcher.submit(request, max(0.001, self.deadline_at_s - now_s), None)
        self.home = home

    def leave(self, *, is_noticed: bool) -> None:
        """The call breaks; what it had not read is lost."""
        if self.home is not None and is_noticed:
            self.home.dispatcher.cancel(self.request_id)
        self.home = self._stream = None

    def read(self) -> None:
        """Everything that is there."""
        while self._stream is not None and (event := take_now(self._stream.next_event())) is not _NOTHING:
            if isinstance(event, Tokens):
                for row in event.rows:
                    assert row.position == PROMPT + len(self.tokens), "a token twice, or one is missing"
                    assert row.token_id == token_at(self.number, row.position)
                    self.tokens.append(row.token_id)
                    assert len(self.tokens) <= self.max_tokens
            else:
                assert isinstance(event, Finish)
                self._end(event.outcome)

    def _end(self, outcome: Outcome) -> None:
        self.ends.append(outcome)
        self.home = self._stream = None
        assert outcome.usage.completion_tokens == len(self.tokens)
        if outcome.ending is Ending.FINISHED:
            assert outcome.reason is FinishReason.LENGTH and len(self.tokens) == self.max_tokens

    @property
    def needs_a_coordinator(self) -> bool:
        return self.home is None and not self.ends
