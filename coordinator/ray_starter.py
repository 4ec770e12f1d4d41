"""Workers on the nodes of a Ray cluster. The only module that imports Ray.

Each worker is the child of a supervisor in an actor on its node. Ray decides where: workers of a role that come at once
share a placement group. Ray's word that an actor or a node is dead is suspicion; the proof of a worker's end is its
supervisor's, or that of another process of the same machine.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.processes import tail_of
from coordinator.ray_placement import Group, Groups, Need, need_of, strategy_of
from coordinator.ray_supervisor import Started, Supervisor
from coordinator.seat import Seat, end_and_look, this_machine, this_network
from coordinator.starters import Order
from loopline.config import ClusterConfig, resolve_paths
from loopline.errors import OperatorError
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker
from loopline.wire.channel import join_address

_LOG = logging.getLogger(__name__)
_SAY_S = 10.0  # between words about a worker that waits for its place
_RETRY_S = 1.0
_EVERY = ("0.0.0.0", "::")
_HIDDEN = re.compile(":|_group_|memory")  # among resources: those of Ray's own accounts
_LAST_WORDS_S = 5.0  # for the rest of a log after the end of its process
_KILL_S = 10.0  # for a supervisor to kill its worker, then for Ray to kill the supervisor


class RayStarter:
    """See Starter. On one event loop; Ray's calls that wait are made in threads."""

    def __init__(self, config: ClusterConfig, config_path: Path) -> None:
        """Raises ConfigError for what cannot be asked of Ray."""
        self._config = config
        self._needs = {role: need_of(config, role) for role in Role}
        self._shipped = _with_absolute_paths(config_path)
        self._groups = Groups()
        self._made: dict[Group, asyncio.Task[Any]] = {}
        self._living: set[RayProcess] = set()  # and perhaps some that are not any more
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._node_address = ""
        self.place = "Ray"

    async def open(self) -> None:
        """Attach to a Ray cluster, or start one. Raises OperatorError with Ray's reason."""
        address = self._config.launcher.address
        try:
            # In a thread: from the main one Ray would take the signal handlers of this process.
            await asyncio.to_thread(self._connect, address)
        except (ConnectionError, RuntimeError, ValueError, RayError, OSError) as error:
            hint = "; `ray start --head` starts one, and launcher.address: local has the launch start its own"
            raise OperatorError(
                f"launcher.address is {address}: no Ray cluster to attach to: {_first_line(error)}"
                + (hint if address == "auto" else "")
            ) from None

    def _connect(self, address: str) -> None:
        options = self._of_own_cluster() if address == "local" else {}
        logging.getLogger("ray").setLevel(logging.ERROR)  # it would say that it leaves the signal handlers alone
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
        self._is_open = True
        self._node_address = ray.util.get_node_ip_address()
        self.place = f"Ray at {ray.get_runtime_context().gcs_address}"

    def _of_own_cluster(self) -> dict[str, Any]:
        """A cluster of this machine alone has what the configuration's workers take, however small the machine is."""
        total: dict[str, float] = {}
        for role in Role:
            for name, amount in self._needs[role].resources.items():
                total[name] = total.get(name, 0.0) + amount * self._config.group(role).replicas
        total.pop("GPU", None)  # those that are there
        num_cpus = max(total.pop("CPU"), os.cpu_count() or 1)
        return {"num_cpus": num_cpus, "resources": total, "include_dashboard": False}

    def coordinator_address(self, address: str) -> str:
        """See Starter. One that listens everywhere is reached at this node's address."""
        if self._config.coordinator.host not in _EVERY:
            return address
        return join_address(self._node_address, int(address.rpartition(":")[2]))

    def expect(self, workers: Sequence[KeptWorker]) -> None:
        """See Starter."""
        for group in self._groups.expect(workers):
            self._made[group] = asyncio.get_running_loop().create_task(asyncio.to_thread(self._make_group, group))

    def _make_group(self, group: Group) -> Any:
        need, count = self._needs[group.role], len(group.holders)
        labels = [dict(need.labels)] * count if need.labels else None
        bundles = [dict(need.resources) for _ in range(count)]
        return placement_group(bundles, strategy_of(self._config, group.role), bundle_label_selector=labels)

    async def start(self, order: Order, left: asyncio.Event) -> "RayProcess | None":
        """See Starter. Waits for as long as no node has what the worker needs, and says so."""
        slot = self._groups.slot(order.name)
        need = self._needs[order.role]
        try:
            made = await asyncio.shield(self._made[slot.group])
        except (RayError, ValueError) as error:
            raise OperatorError(f"Ray makes no place for it: {_first_line(error)}") from None
        actor = self._make_actor(made, slot.bundle, need)
        started: Started | None = None
        try:
            started = await self._started(actor, made, order, left, need)
        finally:
            if started is None:
                await asyncio.to_thread(ray.kill, actor)
        if started is None:
            return None
        process = RayProcess(order, started, actor, self._prove)
        self._living = {other for other in self._living if other.is_alive} | {process}
        return process

    def _make_actor(self, made: Any, bundle: int, need: Need) -> Any:
        return (
            ray.remote(Supervisor)
            .options(
                num_cpus=need.num_cpus,
                num_gpus=need.num_gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(made, bundle),
            )
            .remote()
        )

    async def _started(self, actor: Any, made: Any, order: Order, left: asyncio.Event, need: Need) -> Started | None:
        """None if `left` comes first."""
        coordinator = order.arguments[order.arguments.index("--coordinator") + 1]
        reference = actor.start.remote(
            order.name, order.module, order.arguments, self._shipped, coordinator, this_network()
        )
        starting: asyncio.Future[Started] = asyncio.ensure_future(_result(reference))
        leaving = asyncio.ensure_future(left.wait())
        try:
            while not (starting.done() or leaving.done()):
                await asyncio.wait((starting, leaving), timeout=_SAY_S, return_when=asyncio.FIRST_COMPLETED)
                if not (starting.done() or leaving.done()) and (
                    said := await asyncio.to_thread(_wait_words, made, need)
                ):
                    _LOG.warning("%s waits for %s: %s", order.name, self.place, said)
            return starting.result() if starting.done() else None
        except RayTaskError as error:  # what the supervisor itself raised
            raise OperatorError(str(error.cause)) from None
        except RayError as error:
            raise OperatorError(f"its supervisor did not come up: {error}") from None
        finally:
            starting.cancel()
            leaving.cancel()
            await asyncio.gather(starting, leaving, return_exceptions=True)

    async def _prove(self, seat: Seat) -> None:
        """Until some process of the seat's machine, this one or a supervisor there, has seen that it is empty."""
        while True:
            if seat.machine == this_machine() and end_and_look(seat):
                return
            for process in self._living:
                if process.is_alive and process.machine == seat.machine and await process.has_seen_the_end_of(seat):
                    return
            await asyncio.sleep(_RETRY_S)  # nobody tells of a machine's return

    def release(self, name: str) -> None:
        """See Starter."""
        group = self._groups.release(name)
        if group is not None:
            _keep(self._tasks, self._give_back(self._made.pop(group)))

    async def _give_back(self, made: "asyncio.Task[Any]") -> None:
        with contextlib.suppress(RayError, ValueError):
            await asyncio.to_thread(remove_placement_group, await made)

    async def close(self) -> None:
        """See Starter. What this launch has at Ray's ends with its connection."""
        for task in (*self._tasks, *self._made.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._made.values(), return_exceptions=True)
        for process in self._living:
            process.close()
        if self._is_open:
            self._is_open = False
            await asyncio.to_thread(ray.shutdown)


