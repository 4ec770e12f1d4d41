"""What a launcher and its coordinator tell each other, as frozen records: states, of which the last one holds.

`loopline.messages` has all other messages.
"""

from dataclasses import dataclass

from loopline.identity import Role


@dataclass(frozen=True)
class WorkerCounts:
    """A number of workers of each role."""

    prefill: int
    decode: int

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True)
class KeptWorker:
    """A worker that a launcher started. `leaving`: it was told to leave, and is not started again."""

    name: str
    role: Role
    leaving: bool


@dataclass(frozen=True)
class LauncherReport:
    """What a launcher keeps: a state, sent first and whenever it changed."""

    launcher: str  # a uuid, fresh at every start of a launcher
    host: str  # that its workers listen on
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
