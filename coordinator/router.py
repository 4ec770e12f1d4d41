"""Which workers run a request: pure functions of the request and a snapshot.

Room is what a worker said that it has (its arena, its running slots) less the tracker's requests that were given to it,
and less the blocks that its last heartbeat had in quarantine. None of it is a counter that a lost message could leak.
The worker has the last word: it may answer "no room", and is then skipped until its next heartbeat. The fewest
token-loops win; ties go to fewest assigned requests, then to the name.
"""

from coordinator.snapshot import ClusterSnapshot, WorkerView
from loopline.identity import Fingerprint, Role
from loopline.request import Request


def choose_decode(request: Request, snapshot: ClusterSnapshot, group: Fingerprint | None = None) -> WorkerView | None:
    """The decode worker to ask for blocks, or None: no room now. `group`: only workers that compute the same."""
    candidates = [
        view
        for view in snapshot.with_role(Role.DECODE)
        if view.takes_work
        and (group is None or view.group == group)
        and _has_decode_room(view, request)
        and _prefill_slots(view, snapshot) > _awaiting_prefill(view.group, snapshot)
    ]
    return min(candidates, key=_preference, default=None)


def choose_prefill(request: Request, snapshot: ClusterSnapshot, decode: WorkerView) -> WorkerView | None:
    """The prefill worker to bind for a request that holds a reservation on `decode`, or None: no room now."""
    candidates = [view for view in _paired_prefill(decode, snapshot) if _has_prefill_room(view, request)]
    return min(candidates, key=_preference, default=None)


def _preference(view: WorkerView) -> tuple[int, int, str]:
    return (view.token_loops, len(view.assigned), view.peer.name)


def _has_decode_room(view: WorkerView, request: Request) -> bool:
    if len(view.assigned) >= view.capacity.max_running:
        return False
    worst_case = sum(_num_blocks(row.max_kv_tokens, view) for row in view.assigned)
    return worst_case + _num_blocks(request.max_kv_tokens, view) <= view.usable_blocks


def _has_prefill_room(view: WorkerView, request: Request) -> bool:
    if len(view.assigned) >= view.capacity.max_running:
        return False
    held = sum(_num_blocks(row.num_known_tokens, view) for row in view.assigned)
    return held + _num_blocks(request.num_known_tokens, view) <= view.usable_blocks


def _num_blocks(num_tokens: int, view: WorkerView) -> int:
    return -(-num_tokens // view.capacity.block_size)


def _paired_prefill(decode: WorkerView, snapshot: ClusterSnapshot) -> list[WorkerView]:
    return [
        view
        for view in snapshot.with_role(Role.PREFILL)
        if view.takes_work and decode.worker in view.ready_pairs and view.group == decode.group
    ]


def _prefill_slots(decode: WorkerView, snapshot: ClusterSnapshot) -> int:
    """Requests that the prefill workers paired with `decode` can still take."""
    paired = _paired_prefill(decode, snapshot)
    return sum(max(0, view.capacity.max_running - len(view.assigned)) for view in paired)


def _awaiting_prefill(group: Fingerprint, snapshot: ClusterSnapshot) -> int:
    """Requests that were given to a decode worker of the group and will need a prefill worker next."""
    decode = [view for view in snapshot.with_role(Role.DECODE) if view.group == group]
    return sum(row.awaits_prefill for view in decode for row in view.assigned)
