"""One worker process from settings to end: load, serve, drain, leave.

The role comes in as a `BuildRole`: its core for the engine thread and its gRPC servicer. Order of construction is order
of need: `_load` makes engine and transfer thread, `_Worker` all that talks to them.
"""

import asyncio
import logging
import os
import queue
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio

from kvtransfer.agent import TransferAgent
from kvtransfer.commands import Command
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.region import ArenaSpan
from kvtransfer.transfer_thread import NoticeCodec, TransferEndpoint, TransferThread
from kvtransfer.unlinked_agent import UnlinkedAgent
from loopline.clock import Clock, MonotonicClock
from loopline.engine.engine import Engine
from loopline.errors import LooplineError, OperatorError, TransferError
from loopline.identity import Fingerprint, Peer, Role, WorkerId, WorkerLoad
from loopline.messages import CoordinatorMessage, Drain, PeerGone, Register, WorkerMessage
from loopline.process import leave, on_terminate, settle_heap, watch_life_pipe
from loopline.sched.policy import RolePolicy
from loopline.settings import TransferSettings, WorkerSettings
from loopline.telemetry.traces import Tracing, open_tracing
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import bind, join_address, make_server
from loopline.wire.convert import decode_push_notice, encode_push_notice
from loopline.worker.attachment import Attachment
from loopline.worker.engine_thread import EngineListener, EngineThread, Inbox, LoadBoard, WorkerCore
from loopline.worker.events import BeginDrain, CoordinatorLost
from loopline.worker.faults import WorkerFaults, no_fault
from loopline.worker.metrics import Scrapes
from loopline.worker.observer import Observer
from loopline.worker.orders import Orders
from loopline.worker.peer_calls import PeerCalls
from loopline.worker.quarantine_watch import QuarantineWatch

logger = logging.getLogger(__name__)
EXIT_FAILED = 1
EXIT_OPERATOR = 2
EXIT_RESTART = 3
_STOP_GRACE_S = 0.2
_LOOKS_PER_LIMIT = 4
_FLUSH_LIMIT_S = 3.0


class EngineFailed(LooplineError):
    """The engine thread ended with an error, which it has logged."""


@dataclass(frozen=True)
class WorkerContext:
    """What a role builds its parts from. The callables may be called from any thread and return at once.
    `entered` hears of every state that a handoff enters, at that moment."""

    engine: Engine
    clock: Clock
    endpoint: TransferEndpoint
    fingerprint: Fingerprint
    me: Callable[[], Peer]
    to_coordinator: Callable[[WorkerMessage], None]
    to_transfer: Callable[[Command], None]
    to_engine: Callable[[object], None]
    calls: PeerCalls
    transfer: TransferSettings
    entered: Callable[[str], None] = no_fault


@dataclass(frozen=True)
class RoleParts:
    """A role's three parts: logic on the engine thread, peer service, and what it does on asyncio with a message of the
    coordinator. `on_message` returns True if the engine thread does not need the message."""

    core: WorkerCore
    servicer: cluster_pb2_grpc.PeeringServicer
    on_message: Callable[[CoordinatorMessage], bool]


class BuildRole(Protocol):
    """Makes a role's parts; called on the event loop."""

    def __call__(self, context: WorkerContext) -> RoleParts: ...


def run_worker(settings: WorkerSettings, policy: RolePolicy, build_role: BuildRole, life_fd: int | None) -> int:
    """Run until drained, terminated or told to stop; the process's exit status. Operator errors are one line on
    stderr. Where a thread of ours hangs the process leaves from here, and the call does not return.
    """
    try:
        return asyncio.run(_run(settings, policy, build_role, life_fd))
    except (OperatorError, TransferError) as error:
        sys.stderr.write(f"error: {settings.name}: {error}\n")
        return EXIT_OPERATOR
    except Exception:
        logger.exception("the worker failed")
        return EXIT_FAILED


async def _run(settings: WorkerSettings, policy: RolePolicy, build_role: BuildRole, life_fd: int | None) -> int:
    loop = asyncio.get_running_loop()
    orders = Orders(settings.drain_limit_s)
    on_terminate(loop, orders.terminate)
    if life_fd is not None:
        watch_life_pipe(loop, life_fd, orders.stop)
    tracing = open_tracing(settings.otlp_endpoint, settings.cluster, settings.role, settings.name)
    access = replace(settings.security.access, require_client_certificate=True)  # only this cluster's workers call here
    server = make_server(access, settings.max_message_bytes)
    port = bind(server, settings.host, settings.port, access)  # before the model loads: a clash shows at once
    scrapes = None
    if settings.metrics_port is not None:
        scrapes = Scrapes(settings.host, settings.metrics_port, settings.advertise)
    identity = Identity(settings.name, join_address(settings.advertise, port), settings.uuid)
    faults = WorkerFaults(settings.name, settings.faults, MonotonicClock()) if settings.faults else None
    loading = asyncio.create_task(asyncio.to_thread(_load, settings, policy, identity.agent_name, faults))
    if not await _first_of(loading, orders.wait_stop(), orders.wait_drain()):
        logger.info("told to leave while loading")
        leave(0)  # the loading thread cannot be stopped in another way
    loaded = loading.result()
    try:
        await _Worker(settings, identity, loaded, server, build_role, orders, faults, tracing, scrapes).run()
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        if not await asyncio.to_thread(loaded.transfer.stop):
            logger.error("the transfer thread does not stop; leaving without it")
            leave(EXIT_FAILED)  # its agent may still write the arena, so the memory must not be freed in order
    return EXIT_RESTART if orders.wants_restart else 0


