"""A Ray without Ray: as much of the module as `coordinator.ray_calls` uses, on one event loop of this process.

Actors are the objects themselves, so a supervisor here starts real processes. Placement groups hold resources of the
nodes. What goes wrong is said by the test: `faults` by the name of a call or an actor's method, each of them once.
"""

import asyncio
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.seat import Seat, this_machine


class RayError(Exception):
    """Root of Ray's own."""


class ActorUnavailableError(RayError):
    """An actor that may come back."""


class RayTaskError(RayError):
    """What an actor raised itself."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class FakeGroup:
    """One bundle; `node` None: it waits for room."""

    ray: "FakeRay"
    needs: Mapping[str, float]
    labels: Mapping[str, str]
    soft: str | None
    node: str | None = None
    state: str = "PENDING"

    def wait(self, seconds: float) -> bool:
        self.ray.place_waiting()
        if self.state == "PENDING":
            self.ray.released.wait(0.05)  # a moment, and not the whole time
            self.ray.place_waiting()
        return self.state == "CREATED"


class FakeActor:
    """A handle: each method of the object as one that has `remote`."""

    def __init__(self, ray: "FakeRay", kind: type, group: FakeGroup) -> None:
        self.ray, self.group, self.subject = ray, group, kind()
        self.died = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    async def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.group.node in self.ray.silent:
            await self.died.wait()
            raise RayError("The actor is dead because it was killed.")
        if name == "introduce" and name not in self.ray.faults:
            return "fake", Seat(this_machine(), os.getpid(), -1)  # a process that has ended: not this one
        work = asyncio.ensure_future(getattr(self.subject, name)(*arguments))
        death = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
            if (fault := self.ray.faults.pop(name, None)) is not None:
                raise fault  # after it was done: the answer is what is lost
            if not work.done():
                raise RayError("The actor died unexpectedly before finishing this task.\n\tip: 10.0.0.1\nkilled by OOM")
            if (error := work.exception()) is not None:
                raise RayTaskError(error)
            return work.result()
        finally:
            death.cancel()
            work.cancel()
            await asyncio.gather(death, work, return_exceptions=True)


@dataclass
class FakeRay:
    """The cluster. `nodes`: each one's resources by its id."""

    nodes: dict[str, dict[str, float]]
    faults: dict[str, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    groups: list[FakeGroup] = field(default_factory=list)
    actors: list[FakeActor] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    unblocked: threading.Event = field(default_factory=threading.Event)  # kills wait for it
    on_init: Callable[[], Any] = lambda: None
    on_actor: Callable[[], Any] = lambda: None
    dead: set[str] = field(default_factory=set)  # nodes that are given up
    silent: set[str] = field(default_factory=set)  # nodes whose actors do not answer
    stuck: set[str] = field(default_factory=set)  # nodes that keep a group waiting which wishes for them
    auto: str = "ray://not-looked-at"  # what `auto` finds
    lock: Any = field(default_factory=threading.RLock)

    def free(self) -> dict[str, dict[str, float]]:
        rest = {node: dict(own) for node, own in self.nodes.items()}
        for group in self.groups:
            if group.state == "CREATED" and group.node is not None:
                for name, amount in group.needs.items():
                    rest[group.node][name] -= amount
        return rest

    def place_waiting(self) -> None:
        with self.lock:
            for group in self.groups:
                if group.state != "PENDING":
                    continue
                free = self.free()
                order = [group.soft] if group.soft is not None else []
                for node in itertools.chain(order, free):
                    if node in self.stuck and node == group.soft:
                        break
                    if all(free[node].get(name, 0.0) >= amount for name, amount in group.needs.items()):
                        group.node, group.state = node, "CREATED"
                        break

    def say(self, call: str) -> None:
        self.calls.append(call)
        if (fault := self.faults.pop(call, None)) is not None:
            raise fault

    # ---- the module's own names --------------------------------------------------------------------------------------

    def init(self, **options: Any) -> None:
        self.on_init()
        self.say("init")

    def find(self, address: str, folder: str | None) -> str:
        self.say("find")
        return self.auto

    def shutdown(self) -> None:
        self.say("shutdown")

    def table(self) -> list[dict[str, Any]]:
        self.say("nodes")
        return [
            {"NodeID": node, "Alive": node not in self.dead, "NodeManagerAddress": node, "Labels": {}, "Resources": own}
            for node, own in self.nodes.items()
        ]

    def make_group(
        self,
        bundles: list[dict[str, float]],
        strategy: str,
        *,
        bundle_label_selector: list[dict[str, str]] | None = None,
        _soft_target_node_id: str | None = None,
    ) -> FakeGroup:
        self.say("placement_group")
        group = FakeGroup(self, bundles[0], (bundle_label_selector or [{}])[0], _soft_target_node_id)
        with self.lock:
            self.groups.append(group)
        return group

    def group_table(self, group: FakeGroup) -> dict[str, Any]:
        self.say("placement_group_table")
        return {"state": group.state, "bundles_to_node_id": {0: group.node or ""}}

    def remove_group(self, group: FakeGroup) -> None:
        self.say("remove_placement_group")
        group.state = "REMOVED"
        self.released.set()

    def kill(self, actor: FakeActor) -> None:
        self.calls.append("kill")
        self.unblocked.wait()

    def remote(self, kind: type) -> Any:
        def options(**chosen: Any) -> Any:
            return types.SimpleNamespace(remote=lambda: self._make_actor(kind, chosen["scheduling_strategy"]))

        return types.SimpleNamespace(options=options)

    def _make_actor(self, kind: type, group: FakeGroup) -> FakeActor:
        self.say("actor")
        self.on_actor()
        actor = FakeActor(self, kind, group)
        self.actors.append(actor)
        return actor


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> None:
    """Whoever imports Ray afterwards gets the fake; `coordinator.ray_calls` and those above it are loaded anew."""
    fake.unblocked.set()
    context = types.SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: next(iter(fake.nodes)))
    names: dict[str, dict[str, Any]] = {
        "ray": {
            "init": fake.init,
            "shutdown": fake.shutdown,
            "nodes": fake.table,
            "kill": fake.kill,
            "remote": fake.remote,
            "get_runtime_context": lambda: context,
            "util": types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
        },
        "ray._private": {},
        "ray._private.services": {"get_ray_address_from_environment": fake.find},
        "ray._private.state": {"available_resources_per_node": fake.free},
        "ray.exceptions": {
            "RayError": RayError,
            "RayTaskError": RayTaskError,
            "ActorUnavailableError": ActorUnavailableError,
        },
        "ray.util": {},
        "ray.util.placement_group": {
            "placement_group": fake.make_group,
            "placement_group_table": fake.group_table,
            "remove_placement_group": fake.remove_group,
        },
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda group, bundle: group},
    }
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("calls", "process", "starter"):
        monkeypatch.delitem(sys.modules, f"coordinator.ray_{name}", raising=False)
