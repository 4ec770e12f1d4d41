"""Which requests are held back because their pushes would wait for the budget of bytes in flight, and which are not let
in because their peer has its share of the worker. Engine thread only; the budget itself is the transfer thread's.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile

from kvtransfer.commands import CrowdChanged
from loopline.settings import peer_slots


@dataclass(frozen=True)
class _Target:
    """Where a request's KV goes, and how many blocks it takes."""

    agent_name: str
    num_blocks: int


class PushGate:
    """Says of each request whether more of it should be computed. Written by `HandoffOut`, asked by the scheduler
    through `PrefillPolicy`; knows what the transfer thread last said, so a step that is under way may push too much."""

    def __init__(self) -> None:
        self.peer_share = 1.0  # of running slots and blocks, for one of several peers
        self.num_peers = 0  # that are linked
        self._targets: dict[str, _Target] = {}  # by request id
        self._lingering: Counter[str] = Counter()  # blocks of handoffs that were given up, by agent name
        self._crowd = CrowdChanged(frozenset(), False)

    def enter(self, request_id: str, agent_name: str, num_blocks: int) -> None:
        """The request's KV goes to this agent, from as many blocks."""
        self._targets[request_id] = _Target(agent_name, num_blocks)

    def leave(self, request_id: str) -> None:
        """The request is not handed off any more; unknown ones are fine."""
        self._targets.pop(request_id, None)

    def linger(self, agent_name: str, num_blocks: int) -> None:
        """Blocks of a handoff to this agent that was given up are still in use; negative: they are not any more."""
        self._lingering[agent_name] += num_blocks

    def changed(self, crowd: CrowdChanged) -> None:
        """To whom pushes wait from now on."""
        self._crowd = crowd

    def may_compute(self, request_id: str) -> bool:
        """Would a further push of this request be posted at once, as far as is known? True for unknown requests."""
        target = self._targets.get(request_id)
        return target is None or not (self._crowd.is_full or target.agent_name in self._crowd.crowded)

    def may_start(self, request_id: str, running: Collection[str], max_running: int, total_blocks: int) -> bool:
        """Does its peer leave room for others, if this request runs beside those that are `running`? One request for a
        peer always may, however large, and those for one peer start in their order; True for unknown requests, and
        where there is one peer only."""
        target = self._targets.get(request_id)
        if target is None or self.num_peers < 2:
            return True
        earlier = takewhile(lambda name: name != request_id, self._targets)
        if any(self._targets[name].agent_name == target.agent_name and name not in running for name in earlier):
            return False  # or small requests would pass a large one for ever
        beside = [other for name in running if (other := self._targets.get(name)) is not None]
        mine = [other.num_blocks for other in beside if other.agent_name == target.agent_name]
        if not mine:
            return True
        num_blocks = sum(mine) + self._lingering[target.agent_name] + target.num_blocks
        fits = num_blocks <= self.peer_share * total_blocks
        return fits and len(mine) < peer_slots(max_running, self.peer_share)
