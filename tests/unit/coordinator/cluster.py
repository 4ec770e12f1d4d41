"""A coordinator in this process with scripted workers that speak Attach to it over loopback gRPC.

The scripted prefill worker hands the first token to the decode worker by a call; no KV exists. Tokens are a function
of their position, so whoever computes them computes the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from coordinator.dispatcher import Dispatcher
from coordinator.fleet import Fleet
from coordinator.server import build_dispatcher, build_intake, build_server
from coordinator.service import ModelCard
from loopline.clock import MonotonicClock
from loopline.config import ClusterConfig
from loopline.identity import BlockRun, Cause, HandoffKey, Peer, Role, WorkerId
from loopline.messages import (
    Bind,
    Cancel,
    CoordinatorMessage,
    Granted,
    LocalPrefillStarted,
    Pair,
    PairReady,
    Prefilled,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
    StepTokens,
    TokenRow,
    Welcome,
    WorkerMessage,
)
from loopline.model_spec import load_model_spec
from loopline.request import FinishReason, Request
from loopline.text import TextCodec, load_text
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc, loopline_pb2_grpc
from loopline.wire.channel import bind, open_channel
from tests.unit.coordinator.builders import STATS, heartbeat, register

MODEL = Path(__file__).parents[3] / "configs" / "models" / "tiny-ouro"
WAIT_S = 30.0
DRAIN_LIMIT_S = 7.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - conditions here have no event of their own
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"did not come true: {what}") from None


def token_at(position: int) -> int:
    """Byte-level tokens: the answer spells the alphabet from the position on."""
    return ord(LETTERS[position % len(LETTERS)])


def text_of(positions: range) -> str:
    return "".join(LETTERS[position % len(LETTERS)] for position in positions)


def make_row(request: Request, position: int) -> TokenRow:
    is_last = position - len(request.prompt_ids) + 1 >= request.params.max_tokens
    finish = FinishReason.LENGTH if is_last else None
    return TokenRow(request.request_id, request.attempt, position, token_at(position), request.params.loops, finish)


class HasWorkers(Protocol):
    """Where a scripted worker lives: the coordinator's address, and the workers of the same process."""

    @property
    def address(self) -> str: ...

    @property
    def workers(self) -> "dict[str, ScriptedWorker]": ...

    def is_prefilling(self, worker: WorkerId, request_id: str) -> bool: ...


