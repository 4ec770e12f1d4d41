"""Workers on the nodes of a Ray cluster.

Each worker is the child of a supervisor in an actor on its node, and has a placement group of its own for as long as
it is kept: a process that is started again finds its place free, and a worker that leaves gives it back at once. The
node is chosen here (`ray_placement`); Ray takes another one where that is full or lost. Ray's word that an actor or a
node is dead is suspicion; the proof of a worker's end is its supervisor's, or another process's of the same machine.
The successor of a worker out of sight has a new place, on another node where one has room.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator.background import unless
from coordinator.processes import OutOfSight
from coordinator.ray_calls import Group, RayCalls, RayError, RayTaskError, words_of
from coordinator.ray_placement import Need, Suspects, choose_node, less_placed, needs_of, strategy_of, waiting_words
from coordinator.ray_process import RayProcess, keep
from coordinator.ray_supervisor import Started, Trace, look_for
from coordinator.seat import Seat, this_machine, this_network
from coordinator.starters import Order, arguments_of
from loopline.config import ClusterConfig, resolve_paths
from loopline.errors import OperatorError
from loopline.hosts import is_every_host
from loopline.identity import Role
from loopline.wire.channel import join_address

_LOG = logging.getLogger(__name__)
_SAY_S = 10.0  # between words about a worker that waits for its place
_ANSWER_S = 15.0  # at first, for a node to keep a place or have a supervisor answer before another one is tried
_START_S = 30.0  # for a supervisor that is there to say that its worker runs
_RETRY_S = 1.0
_LOOK_S = 2.0


@dataclass(eq=False)
class _Place:
    """A worker's placement group. `wish`: the node that was asked for, because it has room; `node`: where it was last
    seen."""

    role: Role
    group: Group
    wish: str | None
    node: str | None = None


@dataclass(frozen=True)
class _Supervised:
    """An actor that has answered, and which process it is."""

    place: _Place
    actor: Any
    host_name: str
    seat: Seat


class RayStarter:
    """See Starter. On one event loop."""

    def __init__(self, config: ClusterConfig, config_path: Path) -> None:
        """Raises ConfigError for what cannot be asked of Ray."""
        self._config = config
        self._needs = needs_of(config)
        self._shipped = _with_absolute_paths(config_path)
        self._calls = RayCalls()
        self._placing = asyncio.Lock()  # one choice after the other, in the order of the starts
        self._places: dict[str, asyncio.Task[_Place]] = {}
        self._living: set[RayProcess] = set()  # and perhaps some that are not any more
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspects = Suspects(time.monotonic)
        self._addresses: dict[str, str] = {}  # of nodes that have been seen, by their ids
        self._node_address = ""
        self.place = "Ray"

    async def open(self) -> None:
        """Attach to a Ray cluster, or start one. Raises OperatorError with Ray's reason."""
        address = self._config.launcher.address
        try:
            options = self._of_own_cluster() if address == "local" else {}
            cluster, self._node_address = await self._calls.connect(address, options)
        except Exception as error:  # of any kind: Ray raises plain ones, too
            hint = "; `ray start --head` starts one, and launcher.address: local has the launch start its own"
            raise OperatorError(
                f"launcher.address is {address}: no Ray cluster to attach to: {words_of(error)}"
                + (hint if address == "auto" and error.__cause__ is None else "")  # else there is one
            ) from None
        self.place = f"Ray at {cluster}"

    def _of_own_cluster(self) -> dict[str, Any]:
        """A cluster of this machine alone has what the configuration's workers take, however small the machine is."""
        total: dict[str, float] = {}
        for role in Role:
            for name, amount in self._needs[role].resources.items():
                total[name] = total.get(name, 0.0) + amount * self._config.group(role).replicas
        total.pop("GPU", None)  # those that are there
        num_cpus = max(total.pop("CPU"), os.cpu_count() or 1)
        return {"num_cpus": num_cpus, "resources": total, "include_dashboard": False}

    async def watch(self) -> None:
        """See Starter. It is over once Ray has given up the node of this machine, and with it all that it has started.
        A head that is away says nothing: Ray itself ends this process if it does not come back."""
        while True:
            with contextlib.suppress(*RayCalls.FAULTS):
                if await self._calls.is_own_node_dead():
                    break
            await asyncio.sleep(_LOOK_S)
        raise OperatorError(
            f"{self.place} has given up the node of this machine ({self._node_address}), and with it every worker of "
            "this launch; needed: a raylet here that lives, and another launch"
        )

    async def start(self, order: Order, left: asyncio.Event) -> RayProcess | OutOfSight | None:
        """See Starter. Waits for as long as no node has what the worker needs, and says so."""
        try:
            supervised = await unless(left, self._supervised(order))
        except OperatorError:
            raise
        except RayCalls.FAULTS as error:
            raise OperatorError(f"its supervisor does not come up: {words_of(error)}") from None
        if supervised is None:
            return None
        # From here on there may be a process, so the answer is waited for whatever else is said meanwhile.
        started = await self._start_under(supervised, order)
        leave = functools.partial(self._leave_place, order.name, supervised.place)
        if isinstance(started, OutOfSight):
            leave()
            return started
        process = RayProcess(order, supervised.host_name, started, supervised.actor, self._calls, self._prove, leave)
        self._living = {other for other in self._living if other.is_alive} | {process}
        return process

    async def _start_under(self, supervised: _Supervised, order: Order) -> Started | OutOfSight:
        """Raises OperatorError where the supervisor says that it has started nothing."""
        coordinator = self.reached_at(order.coordinator)
        arguments = arguments_of(order, coordinator)
        try:
            async with asyncio.timeout(_START_S):
                started: Started = await supervised.actor.start.remote(
                    order.name, order.module, arguments, self._shipped, coordinator, this_network()
                )
                return started
        except (RayError, TimeoutError) as error:
            keep(self._tasks, self._calls.kill(supervised.actor))
            if isinstance(error, RayTaskError) and isinstance(error.cause, OperatorError | OSError):
                raise OperatorError(str(error.cause)) from None
            trace = Trace(supervised.seat, ("--uuid", order.process))
            return OutOfSight(f"its supervisor does not answer: {words_of(error)}", lambda: self._prove(trace))

    def reached_at(self, address: str) -> str:
        """See Starter. One that listens everywhere is reached at this node's address."""
        if not is_every_host(self._config.coordinator.host):
            return address
        return join_address(self._node_address, int(address.rpartition(":")[2]))

    # ---- places and supervisors --------------------------------------------------------------------------------------

    async def _supervised(self, order: Order) -> _Supervised:
        """A supervisor on the worker's place, as soon as there is one; where a node is silent another one is tried.
        Raises OperatorError, or one of Ray's faults."""
        limit_s = _ANSWER_S
        while True:
            place = await self._place_of(order)
            if await self._is_placed(order, place, limit_s):
                if (supervised := await self._introduced(order, place, limit_s)) is not None:
                    return supervised
                what = "its supervisor does not answer"
            else:
                what = "it has no place"
            where = self._address_of(place.node or place.wish)
            _LOG.warning(
                "%s: %s on %s after %g s; another node is tried if one has room", order.name, what, where, limit_s
            )
            self._leave_place(order.name, place)
            limit_s *= 2  # that a slow node is not given up for ever

    async def _is_placed(self, order: Order, place: _Place, limit_s: float) -> bool:
        """Waits for it, with words; no longer than `limit_s` for a node that was said to have room."""
        saying = asyncio.ensure_future(self._say_what_it_waits_for(order, self._needs[order.role]))
        end_s = time.monotonic() + limit_s
        try:
            while (node := await self._calls.node_of(place.group)) is None:
                if place.wish is not None and time.monotonic() > end_s:
                    return False
            place.node = node
            return True
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)

    async def _introduced(self, order: Order, place: _Place, limit_s: float) -> _Supervised | None:
        """None: it does not answer within the limit."""
        actor = await self._calls.supervise(self._needs[order.role], place.group)
        try:
            async with asyncio.timeout(limit_s):
                supervised = _Supervised(place, actor, *await actor.introduce.remote())
        except BaseException as error:
            keep(self._tasks, self._calls.kill(actor))
            if isinstance(error, TimeoutError):
                return None
            raise
        if place.node is not None:
            self._suspects.discard(place.node)
        return supervised

    def _leave_place(self, name: str, place: _Place) -> None:
        """Its node is suspected, and the worker's next process has another place."""
        if (node := place.node or place.wish) is not None:
            self._suspects.add(node)
        if place in self._known_places():
            self.release(name)

    def _address_of(self, node: str | None) -> str:
        """For people."""
        return self._addresses.get(node or "", node or "a node")

    async def _place_of(self, order: Order) -> _Place:
        """The worker's own from its last life, if Ray still keeps that."""
        task = self._places.get(order.name)
        if (
            task is not None
            and task.done()
            and (task.exception() or not await self._calls.is_there(task.result().group))
        ):
            del self._places[order.name]
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._make_place(order.name, order.role))
            self._places[order.name] = task
        return await asyncio.shield(task)  # that what is made is known, whoever still wants it

    async def _make_place(self, name: str, role: Role) -> _Place:
        need, strategy = self._needs[role], strategy_of(self._config, role)
        async with self._placing:
            view = await self._calls.view()
            self._addresses |= {node.id: node.address for node in view.nodes}
            taken = [(place.role, place.node) for place in self._known_places() if place.node is not None]
            nodes = less_placed(view.nodes, view.totals, [(node, self._needs[other]) for other, node in taken])
            of_role = Counter(node for other, node in taken if other is role)
            trusted = [node for node in nodes if node.id not in self._suspects]
            node = choose_node(trusted, need, strategy, of_role) or choose_node(nodes, need, strategy, of_role)
            if len(trusted) < len(nodes):
                suspects = ", ".join(node.address for node in nodes if node.id in self._suspects)
                where = self._address_of(node) if node is not None else "the first node with room"
                _LOG.warning("%s is placed on %s; left out while another has room: %s", name, where, suspects)
            place = _Place(role, await self._calls.make_group(need, node), node)
            if node is not None:
                with contextlib.suppress(*RayCalls.FAULTS):  # the next choice then knows a little less
                    place.node = await self._calls.node_of(place.group)
        return place

    def _known_places(self) -> list[_Place]:
        done = [task for task in self._places.values() if task.done() and not task.cancelled()]
        return [task.result() for task in done if task.exception() is None]

    async def _say_what_it_waits_for(self, order: Order, need: Need) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            with contextlib.suppress(*RayCalls.FAULTS):  # words only
                view = await self._calls.view()
                words = waiting_words(need, view.nodes, view.totals)
                _LOG.warning("%s waits for %s: %s", order.name, self.place, words)
                order.say(words)

    # ---- ends --------------------------------------------------------------------------------------------------------

    async def _prove(self, trace: Trace) -> None:
        """Until some process of its machine, this one or a supervisor there, has seen that there is none any more."""
        machine = trace.seat.machine
        while True:
            if machine == this_machine() and look_for(trace):
                return
            for process in self._living:
                if process.is_alive and process.machine == machine and await process.has_seen_the_end_of(trace):
                    return
            await asyncio.sleep(_RETRY_S)  # nobody tells of a machine's return

    def release(self, name: str) -> None:
        """See Starter."""
        if (task := self._places.pop(name, None)) is not None:
            keep(self._tasks, self._give_back(task))

    async def _give_back(self, task: "asyncio.Task[_Place]") -> None:
        with contextlib.suppress(*RayCalls.FAULTS):  # then there is none
            await self._calls.remove((await task).group)

    async def hurry(self) -> None:
        """See Starter. What waits is told by its `left`."""

    async def close(self) -> None:
        """See Starter. What this launch has at Ray's ends with its connection."""
        tasks = [*self._tasks, *self._places.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._living:
            await process.close()
        await self._calls.close()


def _with_absolute_paths(config_path: Path) -> str:
    """The cluster YAML as every node reads it: what was relative to its folder is where it is on this machine."""
    raw = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    raw.setdefault("name", config_path.stem)
    resolve_paths(raw, config_path.resolve().parent)
    return yaml.safe_dump(raw, sort_keys=False)
