"""Starts a cluster's processes, watches over them and stops them; `loopline launch` calls it.

The coordinator is a process of this machine; where workers run is a `starters.Starter`'s matter. When this process
dies, however it dies, its children see the end of their life pipes and leave. They run in sessions of their own: a
terminal's Ctrl-C reaches only this process.
"""

import asyncio
import logging
import signal
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from coordinator.background import Background, Backoff, unless, wait_at_most
from coordinator.launcher_calls import Coordinator, Ended
from coordinator.launcher_link import stay_attached
from coordinator.processes import Child, OutOfSight, Process, end_children, start_child
from coordinator.roster import Roster
from coordinator.serving import wait_for_address, wait_serving
from coordinator.starters import Order, Starter, make_starter
from loopline.config import load_config
from loopline.config_notes import log_notes
from loopline.errors import OperatorError, PeerLost
from loopline.identity import Role
from loopline.launcher_messages import LauncherReport, WorkerCounts

_LOG = logging.getLogger(__name__)
_MOST_DRAIN_S = 10.0  # whoever stops a launch wants it to end soon, whatever the configuration allows
_LEAVE_S = 10.0  # for a process that was told to leave and has nothing left to finish
_ENDED_KEPT = 256
WORKER_MODULES = MappingProxyType(
    {Role.PREFILL: "prefill_worker", Role.DECODE: "decode_worker", Role.UNIFIED: "decode_worker.unified"}
)


