"""The lives of all requests, in tables by state: nothing is searched for among those that wait in the queue. No I/O;
the tracker owns one."""

from collections.abc import Mapping

from coordinator.effects import Assigned
from coordinator.life import Life, Move, State
from loopline.identity import WorkerId


class Lives:
    """Invariant: `_placed` has those that are neither QUEUED nor ENDED, `_reserved` those that are RESERVED; what ENDED
    is forgotten. So a life moves by `move` of this class alone."""

    def __init__(self) -> None:
        self._all: dict[str, Life] = {}
        self._placed: dict[str, Life] = {}
        self._reserved: dict[str, Life] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, request_id: str) -> Life:
        return self._all[request_id]

    def get(self, request_id: str) -> Life | None:
        return self._all.get(request_id)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    def placed(self) -> list[Life]:
        """Those that a worker has been asked to run, oldest first; a copy."""
        return _by_arrival(self._placed)

    def reserved(self) -> list[Life]:
        """Those that hold blocks and wait for a prefill worker, oldest first; a copy."""
        return _by_arrival(self._reserved)

    def assigned(self) -> dict[WorkerId, tuple[Assigned, ...]]:
        """What each worker has been given and has not ended."""
        table: dict[WorkerId, list[Assigned]] = {}
        for life in self.placed():
            for worker, row in life.assignment().items():
                table.setdefault(worker, []).append(row)
        return {worker: tuple(rows) for worker, rows in table.items()}

    def add(self, life: Life) -> None:
        """A new one, QUEUED."""
        self._all[life.request.request_id] = life

    def move(self, life: Life, move: Move) -> None:
        """Take one step of the table in `life`; IllegalTransition changes nothing."""
        life.take(move)
        _keep(self._placed, life, life.state not in (State.QUEUED, State.ENDED))
        _keep(self._reserved, life, life.state is State.RESERVED)
        if life.state is State.ENDED:
            del self._all[life.request.request_id]


def _by_arrival(lives: Mapping[str, Life]) -> list[Life]:
    return sorted(lives.values(), key=lambda life: life.order)


def _keep(table: dict[str, Life], life: Life, belongs: bool) -> None:
    if belongs:
        table[life.request.request_id] = life
    else:
        table.pop(life.request.request_id, None)
