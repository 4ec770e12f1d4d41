"""Which workers ran the last turn of each session, for the policy that keeps a session where it is. No I/O."""

from collections import OrderedDict

from loopline.identity import Role, WorkerId

MOST_SESSIONS = 16_384


class Sessions:
    """Invariant: at most `most` sessions are remembered, those that were placed last."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._last: OrderedDict[str, dict[Role, WorkerId]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def last(self, session: str, role: Role) -> WorkerId | None:
        """Who was given the session's last request; it may be gone. None also for the empty session."""
        return self._last.get(session, {}).get(role)

    def placed(self, session: str, role: Role, worker: WorkerId) -> None:
        """A request of the session was given to `worker`; nothing is kept of the empty session."""
        if not session:
            return
        self._last.setdefault(session, {})[role] = worker
        self._last.move_to_end(session)
        if len(self._last) > self._most:
            self._last.popitem(last=False)