@dataclass(frozen=True)
class _Life:
    """One process of a worker, after it. `words`: how it ended, for people."""

    pid: int | None
    end: int | OutOfSight
    words: str


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
        fork_log = run_dir / "forkserver.log" if forks_workers else None
        modules = [*worker_modules.values()]
        self._starter = starter or make_starter(self._config, config_path, modules, fork_log)
        self._children: dict[str, Process] = {}
        self._workers: dict[str, Process] = {}  # the living ones, by the uuid that they have joined under
        self._id = uuid.uuid4().hex
        self._roster = Roster()
        self._left: dict[str, asyncio.Event] = {}  # by name: the worker was told to leave
        self._waits: dict[str, str] = {}  # by name: why the worker does not run yet
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)  # uuids of reaped worker processes
        self._faulted: set[str] = set()  # those whose faults on purpose have had their chance
        self.changed = asyncio.Event()
        self._background = Background()
        self.drain_limit_s = min(_MOST_DRAIN_S, self._config.membership.drain_limit_s)
        self._has_served = False
        self._is_stranded = False  # its starter and all workers are lost
        self.address = ""

    async def __aenter__(self) -> Self:
        """Start everything; `address` is known then. Raises OperatorError with the log of what could not start."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        try:
            await self._starter.open()
            self._background.spawn(self._watch_starter())
            await self._start_coordinator()
        except BaseException:
            await self.stop()
            raise
        self.want(WorkerCounts.by_role(lambda role: self._config.group(role).replicas))
        hung = self._coordinator.kill_hung(self._living_workers, self._config.membership.lease_s)
        self._background.spawn(hung)
        self._background.spawn(stay_attached(self.address, self, self._background.stopping, self.credentials))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def public_address(self) -> str:
        """Where other machines of this cluster reach the coordinator, as far as that is known; else `address`."""
        return self._starter.reached_at(self.address)

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
        await self._background.unless_failed(wait_serving(self.address, timeout_s, self.credentials))
        self._has_served = True

    async def wait_stopped(self) -> None:
        """Until `stop` is called. Raises PeerLost or OperatorError when the cluster cannot go on."""
        await self._background.until_stopping()

    async def stop(self) -> None:
        """The coordinator drains within `drain_limit_s`, then the workers leave; what is left is killed.

        May be repeated. The coordinator has the same limit and ends what still runs then: every client gets a status.
        """
        self._background.stopping.set()
        for left in self._left.values():
            left.set()
        await self._starter.hurry()
        first = [child for child in self._children.values() if child.name == "coordinator"]
        if self._is_stranded:  # no request could finish
            await asyncio.gather(*(child.leave_at_once(_LEAVE_S) for child in first if isinstance(child, Child)))
        await end_children(first, self.drain_limit_s + _LEAVE_S)
        await end_children(list(self._children.values()), _LEAVE_S)
        while self._background.is_busy:
            await self._background.until_quiet()
            await end_children(list(self._children.values()), _LEAVE_S)  # one that was being started meanwhile
        await self._starter.close()

    # ---- what the coordinator wants ----------------------------------------------------------------------------------

    def report(self, revision: int) -> LauncherReport:
        """See Keeper."""
        return LauncherReport(
            launcher=self._id,
            place=self._starter.place,
            restarts=self._config.launcher.restart == "always",
            wanted=self._roster.wanted,
            revision=revision,
            workers=tuple(replace(kept, waits_for=self._waits.get(kept.name, "")) for kept in self._roster.kept()),
            ended=tuple(self._ended),
        )

    def want(self, counts: WorkerCounts) -> None:
        """See Keeper. A worker that leaves drains, as after any SIGTERM."""
        if self._background.is_stopping:
            return
        change = self._roster.want(counts)
        for worker in change.start:
            self._left[worker.name] = asyncio.Event()
            self._background.spawn(self._keep_worker(worker.name, worker.role))
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
        self._background.spawn(self._keep_coordinator(child))
        self.address = await self._background.unless_failed(wait_for_address(listen_file))

    @property
    def _coordinator(self) -> Coordinator:
        return Coordinator(self.address, self.credentials, self._background)

    async def _start_coordinator_process(self, port: int | None) -> Child:
        """`port` None: the configuration's. Raises OperatorError where no process can be had; once the cluster has
        served that may pass, and is tried again, less and less often, until all is stopped."""
        arguments = ["--config", str(self._config_path), "--listen-file", str(self._run_dir / "coordinator.json")]
        arguments += ["--drain-limit", str(self.drain_limit_s)]
        if port is not None:
            arguments += ["--port", str(port)]
        backoff = Backoff()
        while True:
            try:
                child = await start_child("coordinator", "coordinator", arguments, self._run_dir / "coordinator.log")
                break
            except OSError as error:
                failure = OperatorError(f"coordinator cannot be started: {error}")
            if not self._has_served or self._background.is_stopping:
                raise failure
            _LOG.error("%s; tried again", failure)
            await self._background.unless_stopped(backoff.after(0.0))
        self._add_child(child)
        return child

    def _add_child(self, child: Process) -> None:
        self._children[child.name] = child
        if self._background.is_stopping:  # whoever ends the children has not seen this one
            child.kill()

    async def _keep_coordinator(self, child: Child) -> None:
        """Reap it, and once the cluster has served start it again at the port of its first life."""
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while True:
            started_s = loop.time()
            exit_status = await child.reap()
            if self._background.is_stopping:
                return
            if not self._has_served or self._config.launcher.restart == "never":
                words = child.describe_end()
                self._background.fail(PeerLost(words) if self.address else OperatorError(words))
                return
            _LOG.warning("the coordinator ended with exit status %d and is started again", exit_status)
            if await self._background.unless_stopped(backoff.after(loop.time() - started_s)):
                return
            child = await self._start_coordinator_process(int(self.address.rpartition(":")[2]))

    async def _keep_worker(self, name: str, role: Role) -> None:
        """Start one worker, reap it, report its end and start it again, until it is told to leave."""
        left = self._left[name]
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        while not left.is_set():
            started_s = loop.time()
            process = uuid.uuid4().hex  # one for each try: what became of the last one may be unknown
            try:
                life = await self._live(name, role, process)
            except (OSError, OperatorError) as error:
                failure = OperatorError(f"{name} cannot be started: {error}")
                if not self._has_served:
                    raise failure from None
                _LOG.error("%s; tried again", failure)
                self._on_wait(name, str(error))
                await wait_at_most(left, backoff.after(0.0))
                continue
            if self._background.is_stopping:
                return
            if life is None:
                break
            if not self._has_served and (isinstance(life.end, OutOfSight) or life.end > 0):
                self._background.fail(OperatorError(life.words))
                return
            await self._tell_end(name, process, life)
            if self._config.launcher.restart == "never":
                break
            await wait_at_most(left, backoff.after(loop.time() - started_s, was_told=life.end == 0))
        if not self._background.is_stopping:
            self._starter.release(name)
            self._roster.ended(name)
            self._waits.pop(name, None)
            self.changed.set()

    async def _live(self, name: str, role: Role, process: str) -> _Life | None:
        """Start a worker, known by the uuid `process`, and reap it. None: it was told to leave before there was one.
        Raises OperatorError or OSError where none can be had."""
        arguments: tuple[str, ...] = ()
        if self._config.faults and name in self._faulted:
            arguments = ("--without-faults",)  # each of them happens once
        module, log_path = self._worker_modules[role], self._run_dir / f"{name}.log"
        order = Order(name, role, process, module, self.address, arguments, log_path, partial(self._on_wait, name))
        child = await self._starter.start(order, self._left[name])
        self._on_wait(name, "")
        if child is None:
            return None
        self._faulted.add(name)
        if isinstance(child, OutOfSight):
            return _Life(None, child, f"{name} is out of sight since its start: {child.why}")
        self._add_child(child)
        if self._left[name].is_set():  # said while it was being started
            child.terminate()
        self._workers[process] = child
        end = await child.reap()
        del self._workers[process]
        if not isinstance(end, OutOfSight):
            self._note_end(process)
        return _Life(child.pid, end, child.describe_end())

    async def _watch_starter(self) -> None:
        try:
            await unless(self._background.stopping, self._starter.watch())
        except OperatorError:
            self._is_stranded = True
            raise

    def _on_wait(self, name: str, words: str) -> None:
        if words != self._waits.get(name, ""):
            self._waits[name] = words
            self.changed.set()

    def _living_workers(self) -> dict[str, Process]:
        return {process: child for process, child in self._workers.items() if child.is_alive}

    def _note_end(self, process: str) -> None:
        self._ended.append(process)
        self.changed.set()

    async def _tell_end(self, name: str, process: str, life: _Life) -> None:
        if isinstance(life.end, OutOfSight):
            _LOG.warning("worker %s is out of sight: %s", name, life.words)
            self._background.spawn(self._prove_end(life.end, Ended(name, process, life.pid, None)))
        else:
            if life.end == 0 or (life.end == -signal.SIGTERM and self._left[name].is_set()):
                _LOG.info("worker %s has left", name)
            else:
                _LOG.warning("worker %s", life.words)
            await self._coordinator.report(Ended(name, process, life.pid, life.end))

    async def _prove_end(self, lost: OutOfSight, ended: Ended) -> None:
        """Of a worker that whoever watched it lost sight of: until then others keep blocks for it."""
        if await unless(self._background.stopping, _proven(lost)):
            _LOG.warning("worker %s (pid %s) was out of sight and is proven to have ended", ended.name, ended.pid)
            self._note_end(ended.uuid)
            await self._coordinator.report(ended)


async def _proven(lost: OutOfSight) -> bool:
    await lost.proven()
    return True
