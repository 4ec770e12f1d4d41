"""What a launcher and its coordinator tell each other, as frozen records: states, of which the last one holds.

`loopline.messages` has all other messages.
"""

from collections.abc import Callable
from dataclasses import dataclass

from loopline.identity import Role


@dataclass(frozen=True)
class WorkerCounts:
    """A number of workers of each role."""

    prefill: int
    decode: int
    unified: int = 0

    def of(self, role: Role) -> int:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.UNIFIED: self.unified}[role]

    @classmethod
    def by_role(cls, count: Callable[[Role], int]) -> "WorkerCounts":
        """`count` of each role."""
        return cls(*map(count, (Role.PREFILL, Role.DECODE, Role.UNIFIED)))

    def __str__(self) -> str:
        """For people: 1 prefill and 2 decode."""
        shown = [role for role in Role if self.of(role)] or [Role.PREFILL, Role.DECODE]
        words = [f"{self.of(role)} {role}" for role in shown]
        return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@dataclass(frozen=True)
class KeptWorker:
    """A worker that a launcher started. `leaving`: it was told to leave, and is not started again; `waits_for`: why it
    does not run yet, for people, "" where nothing is known."""

    name: str
    role: Role
    leaving: bool
    waits_for: str = ""


@dataclass(frozen=True)
class LauncherReport:
    """What a launcher keeps: a state, sent first and whenever it changed."""

    launcher: str  # a uuid, fresh at every start of a launcher
    place: str  # the host that its workers listen on, or the Ray cluster that they are placed in
    restarts: bool  # whether a worker that ended is started again
    wanted: WorkerCounts
    revision: int  # of the last Wanted of this stream that it took, 0: of none
    workers: tuple[KeptWorker, ...]
    ended: tuple[str, ...] = ()  # uuids of the processes that it reaped, the latest ones


@dataclass(frozen=True)
class Wanted:
    """To a launcher: keep so many. A state: the last one holds. `revision` grows from 1 within a stream."""

    counts: WorkerCounts
    revision: int