async def _first_of(wanted: "asyncio.Task[Any]", *others: Any) -> bool:
    """Wait until one is done; whether that is `wanted`. The others are cancelled."""
    tasks = [asyncio.ensure_future(other) for other in others]
    await asyncio.wait((wanted, *tasks), return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return wanted.done()


class Identity:
    """This process as others know it: a fresh uuid, and a new epoch for every try to join."""

    def __init__(self, name: str, address: str, fresh_uuid: str = "") -> None:
        self._uuid = fresh_uuid or uuid.uuid4().hex
        self._epoch = 0
        self._name = name
        self._address = address

    @property
    def agent_name(self) -> str:
        return WorkerId(self._uuid, self._epoch).agent_name

    def me(self) -> Peer:
        """The current life."""
        return Peer(WorkerId(self._uuid, self._epoch), self._name, self._address)

    def begin_life(self) -> Peer:
        """The next life: what is said from now on is said in it."""
        self._epoch += 1
        return self.me()


@dataclass(frozen=True)
class _Loaded:
    """Engine and transfer thread, running, and the queue that the engine thread will take its events from."""

    engine: Engine
    fingerprint: Fingerprint
    inbox: Inbox
    transfer: TransferThread
    endpoint: TransferEndpoint


def _load(settings: WorkerSettings, policy: RolePolicy, agent_name: str, faults: WorkerFaults | None = None) -> _Loaded:
    """Everything that takes long. Raises OperatorError kinds and TransferError."""
    engine = Engine(settings.engine, policy)
    fingerprint = engine.fingerprint()
    inbox: Inbox = queue.Queue()
    arena = engine.arena
    is_cuda = settings.engine.device.startswith("cuda")
    span = ArenaSpan(
        base_address=arena.base_address,
        block_bytes=arena.layout.block_bytes,
        num_blocks=arena.num_blocks,
        null_block=arena.null_block,
        memory_kind="VRAM" if is_cuda else "DRAM",
        device_id=arena.tensor.device.index or 0,
    )

    def make_agent() -> TransferAgent:
        if settings.transfer.backend == "none":
            return UnlinkedAgent(agent_name)
        agent = NixlAgent(agent_name, settings.transfer, span.memory_kind)
        return agent if faults is None else faults.agent(agent)

    transfer = TransferThread(
        make_agent,
        span,
        settings=settings.transfer,
        codec=NoticeCodec(encode_push_notice, decode_push_notice),
        clock=MonotonicClock(),
        on_event=inbox.put,
        read_blocks=arena.read_blocks if settings.transfer.verify == "digest" else None,
    )
    return _Loaded(engine, fingerprint, inbox, transfer, transfer.start())


class _Worker:
    """A loaded worker on its event loop, from the first join to the last message."""

    def __init__(
        self,
        settings: WorkerSettings,
        identity: Identity,
        loaded: _Loaded,
        server: grpc.aio.Server,
        build_role: BuildRole,
        orders: Orders,
        faults: WorkerFaults | None,
        tracing: Tracing | None,
        scrapes: Scrapes | None,
    ) -> None:
        self._settings = settings
        self._inbox = loaded.inbox
        self._server = server
        self._orders = orders
        self._loop = asyncio.get_running_loop()
        self._board = LoadBoard()
        self._settled = asyncio.Event()
        self._engine_failed: asyncio.Future[None] = self._loop.create_future()
        self._calls = PeerCalls(self._loop, settings.security.credentials, settings.max_message_bytes)
        engine, clock = loaded.engine, MonotonicClock()
        role, transfer = Role(settings.role), loaded.transfer
        observer = Observer(settings, engine, transfer, self._board.read, tracing, scrapes)
        self._attachment = self._attach(identity, loaded, observer, clock)
        send = self._attachment.send
        context = WorkerContext(
            engine=engine,
            clock=clock,
            endpoint=loaded.endpoint,
            fingerprint=loaded.fingerprint,
            me=identity.me,
            to_coordinator=observer.sending(send if faults is None else faults.messages(send)),
            to_transfer=observer.submitting(transfer.submit),
            to_engine=loaded.inbox.put,
            calls=self._calls,
            transfer=settings.transfer,
            entered=observer.entering(no_fault if faults is None else faults.entered),
        )
        self._parts = build_role(context)
        budget = transfer.budget_counts if role is Role.PREFILL else lambda: None
        self._clock = clock
        self._quarantine = QuarantineWatch(settings.quarantine_limit, settings.quarantine_patience_s)
        listener = EngineListener(
            self._on_settled,
            self._on_engine_failed,
            transfer.ignored,
            budget,
            self._on_measured,
            context.to_coordinator,
        )
        core = self._parts.core if faults is None else faults.core(self._parts.core)
        core = observer.core(core)
        self._engine_thread = EngineThread(engine, core, loaded.inbox, self._board, listener, clock)
        self._take = self._on_message if faults is None else faults.messages(self._on_message)

    def _attach(self, identity: Identity, loaded: _Loaded, observer: Observer, clock: Clock) -> Attachment:
        settings, role = self._settings, Role(self._settings.role)

        def register() -> Register:
            me, pid = identity.begin_life(), os.getpid()
            return Register(me, role, pid, loaded.fingerprint, loaded.engine.capacity, observer.metrics_address)

        return Attachment(
            settings.coordinator,
            register,
            lambda: self._board.beat(self._orders.is_draining, clock.now_s()),
            settings.security.credentials,
            settings.max_message_bytes,
        )

    async def run(self) -> None:
        """Serve until an order to leave was carried out. Raises what ended the worker otherwise."""
        add = cluster_pb2_grpc.add_PeeringServicer_to_server
        add(self._parts.servicer, self._server)  # type: ignore[no-untyped-call]
        await self._server.start()
        settle_heap()
        self._engine_thread.start()
        try:
            await self._until_ended()
        finally:
            if not await asyncio.to_thread(self._engine_thread.stop):
                logger.error("the engine thread does not stop; leaving without it")
                leave(EXIT_FAILED)
            await self._calls.close()
            await self._server.stop(_STOP_GRACE_S)

    async def _until_ended(self) -> None:
        """Stay attached until told to stop, until drained, or until something of ours fails."""
        run = self._attachment.run(self._settings.connect_timeout_s, self._take, self._on_lost)
        tasks: tuple[asyncio.Future[None], ...] = (
            asyncio.ensure_future(run),
            asyncio.ensure_future(self._orders.wait_stop()),
            asyncio.ensure_future(self._drained()),
            asyncio.ensure_future(self._watch_engine()),
            self._engine_failed,
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _drained(self) -> None:
        """Once a drain was ordered: returns when nothing runs, waits or is being handed off, or at the limit, and the
        coordinator has everything that was said until then."""
        limit_s = await self._orders.wait_drain()
        self._inbox.put(BeginDrain())
        self._attachment.beat()
        try:
            async with asyncio.timeout(limit_s):
                while not self._board.is_drained:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            logger.warning("not drained within %g s; what still runs goes on elsewhere", limit_s)
        await self._attachment.finish(_FLUSH_LIMIT_S)

    async def _watch_engine(self) -> None:
        """Ends the process when its engine stands still: heartbeats would go on, and its requests wait for ever. The
        process's end is also the proof that it writes no more."""
        limit_s = self._settings.engine_timeout_s
        suspected_at_s = None
        while True:
            last_s = self._board.published_at_s
            age_s = self._clock.now_s() - last_s
            if age_s >= limit_s and last_s == suspected_at_s:
                logger.error("the engine has stood still for %.1f s; leaving without it", age_s)
                leave(EXIT_FAILED)
            suspected_at_s = last_s if age_s >= limit_s else None  # after a stop of the whole process it has a chance
            await asyncio.sleep(limit_s / _LOOKS_PER_LIMIT)  # paces looks at the thread

    def _on_message(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Drain):
            self._orders.drain(message.limit_s)
            return
        if isinstance(message, PeerGone) and message.proven:
            self._calls.drop(message.worker)
        if not self._parts.on_message(message):
            self._inbox.put(message)

    def _on_lost(self) -> None:
        self._inbox.put(CoordinatorLost())

    def _on_settled(self) -> None:
        """In the engine thread."""
        self._attachment.beat()
        self._loop.call_soon_threadsafe(self._settled.set)

    def _on_measured(self, load: WorkerLoad) -> None:
        """In the engine thread."""
        if self._quarantine.is_over(load.blocks, self._clock.now_s()):
            self._loop.call_soon_threadsafe(self._orders.restart, self._quarantine.describe(load.blocks))

    def _on_engine_failed(self, error: Exception) -> None:
        """In the engine thread."""
        self._loop.call_soon_threadsafe(self._fail, EngineFailed(f"the engine thread failed: {error!r}"))

    def _fail(self, error: EngineFailed) -> None:
        if not self._engine_failed.done():
            self._engine_failed.set_exception(error)
