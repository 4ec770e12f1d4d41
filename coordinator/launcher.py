"""Starts a cluster's processes, watches over them and stops them; `loopline launch` calls it.

The coordinator is a process of this machine; where workers run is a `starters.Starter`'s matter. When this process
dies, however it dies, its children see the end of their life pipes and leave. They run in sessions of their own: a
terminal's Ctrl-C reaches only this process.
"""

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from coordinator.forking import ForkServer
from coordinator.hung import HungLooks
from coordinator.launcher_link import stay_attached
from coordinator.processes import Process, end_children, start_child
from coordinator.roster import Roster
from coordinator.serving import wait_for_address, wait_serving
from coordinator.starters import Order, Starter, make_starter
from loopline.config import load_config
from loopline.config_notes import log_notes
from loopline.errors import LooplineError, OperatorError, PeerLost
from loopline.identity import Role, WorkerState
from loopline.launcher_messages import LauncherReport, WorkerCounts
from loopline.wire._generated.loopline.v1 import cluster_pb2, cluster_pb2_grpc, loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import open_channel

_LOG = logging.getLogger(__name__)
_CALL_S = 2.0
_RETRY_S = 0.2
_MOST_DRAIN_S = 10.0  # whoever stops a launch wants it to end soon, whatever the configuration allows
_LEAVE_S = 10.0  # for a process that was told to leave and has nothing left to finish
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 10.0
_ENDED_KEPT = 256
_UNSEEN = -1  # the exit status of a process that ended while nobody watched it
_SETTLED_S = 30.0  # after a life this long the backoff starts over
WORKER_MODULES = MappingProxyType(
    {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker", Role.UNIFIED: "decode_worker.unified"}
)
T = TypeVar("T")
AnyProcess = TypeVar("AnyProcess", Process, Process | None)


class Launcher:
    """`async with` starts the coordinator and the workers, and leaves no process behind.

    Until the cluster has served, a process that ends with an error ends the launch. Later it is started again unless
    the configuration says never: then the coordinator's end ends the launch. A coordinator comes back at its port, so
    `address` holds for as long as the launch does; workers and clients come back to it by themselves.

    It is a `launcher_link.Keeper`: how many workers it keeps is the configuration's word at first, then the
    coordinator's.
    """

    def __init__(
        self,
        config_path: Path,
        *,
        run_dir: Path,
        port: int | None = None,
        worker_modules: Mapping[Role, str] = WORKER_MODULES,
        forks_workers: bool = False,
        starter: Starter | None = None,
    ) -> None:
        """`run_dir` takes logs and the listen file; `worker_modules`: what `python -m` runs; `forks_workers`: those of
        this machine from a process that has loaded them, which makes this process adopt what its descendants leave;
        `starter`: None: what the configuration names. Raises OperatorError."""
        self._worker_modules = worker_modules
        self._config_path = config_path
        self._config = load_config(config_path)
        log_notes(self._config)
        self.credentials = self._config.read_security(with_clients=False).credentials
        """What this launcher shows to the coordinator: the cluster's own."""
        self._port = port
        self._run_dir = run_dir
        is_here = self._config.launcher.kind == "local"
        modules = [*worker_modules.values()]
        self._forks = ForkServer(modules, run_dir / "forkserver.log") if forks_workers and is_here else None
        self._starter = starter or make_starter(self._config, config_path, self._forks)
        self._children: dict[str, Process] = {}
        self._workers: dict[str, Process] = {}  # the living ones, by the uuid that they have joined under
        self._id = uuid.uuid4().hex
        self._roster = Roster()
        self._left: dict[str, asyncio.Event] = {}  # by name: the worker was told to leave
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)  # uuids of reaped worker processes
        self._faulted: set[str] = set()  # those whose faults on purpose have had their chance
        self.changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: LooplineError | None = None
        self.drain_limit_s = min(_MOST_DRAIN_S, self._config.membership.drain_limit_s)
        self._has_served = False
        self.address = ""

    async def __aenter__(self) -> Self:
        """Start everything; `address` is known then. Raises OperatorError with the log of what could not start."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        try:
            if self._forks is not None:
                await self._forks.open()
            await self._starter.open()
            await self._start_coordinator()
        except BaseException:
            await self.stop()
            raise
        self.want(WorkerCounts.by_role(lambda role: self._config.group(role).replicas))
        self._spawn(self._kill_hung_workers())
        self._spawn(stay_attached(self.address, self, self._stopping, self.credentials))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of living processes, each on its own host, by name."""
        return {name: child.pid for name, child in self._children.items() if child.is_alive}

    def kill(self) -> None:
        """End every process at once; `stop` waits for that."""
        for child in self._children.values():
            child.kill()

    async def wait_serving(self, timeout_s: float) -> None:
        """Until a real token has gone through the cluster. Raises OperatorError (a process failed), TimeoutError."""
        await self._unless_failed(wait_serving(self.address, timeout_s, self.credentials))
        self._has_served = True

    async def wait_stopped(self) -> None:
        """Until `stop` is called. Raises PeerLost or OperatorError when the cluster cannot go on."""
        await self._unless_failed(_wait(self._stopping))

    async def stop(self) -> None:
        """The coordinator drains within `drain_limit_s`, then the workers leave; what is left is killed.

        May be repeated. The coordinator has the same limit and ends what still runs then: every client gets a status.
        """
        self._stopping.set()
        for left in self._left.values():
            left.set()
        if self._forks is not None:
            await self._forks.close()
        first = [child for child in self._children.values() if child.name == "coordinator"]
        await end_children(first, self.drain_limit_s + _LEAVE_S)
        await end_children(list(self._children.values()), _LEAVE_S)
        while self._tasks:
            await asyncio.wait(self._tasks)
            await end_children(list(self._children.values()), _LEAVE_S)  # one that was being started meanwhile
        await self._starter.close()

    # ---- what the coordinator wants ----------------------------------------------------------------------------------

    def report(self, revision: int) -> LauncherReport:
        """See Keeper."""
        return LauncherReport(
            launcher=self._id,
            host=self._starter.place,
            restarts=self._config.launcher.restart == "always",
            wanted=self._roster.wanted,
            revision=revision,
            workers=self._roster.kept(),
            ended=tuple(self._ended),
        )

    def want(self, counts: WorkerCounts) -> None:
        """See Keeper. A worker that leaves drains, as after any SIGTERM."""
        if self._stopping.is_set():
            return
        change = self._roster.want(counts)
        self._starter.expect(change.start)
        for worker in change.start:
            self._left[worker.name] = asyncio.Event()
            self._spawn(self._keep_worker(worker.name, worker.role))
        for name in change.leave:
            self._left[name].set()
            if name in self._children and self._children[name].is_alive:
                self._children[name].terminate()
        self.changed.set()

    # ---- processes ---------------------------------------------------------------------------------------------------

    async def _start_coordinator(self) -> None:
        listen_file = self._run_dir / "coordinator.json"
        listen_file.unlink(missing_ok=True)
        child = await self._start_coordinator_process(self._port)
        self._spawn(self._keep_coordinator(child))
        self.address = await self._unless_failed(wait_for_address(listen_file))

    async def _start_coordinator_process(self, port: int | None) -> Process:
        """`port` None: the configuration's."""
        arguments = ["--config", str(self._config_path), "--listen-file", str(self._run_dir / "coordinator.json")]
        arguments += ["--drain-limit", str(self.drain_limit_s)]
        if port is not None:
            arguments += ["--port", str(port)]
        log_path = self._run_dir / "coordinator.log"
        return await self._start("coordinator", lambda: start_child("coordinator", "coordinator", arguments, log_path))

    async def _start_worker(self, name: str, role: Role, process: str) -> Process | None:
        """None: it was told to leave before there was one. `process`: the uuid that it will be known by."""
        arguments = ["--name", name, "--coordinator", self._starter.coordinator_address(self.address)]
        arguments += ["--uuid", process]
        if self._config.faults and name in self._faulted:
            arguments.append("--without-faults")  # each of them happens once
        self._faulted.add(name)
        order = Order(name, role, self._worker_modules[role], tuple(arguments), self._run_dir / f"{name}.log")
        return await self._start(name, lambda: self._starter.start(order, self._left[name]))

    async def _start(self, name: str, start: Callable[[], Awaitable[AnyProcess]]) -> AnyProcess:
        """Raises OperatorError where no process can be had; once the cluster has served that may pass, and is tried
        again, less and less often, until all is stopped."""
        backoff_s = _BACKOFF_FIRST_S
        while True:
            try:
                child = await start()
                break
            except (OSError, OperatorError) as error:
                failure = OperatorError(f"{name} cannot be started: {error}")
            if not self._has_served or self._stopping.is_set():
                raise failure
            _LOG.error("%s; tried again", failure)
            await self._unless_stopped(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)
        if child is not None:
            self._children[name] = child
            if self._stopping.is_set():  # whoever ends the children has not seen this one
                child.kill()
        return child

    async def _keep_coordinator(self, child: Process) -> None:
        """Reap it, and once the cluster has served start it again at the port of its first life."""
        loop = asyncio.get_running_loop()
        backoff_s = _BACKOFF_FIRST_S
        while True:
            started_s = loop.time()
            exit_status = await child.reap()
            if self._stopping.is_set():
                return
            if not self._has_served or self._config.launcher.restart == "never":
                self._fail(PeerLost(child.describe_end()) if self.address else OperatorError(child.describe_end()))
                return
            _LOG.warning("the coordinator ended with exit status %d and is started again", exit_status)
            if loop.time() - started_s >= _SETTLED_S:
                backoff_s = _BACKOFF_FIRST_S
            if await self._unless_stopped(backoff_s):
                return
            backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)
            child = await self._start_coordinator_process(int(self.address.rpartition(":")[2]))

    async def _keep_worker(self, name: str, role: Role) -> None:
        """Start one worker, reap it, report its end and start it again, until it is told to leave."""
        left = self._left[name]
        loop = asyncio.get_running_loop()
        backoff_s = _BACKOFF_FIRST_S
        while not left.is_set():
            started_s = loop.time()
            process = uuid.uuid4().hex
            child = await self._start_worker(name, role, process)
            if child is None:
                break
            if left.is_set():  # said while it was being started
                child.terminate()
            self._workers[process] = child
            exit_status = await child.reap()
            del self._workers[process]
            if exit_status is not None:
                self._note_end(process)
            if self._stopping.is_set():
                return
            if (exit_status is None or exit_status > 0) and not self._has_served:
                self._fail(OperatorError(child.describe_end()))
                return
            if exit_status is None:
                _LOG.warning("worker %s is out of sight: %s", name, child.describe_end())
                self._spawn(self._prove_end(child, process))
            else:
                _LOG.warning("worker %s ended with exit status %d", name, exit_status)
                await self._report_exit(child, exit_status, process)
            if self._config.launcher.restart == "never":
                break
            if exit_status == 0 or loop.time() - started_s >= _SETTLED_S:  # 0: it was told to drain
                backoff_s = _BACKOFF_FIRST_S
            await _wait_at_most(left, backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)
        if not self._stopping.is_set():
            self._starter.release(name)
            self._roster.ended(name)
            self.changed.set()

    def _note_end(self, process: str) -> None:
        self._ended.append(process)
        self.changed.set()

    async def _prove_end(self, child: Process, process: str) -> None:
        """Of a worker that whoever watched it lost sight of: until then others keep blocks for it."""
        proof = asyncio.ensure_future(child.proven())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((proof, stopping), return_when=asyncio.FIRST_COMPLETED)
            if proof.done():
                proof.result()
                _LOG.warning("worker %s (pid %d) was out of sight and is proven to have ended", child.name, child.pid)
                self._note_end(process)
                await self._report_exit(child, _UNSEEN, process)
        finally:
            proof.cancel()
            stopping.cancel()
            await asyncio.gather(proof, stopping, return_exceptions=True)

    async def _report_exit(self, child: Process, exit_status: int, process: str) -> None:
        """The proof that this process can write no more: said until it is answered, or until all is stopped."""
        stub: Any = cluster_pb2_grpc.ClusterStub
        message = cluster_pb2.WorkerExit(pid=child.pid, exit_status=exit_status, name=child.name, uuid=process)
        async with open_channel(self.address, self.credentials) as channel:
            while not self._stopping.is_set():
                try:
                    await stub(channel).ReportExit(message, timeout=_CALL_S, wait_for_ready=True)
                    return
                except grpc.aio.AioRpcError as error:
                    _LOG.warning("the end of %s cannot be reported yet: %s", child.name, error.code())
                await self._unless_stopped(_RETRY_S)

    async def _kill_hung_workers(self) -> None:
        """Kill a worker that is lost, or that has joined once and is not there under a later coordinator, and does not
        come back: its writes must be proven to have ended."""
        lease_s = self._config.membership.lease_s
        looks = HungLooks(lease_s)
        stub: Any = loopline_pb2_grpc.LooplineStub
        async with open_channel(self.address, self.credentials) as channel:
            while not await self._unless_stopped(lease_s):
                try:
                    status = await stub(channel).GetStatus(loopline_pb2.GetStatusRequest(), timeout=_CALL_S)
                except grpc.aio.AioRpcError:
                    continue
                there = {row.uuid: WorkerState(row.state) for row in status.workers}
                living = {uuid: child for uuid, child in self._workers.items() if child.is_alive}
                for uuid in looks.look(there, living):
                    _LOG.warning("worker %s (pid %d) is hung: killed", living[uuid].name, living[uuid].pid)
                    living[uuid].kill()

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, OperatorError):
                self._fail(error)
                return
            _LOG.error("a task of the launcher's own failed", exc_info=error)
            self._fail(OperatorError(f"the launcher failed: {error}"))

    def _fail(self, failure: LooplineError) -> None:
        if self._failure is None and not self._stopping.is_set():
            self._failure = failure
            self._failed.set()

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; raises the failure if that comes first."""
        loop = asyncio.get_running_loop()
        wanted, failed = loop.create_task(work), loop.create_task(_wait(self._failed))
        try:
            await asyncio.wait((wanted, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return await wanted
        finally:
            wanted.cancel()
            failed.cancel()
            await asyncio.gather(wanted, failed, return_exceptions=True)

    async def _unless_stopped(self, limit_s: float) -> bool:
        """Wait that long, or until `stop` is called: then True."""
        return await _wait_at_most(self._stopping, limit_s)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _wait_at_most(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()