class RayProcess:
    """See Process: a worker under its supervisor. Its log is copied to this machine as it is written."""

    def __init__(self, order: Order, started: Started, actor: Any, prove: Callable[[Seat], Awaitable[None]]) -> None:
        """`prove` waits until a process of a machine is proven to have ended."""
        self.name = order.name
        self.pid = started.pid
        self._log_path = order.log_path
        self._started = started
        self._actor = actor
        self._prove = prove
        self._end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._lost_by = ""  # Ray's words, where nobody saw the end
        self._is_killed = False
        self._tasks: set[asyncio.Task[None]] = set()
        _keep(self._tasks, self._watch())

    @property
    def is_alive(self) -> bool:
        """See Process."""
        return not self._end.done()

    @property
    def machine(self) -> str:
        """Of its seat."""
        return self._started.seat.machine if self._started.seat is not None else ""

    async def reap(self) -> int | None:
        """See Process."""
        return await asyncio.shield(self._end)

    async def wait(self) -> None:
        """See Process."""
        await asyncio.wait((self._end,))

    async def proven(self) -> None:
        """See Process."""
        if self._started.seat is not None:
            await self._prove(self._started.seat)

    def terminate(self) -> None:
        """See Process."""
        _keep(self._tasks, self._tell("terminate"))

    def kill(self) -> None:
        """See Process. Where its supervisor does not answer the supervisor is killed, and the worker goes with it."""
        if not self._is_killed:
            self._is_killed = True
            _keep(self._tasks, self._kill())

    def describe_end(self) -> str:
        """See Process."""
        how = (
            f"nobody saw its end: {self._lost_by}" if self._lost_by else f"ended with exit status {self._end.result()}"
        )
        return f"{self.name} on {self._started.host_name} {how}; {tail_of(self._log_path)}"

    async def has_seen_the_end_of(self, seat: Seat) -> bool:
        """Ask its supervisor, on whose machine the seat is."""
        try:
            return bool(await self._actor.end_and_look.remote(seat))
        except RayError:
            return False

    def close(self) -> None:
        """Watch it no more."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self) -> None:
        copying = asyncio.ensure_future(self._copy_log())
        exit_status = await self._exit_status()
        await asyncio.wait((copying,), timeout=_LAST_WORDS_S)
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        await asyncio.to_thread(ray.kill, self._actor)
        self._set_end(exit_status)

    async def _exit_status(self) -> int | None:
        while True:
            try:
                return int(await self._actor.wait.remote())
            except ActorUnavailableError:  # it may come back
                await asyncio.sleep(_RETRY_S)  # paces a question that is answered at once
            except RayError as error:
                self._lost_by = _first_line(error)
                return None

    def _set_end(self, exit_status: int | None) -> None:
        if not self._end.done():
            self._end.set_result(exit_status)

    async def _copy_log(self) -> None:
        offset = 0
        with self._log_path.open("ab") as log, contextlib.suppress(RayError):
            log.write(f"--- {self.name} on {self._started.host_name}, pid {self.pid}\n".encode())
            while chunk := await self._actor.read_log.remote(offset):
                log.write(chunk)
                log.flush()
                offset += len(chunk)

    async def _tell(self, order: str) -> None:
        with contextlib.suppress(RayError):
            await getattr(self._actor, order).remote()

    async def _kill(self) -> None:
        _keep(self._tasks, self._tell("kill"))
        await asyncio.wait((self._end,), timeout=_KILL_S)
        if self.is_alive:
            await asyncio.to_thread(ray.kill, self._actor)
            await asyncio.wait((self._end,), timeout=_KILL_S)
            self._lost_by = self._lost_by or "its supervisor does not answer and was killed"
            self._set_end(None)


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Run it in the background; `tasks` keeps it alive, and says its failure in the log."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(lambda done: _on_done(tasks, done))


def _on_done(tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
    tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("a task of the launcher's own failed", exc_info=task.exception())


async def _result(reference: Any) -> Any:
    return await reference


def _wait_words(made: Any, need: Need) -> str:
    """What a worker waits for, for people; "": only for its supervisor, which takes a while to start."""
    if placement_group_table(made).get("state") == "CREATED":
        return ""
    rest = ray.available_resources().items()
    free = ", ".join(f"{amount:g} {name}" for name, amount in sorted(rest) if not _HIDDEN.search(name))
    return f"it needs {need.describe()}; free on all nodes together: {free or 'nothing'}"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), repr(error)).strip()


def _with_absolute_paths(config_path: Path) -> str:
    """The cluster YAML as every node reads it: what was relative to its folder is where it is on this machine."""
    raw = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    raw.setdefault("name", config_path.stem)
    resolve_paths(raw, config_path.resolve().parent)
    return yaml.safe_dump(raw, sort_keys=False)
