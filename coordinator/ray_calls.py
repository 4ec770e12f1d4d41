"""A launcher's calls to Ray. The only module that imports it.

Calls that wait are made in threads of their own: some of them wait for as long as Ray's head is away.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # or a call after the end of a connection would start another Ray

import ray
from ray._private.services import get_ray_address_from_environment
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.daemon_thread import DaemonThread
from coordinator.ray_address import look_for_head
from coordinator.ray_placement import Need, Node
from coordinator.ray_supervisor import Supervisor

__all__ = ["ActorUnavailableError", "Group", "RayCalls", "RayError", "RayTaskError", "View", "words_of"]
_THREADS = 32
_LOOK_S = 1.0
_CONNECT_S = 60.0  # for a cluster that is there to take this launch in; Ray itself would wait for longer
_END_S = 20.0  # for calls that are under way, then for Ray to let go
_GRACE_S = 3.0  # for a connection that is being made when nobody wants it any more
_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TRACE = re.compile(r"Traceback \(most recent call last\):\n([ \t].*\n)*")  # Ray puts some into its words
T = TypeVar("T")


@dataclass(frozen=True)
class View:
    """The living nodes, and all that each of them has, by its id."""

    nodes: list[Node]
    totals: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Group:
    """A placement group of one worker."""

    handle: Any


class RayCalls:
    """On one event loop. Whatever fails raises RayError, or one of the kinds that `FAULTS` lists."""

    FAULTS = (RayError, ConnectionError, RuntimeError, ValueError, OSError)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "ray")
        # Ray's own processes end with the thread that started them, so that one begins and ends it all.
        self._life = DaemonThread("ray life")
        self._is_open = False
        self._end_s = _END_S

    async def connect(self, address: str, options: Mapping[str, Any]) -> tuple[str, str]:
        """Attach to a cluster, or start one (`local`): its address, and this node's."""
        self._is_open = True  # from here on there may be something to end
        is_own = address == "local"
        if not is_own:
            await look_for_head(await self._life.call(_address_of, address))
        try:
            # In a thread: from the main one Ray would set handlers of its own for signals.
            connecting = self._life.call(_connect, address, options)
            self._end_s = _END_S if is_own else _GRACE_S  # what was started is worth waiting for, to end it
            await asyncio.wait((connecting,), timeout=None if is_own else _CONNECT_S)
            if not connecting.done():
                raise ConnectionError(f"whatever is there does not take this launch in within {_CONNECT_S:g} s")
            self._end_s = _END_S
            return connecting.result()
        finally:
            _take_back_signals()

    async def view(self) -> View:
        """What there is now; what is free is some moments old."""
        return await self._run(_view)

    async def is_own_node_dead(self) -> bool:
        """Whether Ray has given this process's node up, which is for good: one that comes back is another node."""
        return await self._run(_is_own_node_dead)

    async def make_group(self, need: Need, node: str | None) -> Group:
        """Ask for a place on a node, or on another if that one is full, lost or None."""
        return await self._run(_make_group, need, node)

    async def node_of(self, group: Group) -> str | None:
        """Wait a moment for the group to have its place; the node's id."""
        return await self._run(_node_of, group)

    async def is_there(self, group: Group) -> bool:
        """Whether Ray still keeps the group: it has its place or waits for one."""
        return await self._run(lambda: _state(group) not in ("", "REMOVED"))

    async def remove(self, group: Group) -> None:
        """Give its place back. Ray ends what is still in it."""
        with contextlib.suppress(*self.FAULTS):
            await self._run(remove_placement_group, group.handle)

    async def supervise(self, need: Need, group: Group) -> Any:
        """A new actor that is a Supervisor, perhaps not there yet."""
        return await self._run(_make_actor, need, group)

    async def kill(self, actor: Any) -> None:
        """End an actor, and with it the worker that it supervises."""
        with contextlib.suppress(*self.FAULTS):
            await self._run(ray.kill, actor)

    async def close(self) -> None:
        """Let go of the cluster, and end it if it is this launch's own. May be repeated."""
        if self._is_open:
            self._is_open = False
            self._threads.shutdown(wait=False, cancel_futures=True)
            joined = asyncio.ensure_future(asyncio.to_thread(self._threads.shutdown))
            await asyncio.wait((joined,), timeout=_END_S)
            ended = self._life.call(ray.shutdown)  # after a connection that is still being made
            await asyncio.wait((ended,), timeout=self._end_s)
            self._life.end()

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        if not self._is_open:
            raise RuntimeError("not attached to Ray any more")
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


def words_of(error: BaseException) -> str:
    """All that Ray says, on one line, and the causes that it names: what matters most comes last."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        words = " ".join(_TRACE.sub("", str(cause)).split()) or repr(cause)
        if not any(words in other for other in said):
            said.append(words)
        cause = cause.__cause__
    return ": ".join(said)


def _take_back_signals() -> None:
    """Ray's library has put a handler before this process's own, which aborts it three seconds after a SIGTERM."""
    if threading.current_thread() is threading.main_thread():  # no other may
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def _address_of(address: str) -> str:
    """Where Ray looks for `auto`: RAY_ADDRESS, a process of Ray's here, or what `ray start` has noted."""
    return str(get_ray_address_from_environment(address, None)) if address == "auto" else address


def _connect(address: str, options: Mapping[str, Any]) -> tuple[str, str]:
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would say that it leaves the signal handlers alone
    if address == "local":
        _bring_token()
    ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    return str(ray.get_runtime_context().gcs_address), str(ray.util.get_node_ip_address())


def _bring_token() -> None:
    """Ray listens at every address of this machine, for a cluster of this launch's own too, and guards it with a token.
    One that it made itself would stay in the user's home, where `ray start` finds it and wants it of all nodes."""
    has_own = any(name in os.environ for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").exists()
    if not has_own:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _view() -> View:
    free = available_resources_per_node()
    living = [node for node in ray.nodes() if node["Alive"]]
    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Labels"], free.get(node["NodeID"], {}))
        for node in living
    ]
    return View(nodes, {node["NodeID"]: node["Resources"] for node in living})


def _is_own_node_dead() -> bool:
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes())


def _make_group(need: Need, node: str | None) -> Group:
    labels = [dict(need.labels)] if need.labels else None
    hint = {} if node is None else {"_soft_target_node_id": node}  # Ray's only wish for a node that is no condition
    return Group(placement_group([dict(need.resources)], "STRICT_PACK", bundle_label_selector=labels, **hint))


def _state(group: Group) -> str:
    """Ray's name of it; "": it knows none."""
    return str(placement_group_table(group.handle).get("state", ""))


def _node_of(group: Group) -> str | None:
    if not group.handle.wait(_LOOK_S):
        return None
    table = placement_group_table(group.handle)
    return str(table["bundles_to_node_id"][0]) if table.get("state") == "CREATED" else None


def _make_actor(need: Need, group: Group) -> Any:
    options = {
        "num_cpus": need.num_cpus,
        "num_gpus": need.num_gpus,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group.handle, 0),
    }
    return ray.remote(Supervisor).options(**options).remote()
