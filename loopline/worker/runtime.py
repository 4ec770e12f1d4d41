"""One worker process from settings to end: server, engine, transfer thread, stream to the coordinator, drain.

The role comes in as a `RoleParts` builder: its core for the engine thread and its gRPC servicer. Order of
construction is order of need, so nothing is born half-empty: inbox, stream, transfer thread, core, engine thread.
"""

import asyncio
import logging
import os
import queue
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from kvtransfer.agent import TransferAgent
from kvtransfer.commands import Command
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.region import ArenaSpan
from kvtransfer.transfer_thread import NoticeCodec, TransferEndpoint, TransferThread
from loopline.clock import Clock, MonotonicClock
from loopline.engine.engine import Engine
from loopline.errors import OperatorError, TransferError
from loopline.identity import Fingerprint, Peer, Role, WorkerId
from loopline.messages import CoordinatorMessage, Drain, Heartbeat, Register, WorkerMessage
from loopline.process import on_terminate, watch_life_pipe
from loopline.sched.policy import RolePolicy
from loopline.settings import WorkerSettings
from loopline.wire.channel import bind, join_address, server_options
from loopline.wire.convert import decode_push_notice, encode_push_notice
from loopline.worker.attachment import Attachment
from loopline.worker.engine_thread import EngineThread, Inbox, LoadBoard, WorkerCore
from loopline.worker.events import BeginDrain, CoordinatorLost

logger = logging.getLogger(__name__)
EXIT_OPERATOR = 2
_STOP_GRACE_S = 0.2


@dataclass(frozen=True)
class WorkerContext:
    """What a role builds its parts from. Calls may be made from any thread and return at once, `spawn` aside."""

    engine: Engine
    clock: Clock
    endpoint: TransferEndpoint
    fingerprint: Fingerprint
    me: Callable[[], Peer]
    to_coordinator: Callable[[WorkerMessage], None]
    to_transfer: Callable[[Command], None]
    to_engine: Callable[[object], None]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True)
class RoleParts:
    """A role's three parts: logic on the engine thread, peer service, and what it does on asyncio for a message that
    is not the engine's. `on_message` returns True if it took the message."""

    core: WorkerCore
    add_services: Callable[[grpc.aio.Server], None]
    on_message: Callable[[CoordinatorMessage], bool]


class BuildRole(Protocol):
    """Makes a role's parts."""

    def __call__(self, context: WorkerContext) -> RoleParts: ...


def run_worker(settings: WorkerSettings, policy: RolePolicy, build_role: BuildRole, life_fd: int | None) -> int:
    """Run until drained, terminated or told to stop; the process's exit status. Operator errors are one line on
    stderr.
    """
    try:
        return asyncio.run(_Process(settings, policy, build_role, life_fd).run())
    except (OperatorError, TransferError) as error:
        sys.stderr.write(f"{settings.name}: {error}\n")
        return EXIT_OPERATOR