@dataclass
class ScriptedWorker:
    """One attached worker. `refusals` answer the next Reserve or Bind commands; `pause_at` holds a decode worker's
    tokens.
    """

    name: str
    role: Role
    cluster: "HasWorkers"
    epoch: int = 1
    max_running: int = 4
    total_blocks: int = 64
    pid: int | None = None
    uuid: str | None = None
    host: str = "127.0.0.1"
    growth_share: float = 1.0
    crash: "Callable[[ScriptedWorker, StartPrefill], Awaitable[bool]] | None" = None  # says that it computes nothing
    decodes_when_bound: bool = False  # for a decode worker that no prefill worker of this process can reach
    heard: list[CoordinatorMessage] = field(default_factory=list)
    cached_tokens: int = 0  # that a decode worker has of every prompt
    refusals: list[Cause] = field(default_factory=list)
    pause_at: int | None = None  # tokens of a request that a decode worker makes before it waits for `go_on`
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    held: dict[str, tuple[HandoffKey, Request]] = field(default_factory=dict)
    coordinator_epoch: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _one_writer: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.register = register(
            self.name,
            self.role,
            epoch=self.epoch,
            max_running=self.max_running,
            total_blocks=self.total_blocks,
            pid=self.pid or sum(self.name.encode()),
            uuid=self.uuid,
            host=self.host,
            growth_share=self.growth_share,
        )
        self._channel = open_channel(self.cluster.address)
        stub: Any = cluster_pb2_grpc.ClusterStub
        self._call = stub(self._channel).Attach()
        self._tasks = [asyncio.ensure_future(self._run())]

    @property
    def peer(self) -> Peer:
        return self.register.peer

    @property
    def worker(self) -> WorkerId:
        return self.peer.worker

    def heard_of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def send(self, message: WorkerMessage, epoch: int | None = None) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            envelope = convert.wrap_worker_message(message, self.coordinator_epoch if epoch is None else epoch)
            async with self._one_writer:
                await self._call.write(envelope)

    async def die(self) -> None:
        """As seen from outside: the connection ends."""
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await self._channel.close(None)

    async def _run(self) -> None:
        await self.send(self.register, 0)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (envelope := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                message, epoch = convert.unwrap_coordinator_message(envelope)
                self.heard.append(message)
                await self._obey(message, epoch)
        self.ended.set()

    async def _obey(self, message: CoordinatorMessage, epoch: int) -> None:
        match message:
            case Welcome():
                self.coordinator_epoch = epoch
                await self.send(heartbeat())
            case Pair(decode):
                await self.send(PairReady(decode.worker, "scripted", 1e9))
            case Reserve(key, request):
                cause = self.refusals.pop(0) if self.refusals else None
                if cause is None:
                    self.held[key.request_id] = (key, request)
                await self.send(Reserved(key, self.cached_tokens, cause=cause, detail="scripted"))
            case Bind(key, writer):
                await self.send(Granted(key, writer.worker, 0, (BlockRun(0, 1),)))
                if self.decodes_when_bound and key.request_id in self.held:
                    request = self.held[key.request_id][1]
                    self._tasks.append(asyncio.ensure_future(self._decode(key, request.num_known_tokens)))
            case StartLocalPrefill(key):
                if key.request_id not in self.held:
                    await self.send(LocalPrefillStarted(key, Cause.UNKNOWN))
                    return
                await self.send(LocalPrefillStarted(key))
                position = self.held[key.request_id][1].num_known_tokens
                self._tasks.append(asyncio.ensure_future(self._decode(key, position)))
            case StartPrefill():
                await self._prefill(message)
            case Cancel(key):
                self.held.pop(key.request_id, None)
            case _:
                pass

    async def _prefill(self, command: StartPrefill) -> None:
        if self.crash is not None and await self.crash(self, command):
            return
        row = make_row(command.request, command.request.num_known_tokens)
        await self.send(Prefilled(command.key, command.request.attempt, row, STATS))
        target = self.cluster.workers.get(command.target.name)
        if row.finish is None and target is not None:
            target._tasks.append(asyncio.ensure_future(target._decode_after(self, command.key, row.position)))

    async def _decode_after(self, prefill: "ScriptedWorker", key: HandoffKey, position: int) -> None:
        """Its tokens come on another stream than what the prefill worker says of the prompt, and in real life later."""

        def is_heard() -> bool:
            return not (self._holds(key) and self.cluster.is_prefilling(prefill.worker, key.request_id))

        await until(is_heard, "the coordinator knows that the prompt is computed")
        await self._decode(key, position)

    def _holds(self, key: HandoffKey) -> bool:
        return self.held.get(key.request_id, (None,))[0] == key

    async def _decode(self, key: HandoffKey, position: int) -> None:
        first = position
        while self._holds(key):
            request = self.held[key.request_id][1]
            if self.pause_at is not None and position - first >= self.pause_at and request.params.max_tokens > 2:
                await self.go_on.wait()
            row = make_row(request, position)
            if row.finish is not None:
                del self.held[key.request_id]
            await self.send(StepTokens(position, (row,)))
            position += 1


@dataclass
class ScriptedCluster:
    """A coordinator and its scripted workers."""

    dispatcher: Dispatcher
    fleet: Fleet
    address: str
    stub: Any
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    def attach(self, name: str, **options: Any) -> ScriptedWorker:
        role = Role(name.partition("-")[0])
        self.workers[name] = worker = ScriptedWorker(name, role, self, **options)
        return worker

    async def pair(self, **options: Any) -> tuple[ScriptedWorker, ScriptedWorker]:
        """One worker of each role, serving. Options go to the decode worker."""
        prefill, decode = self.attach("prefill-0"), self.attach("decode-0", **options)
        await until(lambda: self.dispatcher.readiness.serving, "serving")
        return prefill, decode

    def is_prefilling(self, worker: WorkerId, request_id: str) -> bool:
        """Whether the coordinator waits for this worker's word that the prompt is computed."""
        view = self.dispatcher.snapshot().find(worker)
        return view is not None and any(row.request_id == request_id for row in view.assigned)

    async def until_idle(self) -> None:
        def is_idle() -> bool:
            return self.dispatcher.num_running == self.dispatcher.num_queued == 0

        await until(is_idle, "no request is left")


@contextlib.asynccontextmanager
async def scripted_cluster(
    *,
    model: Path = MODEL,
    codec: TextCodec | None = None,
    queue_limit: int = 8,
    lease_s: float = 30.0,
    deadline_s: float = 20.0,
    unread_tokens: int = 4096,
    most_write_s: float = 60.0,
    routing: Mapping[str, object] | None = None,
) -> AsyncIterator[ScriptedCluster]:
    """A coordinator on a free loopback port; nothing is left running afterwards."""
    config = ClusterConfig.model_validate(
        {
            "model": {"path": str(model)},
            "coordinator": {
                "queue_limit": queue_limit,
                "default_deadline_s": deadline_s,
                "unread_tokens": unread_tokens,
            },
            "membership": {"lease_s": lease_s},
            "routing": routing or {},
        }
    )
    spec = load_model_spec(model)
    dispatcher = build_dispatcher(config, spec, MonotonicClock())
    intake = build_intake(config, spec, codec or load_text(model))
    card, fleet = ModelCard("tiny", "fp32"), Fleet()
    most_bytes = config.limits.max_message_bytes
    server = build_server(dispatcher, fleet, intake, card, most_bytes, DRAIN_LIMIT_S, most_write_s=most_write_s)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    placing = asyncio.ensure_future(dispatcher.run())
    public: Any = loopline_pb2_grpc.LooplineStub
    channel = open_channel(address)
    cluster = ScriptedCluster(dispatcher, fleet, address, public(channel))
    try:
        yield cluster
    finally:
        for worker in cluster.workers.values():
            await worker.die()
        await channel.close(None)
        placing.cancel()
        await dispatcher.drain(0.0)
        await server.stop(None)
