"""Which workers a launcher keeps: their names, and who starts or leaves when another number is wanted. Pure."""

from dataclasses import dataclass

from loopline.identity import Role
from loopline.launcher_messages import KeptWorker, WorkerCounts


@dataclass(frozen=True)
class Change:
    """What to do now: start these, tell those to leave."""

    start: tuple[KeptWorker, ...]
    leave: tuple[str, ...]


class Roster:
    """Invariant: as many workers stay as are wanted. Names are ROLE-INDEX; one that leaves has its name until it ended.

    Whoever owns it starts what `want` says, and says by `ended` when a worker is gone for good.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[Role, int], bool] = {}  # whether it leaves

    @property
    def wanted(self) -> WorkerCounts:
        return WorkerCounts.by_role(lambda role: len(self._staying(role)))

    def kept(self) -> tuple[KeptWorker, ...]:
        """All that have not ended, in the order of the roles."""
        order = list(Role)
        ordered = sorted(self._workers.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
        return tuple(KeptWorker(_name(role, index), role, leaving) for (role, index), leaving in ordered)

    def stays(self, name: str) -> bool:
        """Whether it is to be started again when it ends."""
        return any(worker.name == name and not worker.leaving for worker in self.kept())

    def want(self, counts: WorkerCounts) -> Change:
        """Missing workers get the lowest free index; of too many those with the highest leave."""
        start: list[KeptWorker] = []
        leave: list[str] = []
        for role in Role:
            staying = self._staying(role)
            for index in staying[counts.of(role) :]:
                self._workers[role, index] = True
                leave.append(_name(role, index))
            for _ in range(counts.of(role) - len(staying)):
                index = next(index for index in range(len(self._workers) + 1) if (role, index) not in self._workers)
                self._workers[role, index] = False
                start.append(KeptWorker(_name(role, index), role, leaving=False))
        return Change(tuple(start), tuple(leave))

    def ended(self, name: str) -> None:
        """It is gone and is not started again; if it was to stay, one less is wanted."""
        self._workers = {key: leaving for key, leaving in self._workers.items() if _name(*key) != name}

    def _staying(self, role: Role) -> list[int]:
        return sorted(index for (other, index), leaving in self._workers.items() if other is role and not leaving)


def _name(role: Role, index: int) -> str:
    return f"{role}-{index}"
