"""Requests that hold blocks and that no step computes: their prompts' KV is on its way, or it is not decided yet who
computes them. The scheduler owns one; a worker's handoff code asks it to share or requeue what the scheduler reserved.
"""

from collections.abc import Iterator

from loopline.errors import InvariantBroken
from loopline.identity import Cause
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import Request
from loopline.sched.admission import Admission
from loopline.sched.entry import Entry


class Reservations:
    """Invariant: an entry is here from its reservation until it is taken out, to run, to wait, or to end."""

    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission
        self._entries: dict[Allocation, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def request_ids(self) -> Iterator[str]:
        return (entry.request.request_id for entry in self._entries.values())

    @property
    def token_loops(self) -> int:
        """Work of their answers."""
        return sum(entry.request.params.max_tokens * entry.depth for entry in self._entries.values())

    def hold(self, request: Request, is_full: bool) -> Allocation | Cause:
        """Hold blocks for a request, or say why not. `is_full`: as many requests run as may."""
        if self._admission.never_fits(request):
            return Cause.TOO_LARGE
        entry = None if is_full else self._admission.reserve(request)
        if entry is None or entry.allocation is None:
            return Cause.NO_ROOM
        self._entries[entry.allocation] = entry
        return entry.allocation

    def find(self, allocation: Allocation) -> Entry:
        """The entry that has these blocks."""
        return self._entries[allocation]

    def take(self, allocation: Allocation, num_arrived: int = 0) -> Entry:
        """The same; it is not here any more. Who waited because it was may be let in. The KV of its first `num_arrived`
        tokens that is not cached has come from another worker, and counts as written to the request's depth."""
        self._admission.room_changed()
        entry = self._entries.pop(allocation)
        if num_arrived > entry.num_cached:
            self._ledger.mark_written(allocation, entry.num_cached, num_arrived - entry.num_cached, entry.depth)
            entry.num_computed = entry.num_planned = num_arrived
        return entry

    def requeue(self, allocation: Allocation) -> None:
        """Have its request wait in front instead, to be computed here. The blocks are the caller's to release or
        quarantine."""
        self._admission.put_back(self.take(allocation))

    def share(self, allocation: Allocation, num_blocks: int) -> Allocation:
        """Hold the first blocks of a reservation once more. They must be cached ones, which it shares: nobody writes
        them, and they stay however it ends. The new allocation is the caller's to release or quarantine."""
        entry, size = self._entries[allocation], self._ledger.block_size
        digests = [] if entry.digests is None else entry.digests.digests[:num_blocks]
        if len(digests) != num_blocks or num_blocks * size > entry.num_cached:
            raise InvariantBroken(f"{entry.num_cached} tokens of a reservation are cached, not {num_blocks} blocks")
        shared = self._ledger.reserve(num_blocks * size, num_blocks * size, digests, entry.depth)
        if shared is None:
            raise InvariantBroken("cached blocks that a reservation holds cannot be held again")
        return shared