class _Process:
    """The life of one worker process on its event loop."""

    def __init__(
        self, settings: WorkerSettings, policy: RolePolicy, build_role: BuildRole, life_fd: int | None
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._build_role = build_role
        self._life_fd = life_fd
        self._uuid = uuid.uuid4().hex
        self._epoch = 1
        self._is_draining = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._drain = asyncio.Event()
        on_terminate(loop, self._terminated)
        if self._life_fd is not None:
            watch_life_pipe(loop, self._life_fd, self._stop.set)
        server = grpc.aio.server(options=server_options())
        port = bind(server, self._settings.host, self._settings.port)  # before the model loads: a clash shows at once
        self._address = join_address(self._settings.host, port)
        engine = await asyncio.to_thread(Engine, self._settings.engine, self._policy)
        fingerprint = await asyncio.to_thread(engine.fingerprint)
        inbox: Inbox = queue.SimpleQueue()
        transfer = self._transfer_thread(engine, inbox)
        endpoint = await asyncio.to_thread(transfer.start)
        try:
            await self._serve(server, engine, fingerprint, inbox, transfer, endpoint)
        finally:
            if not await asyncio.to_thread(transfer.stop):
                logger.error("the transfer thread does not stop; leaving without it")
                os._exit(1)  # its agent may still write the arena, so the memory must not be freed in order
        return 0

    async def _serve(
        self,
        server: grpc.aio.Server,
        engine: Engine,
        fingerprint: Fingerprint,
        inbox: Inbox,
        transfer: TransferThread,
        endpoint: TransferEndpoint,
    ) -> None:
        board = LoadBoard()
        settled = asyncio.Event()
        loop = asyncio.get_running_loop()
        parts: RoleParts | None = None

        def register(epoch: int) -> Register:
            self._epoch = epoch
            role = Role(self._settings.role)
            return Register(self._me(), role, os.getpid(), fingerprint, engine.capacity)

        def on_message(message: CoordinatorMessage) -> None:
            if isinstance(message, Drain):
                self._drain.set()
            elif parts is None or not parts.on_message(message):
                inbox.put(message)

        attachment = Attachment(
            self._settings.coordinator,
            register,
            lambda: Heartbeat(board.read(), self._is_draining),
            on_message,
            lambda: inbox.put(CoordinatorLost()),
        )

        def on_settled() -> None:
            attachment.beat()
            loop.call_soon_threadsafe(settled.set)

        context = WorkerContext(
            engine=engine,
            clock=MonotonicClock(),
            endpoint=endpoint,
            fingerprint=fingerprint,
            me=self._me,
            to_coordinator=attachment.send,
            to_transfer=transfer.submit,
            to_engine=inbox.put,
            loop=loop,
        )
        parts = self._build_role(context)
        parts.add_services(server)
        await server.start()
        engine_thread = EngineThread(engine, parts.core, inbox, board, on_settled)
        engine_thread.start()
        try:
            await self._until_stopped(attachment, inbox, board, settled)
        finally:
            await asyncio.to_thread(engine_thread.stop)
            await server.stop(_STOP_GRACE_S)

    async def _until_stopped(
        self, attachment: Attachment, inbox: Inbox, board: LoadBoard, settled: asyncio.Event
    ) -> None:
        """Stay attached until told to stop, or until drained. Raises what the attachment raises."""
        attached = asyncio.create_task(attachment.run(self._settings.connect_timeout_s))
        stopped = asyncio.create_task(self._stop.wait())
        draining = asyncio.create_task(self._drained(attachment, inbox, board, settled))
        tasks: tuple[asyncio.Task[Any], ...] = (attached, stopped, draining)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _drained(self, attachment: Attachment, inbox: Inbox, board: LoadBoard, settled: asyncio.Event) -> None:
        """Returns once a drain was asked for and nothing runs, waits or is being handed off."""
        await self._drain.wait()
        self._is_draining = True
        inbox.put(BeginDrain())
        attachment.beat()
        while True:
            load = board.read()
            if not (load.running or load.waiting or load.handoffs or load.blocks.held):
                return
            settled.clear()
            await settled.wait()

    def _transfer_thread(self, engine: Engine, inbox: Inbox) -> TransferThread:
        arena = engine.arena
        is_cuda = self._settings.engine.device.startswith("cuda")
        span = ArenaSpan(
            base_address=arena.base_address,
            block_bytes=arena.layout.block_bytes,
            num_blocks=arena.num_blocks,
            null_block=arena.null_block,
            memory_kind="VRAM" if is_cuda else "DRAM",
            device_id=arena.tensor.device.index or 0,
        )

        def make_agent() -> TransferAgent:
            return NixlAgent(WorkerId(self._uuid, 0).agent_name, self._settings.transfer)

        return TransferThread(
            make_agent,
            span,
            settings=self._settings.transfer,
            codec=NoticeCodec(encode_push_notice, decode_push_notice),
            clock=MonotonicClock(),
            on_event=inbox.put,
        )

    def _me(self) -> Peer:
        return Peer(WorkerId(self._uuid, self._epoch), self._settings.name, self._address)

    def _terminated(self) -> None:
        """First signal: drain. Second: stop at once."""
        if self._drain.is_set():
            self._stop.set()
        self._drain.set()
