"""How a launcher starts workers: the one part of it that differs from kind to kind.

Who is kept, names, restarts, backoff, reports and leaving are the launcher's, whatever the kind.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.forking import ForkServer
from coordinator.processes import Process, start_child
from loopline.config import ClusterConfig
from loopline.errors import OperatorError
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker


@dataclass(frozen=True)
class Order:
    """A worker to be started: `python -m module ARGUMENTS`, without those that a starter adds (`--config`, `--host`).
    `log_path` is on this machine and appended to."""

    name: str
    role: Role
    module: str
    arguments: tuple[str, ...]
    log_path: Path


class Starter(Protocol):
    """Starts workers, here or elsewhere."""

    @property
    def place(self) -> str:
        """Where workers come to be, for people."""
        ...

    async def open(self) -> None:
        """To be called first. Raises OperatorError."""
        ...

    def coordinator_address(self, address: str) -> str:
        """Where its workers reach the coordinator that this machine reaches at `address`."""
        ...

    def expect(self, workers: Sequence[KeptWorker]) -> None:
        """These are going to be started, and are to be placed together."""
        ...

    async def start(self, order: Order, left: asyncio.Event) -> Process | None:
        """The running process; None if `left` was set before there was one. Raises OperatorError or OSError."""
        ...

    def release(self, name: str) -> None:
        """This worker is not started again."""
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

    def coordinator_address(self, address: str) -> str:
        """See Starter."""
        return address

    def expect(self, workers: Sequence[KeptWorker]) -> None:
        """See Starter."""

    async def start(self, order: Order, left: asyncio.Event) -> Process:
        """See Starter."""
        arguments = ["--config", str(self._config_path), "--host", self.place, *order.arguments]
        return await start_child(order.name, order.module, arguments, order.log_path, self._forks)

    def release(self, name: str) -> None:
        """See Starter."""

    async def close(self) -> None:
        """See Starter."""


def make_starter(config: ClusterConfig, config_path: Path, forks: ForkServer | None = None) -> Starter:
    """What `launcher.kind` names; `forks` is of use to local. Raises OperatorError where that is not installed."""
    if config.launcher.kind == "local":
        return LocalStarter(config_path, config.launcher.host, forks)
    try:
        from coordinator.ray_starter import RayStarter  # Ray is an extra of its own, that most do without
    except ModuleNotFoundError as error:
        raise OperatorError(
            f"launcher.kind is ray, and Python finds no module {error.name!r}; needed: `pip install 'loopline[ray]'` "
            "on every node, or launcher.kind: local"
        ) from None
    return RayStarter(config, config_path)
