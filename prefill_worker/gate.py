"""Which requests are held back because their pushes would wait for the budget of bytes in flight, and how a chunk's
blocks become pushes. Engine thread only; the budget itself is the transfer thread's.
"""

from collections.abc import Iterator

from kvtransfer.commands import CrowdChanged


class PushGate:
    """Says of each request whether more of it should be computed. Written by `HandoffOut`, asked by the scheduler
    through `PrefillPolicy`; knows what the transfer thread last said, so a step that is under way may push too much."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}  # request id -> agent name
        self._crowd = CrowdChanged(frozenset(), False)

    def enter(self, request_id: str, agent_name: str) -> None:
        """The request's KV goes to this agent."""
        self._targets[request_id] = agent_name

    def leave(self, request_id: str) -> None:
        """The request is not handed off any more; unknown ones are fine."""
        self._targets.pop(request_id, None)

    def changed(self, crowd: CrowdChanged) -> None:
        """To whom pushes wait from now on."""
        self._crowd = crowd

    def may_compute(self, request_id: str) -> bool:
        """Would a further push of this request be posted at once, as far as is known? True for unknown requests."""
        target = self._targets.get(request_id)
        return target is None or not (self._crowd.is_full or target in self._crowd.crowded)


def parts_of(first_block: int, end_block: int, most: int) -> Iterator[tuple[int, int]]:
    """[first_block, end_block) in ranges (first, end) of at most `most` blocks, in order."""
    for first in range(first_block, end_block, most):
        yield first, min(first + most, end_block)
