"""Which of a launcher's workers hang, by what the coordinator says of them. Pure."""

import math
from collections.abc import Collection, Mapping

from loopline.identity import WorkerState

_LOOKS_LOST = 2  # in a row, a lease apart, at a worker that is lost
_LOOKS_MISSING = 3  # at one that has not joined again, and at least so many seconds:
_MISSING_S = 6.0


class HungLooks:
    """Looks, a lease apart, at a cluster's workers; they are known by their uuids."""

    def __init__(self, lease_s: float) -> None:
        self._most = {True: _LOOKS_LOST, False: max(_LOOKS_MISSING, math.ceil(_MISSING_S / lease_s))}
        self._joined: set[str] = set()
        self._looks: dict[str, int] = {}

    def look(self, there: Mapping[str, WorkerState], living: Collection[str]) -> list[str]:
        """Of the `living` processes those that are lost, or that have joined once and are not there under a later
        coordinator, and did not come back for long enough. `there`: what the coordinator says."""
        self._joined = {uuid for uuid in living if uuid in self._joined or uuid in there}
        away = [uuid for uuid in self._joined if there.get(uuid, WorkerState.LOST) == WorkerState.LOST]
        self._looks = {uuid: self._looks.get(uuid, 0) + 1 for uuid in away}
        return sorted(uuid for uuid, count in self._looks.items() if count >= self._most[uuid in there])
