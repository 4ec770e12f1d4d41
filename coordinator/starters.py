"""How a launcher starts workers: the one part of it that differs from kind to kind.

Who is kept, names, restarts, backoff, reports and leaving are the launcher's, whatever the kind.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.forking import ForkServer
from coordinator.processes import OutOfSight, Process, start_child
from loopline.config import ClusterConfig
from loopline.errors import OperatorError
from loopline.identity import Role


@dataclass(frozen=True)
class Order:
    """A worker to be started: `python -m module ARGUMENTS`, without those that a starter adds (`--config`, `--host`,
    `--coordinator`, `--uuid`). `process`: the uuid that this one process is known by, and no other. `coordinator`:
    HOST:PORT at which this machine reaches it. `log_path` is on this machine and appended to. `say`: takes what it
    waits for, for people, whenever that is known anew."""

    name: str
    role: Role
    process: str
    module: str
    coordinator: str
    arguments: tuple[str, ...]
    log_path: Path
    say: Callable[[str], None] = lambda words: None


class Starter(Protocol):
    """Starts workers, here or elsewhere."""

    @property
    def place(self) -> str:
        """Where workers come to be, for people."""
        ...

    async def open(self) -> None:
        """To be called first. Raises OperatorError."""
        ...

    async def watch(self) -> None:
        """While it can start workers, or return at once; after `open`. Raises OperatorError once it cannot any more,
        for good, and what it has started is lost."""
        ...

    async def start(self, order: Order, left: asyncio.Event) -> Process | OutOfSight | None:
        """The running process; None if `left` was set before there was one; OutOfSight where nobody knows whether there
        is one. Raises OperatorError or OSError where there is none."""
        ...

    def reached_at(self, address: str) -> str:
        """At which HOST:PORT its workers reach the coordinator that this machine reaches at `address`."""
        ...

    def release(self, name: str) -> None:
        """This worker is not started again."""
        ...

    async def hurry(self) -> None:
        """Everything is going to be stopped: what is being started ends soon, one way or the other."""
        ...

    async def close(self) -> None:
        """Nothing of it is left; may be repeated, and come before `open`."""
        ...


class LocalStarter:
    """Starts processes of this machine."""

    def __init__(self, config_path: Path, host: str, forks: ForkServer | None = None) -> None:
        """`host`: where they listen; `forks`: whom they are forked from, where that is possible."""
        self._forks = forks
        self.place = host
        self._config_path = config_path

    async def open(self) -> None:
        """See Starter."""
        if self._forks is not None:
            await self._forks.open()

    async def watch(self) -> None:
        """See Starter. What this machine cannot do it says at each start."""

    async def start(self, order: Order, left: asyncio.Event) -> Process | OutOfSight | None:
        """See Starter."""
        arguments = ["--config", str(self._config_path), "--host", self.place, *arguments_of(order, order.coordinator)]
        return await start_child(order.name, order.module, arguments, order.log_path, self._forks)

    def reached_at(self, address: str) -> str:
        """See Starter."""
        return address

    def release(self, name: str) -> None:
        """See Starter."""

    async def hurry(self) -> None:
        """See Starter. Loading what is to be forked takes long, and nobody needs it any more."""
        if self._forks is not None:
            await self._forks.close()

    async def close(self) -> None:
        """See Starter."""
        await self.hurry()


def arguments_of(order: Order, coordinator: str) -> list[str]:
    """Those that say which worker it is and where its coordinator is, and the order's own."""
    return ["--name", order.name, "--uuid", order.process, "--coordinator", coordinator, *order.arguments]


def make_starter(
    config: ClusterConfig, config_path: Path, forked_modules: Sequence[str] = (), fork_log: Path | None = None
) -> Starter:
    """What `launcher.kind` names. Workers of this machine are forked from a process that has loaded `forked_modules`
    and writes `fork_log`, if there is one. Raises OperatorError where that kind is not installed, or where workers
    of other machines could not reach those of this one."""
    if config.launcher.kind == "local":
        config.require_reachable_workers()
        forks = ForkServer(forked_modules, fork_log) if fork_log is not None else None
        return LocalStarter(config_path, config.launcher.host, forks)
    try:
        from coordinator.ray_starter import RayStarter  # Ray is an extra of its own, that most do without
    except ModuleNotFoundError as error:
        raise OperatorError(
            f"launcher.kind is ray, and Python finds no module {error.name!r}; needed: Ray beside "
            "Loopline on every node, `pip install -c constraints.txt '.[ray]'` in a checkout, or launcher.kind: local"
        ) from None
    return RayStarter(config, config_path)
