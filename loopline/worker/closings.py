"""Handoffs that were given up, from the side of their source blocks: in use until the last handle has ended, and in
quarantine where one ended in an error, until the target is proven gone. Engine thread only; whoever writes into other
workers' blocks owns one: a prefill worker for handoffs, a decode worker for fetches.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

from loopline.identity import HandoffKey, WorkerId
from loopline.kv.ledger import Allocation, Ledger
from loopline.messages import CloseState


@dataclass(frozen=True)
class _Closing:
    """Its source blocks wait for the last handle."""

    target: WorkerId
    allocation: Allocation


def nobody_counts(agent_name: str, num_blocks: int) -> None:
    """What happens with a peer's lingering blocks where no share is kept of them."""


class Closings:
    """Invariant: blocks of a handoff are held until it has `ended`, and lingering for its peer until then."""

    def __init__(self, ledger: Ledger, linger: Callable[[str, int], None] = nobody_counts) -> None:
        """`linger` hears of a peer's agent and how many more blocks of it are in use; negative: fewer."""
        self._ledger = ledger
        self._linger = linger
        self._closing: dict[HandoffKey, _Closing] = {}
        self._quarantined: dict[str, list[tuple[int, ...]]] = {}  # block ids of each, by target uuid

    @property
    def keys(self) -> Set[HandoffKey]:
        """Those that have not ended."""
        return self._closing.keys()

    @property
    def num_failed(self) -> int:
        """Those whose blocks are in quarantine."""
        return sum(len(failed) for failed in self._quarantined.values())

    def begin(self, key: HandoffKey, target: WorkerId, allocation: Allocation) -> None:
        """It was given up."""
        self._closing[key] = _Closing(target, allocation)
        self._linger(target.agent_name, len(self._ledger.block_ids(allocation)))

    def ended(self, key: HandoffKey, state: CloseState) -> bool:
        """Every handle is terminal. False for a handoff that is not closing here."""
        closing = self._closing.pop(key, None)
        if closing is None:
            return False
        block_ids = list(self._ledger.block_ids(closing.allocation))
        self._linger(closing.target.agent_name, -len(block_ids))
        if state is CloseState.CLOSED:
            self._ledger.release(closing.allocation)
        else:
            self._ledger.quarantine(closing.allocation, block_ids)
            self._quarantined.setdefault(closing.target.uuid, []).append(tuple(block_ids))
        return True

    def target_removed(self, worker: WorkerId) -> None:
        """It is proven gone and disconnected: nothing reads blocks for it any more."""
        for block_ids in self._quarantined.pop(worker.uuid, []):
            self._ledger.free_quarantined(block_ids)
