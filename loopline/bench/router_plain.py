"""The router as it would be written first: every decision adds up the requests of every worker again, for each pair of
workers. What `coordinator.room` is measured against, and in tests what it must agree with.
"""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.effects import Assigned
from coordinator.snapshot import ClusterSnapshot, WorkerView
from loopline.identity import Fingerprint, Role, WorkerId
from loopline.request import Request
from loopline.settings import peer_slots, promised_tokens


def choose_decode(
    request: Request, snapshot: ClusterSnapshot, group: Fingerprint | None = None, *, is_suspect: bool = False
) -> WorkerView | None:
    """The decode worker with the least work, or None: no room now."""
    return min(decode_candidates(request, snapshot, group, is_suspect=is_suspect), key=preference, default=None)


def decode_candidates(
    request: Request, snapshot: ClusterSnapshot, group: Fingerprint | None = None, *, is_suspect: bool = False
) -> list[WorkerView]:
    """Decode and unified workers that may be asked for blocks."""
    return [
        view
        for role in (Role.DECODE, Role.UNIFIED)
        for view in snapshot.with_role(role)
        if view.takes_work
        and (group is None or view.group == group)
        and not (is_suspect and _has_suspect(view))
        and _has_decode_room(view, request)
        and (role is Role.UNIFIED or (_holds_prompt(view, request, snapshot) and _has_prefill_slot(view, snapshot)))
    ]


def choose_prefill(
    request: Request, snapshot: ClusterSnapshot, decode: WorkerView, *, is_suspect: bool = False
) -> WorkerView | None:
    """The prefill worker with the least work, or None: no room now."""
    candidates = prefill_candidates(request, snapshot, decode, is_suspect=is_suspect)
    return min(candidates, key=preference, default=None)


def prefill_candidates(
    request: Request, snapshot: ClusterSnapshot, decode: WorkerView, *, is_suspect: bool = False
) -> list[WorkerView]:
    """Prefill workers that may be bound for a request that holds a reservation on `decode`."""
    return [
        view
        for view in _paired_prefill(decode, snapshot)
        if _slots_for(decode, view, snapshot) > 0
        and _has_prefill_blocks(decode, view, request, snapshot)
        and not (is_suspect and _has_suspect(view))
    ]


def with_request(snapshot: ClusterSnapshot, rows: Mapping[WorkerId, Assigned]) -> ClusterSnapshot:
    """The same moment after a request was given to workers: these are its rows now."""
    return replace(snapshot, workers=tuple(_with_row(view, rows.get(view.worker)) for view in snapshot.workers))


def _with_row(view: WorkerView, row: Assigned | None) -> WorkerView:
    if row is None:
        return view
    others = (other for other in view.assigned if other.request_id != row.request_id)
    return replace(view, assigned=(*others, row))


def preference(view: WorkerView) -> tuple[int, int, str]:
    """The least comes first: token-loops, requests, name."""
    return (sum(row.token_loops for row in view.assigned), len(view.assigned), view.peer.name)


def _has_suspect(view: WorkerView) -> bool:
    return any(row.is_suspect for row in view.assigned)


def _has_decode_room(view: WorkerView, request: Request) -> bool:
    """Whether a decode worker has a slot and blocks for one more request, beside all that it was given."""
    if len(view.assigned) >= view.capacity.max_running:
        return False
    if _num_blocks(request.max_kv_tokens, view) > view.usable_blocks:
        return False
    promised = promised_tokens(request.num_known_tokens, request.max_kv_tokens, view.capacity.growth_share)
    return sum(_kept_blocks(row, view) for row in view.assigned) + _num_blocks(promised, view) <= view.usable_blocks


def _kept_blocks(row: Assigned, view: WorkerView) -> int:
    """Blocks that a decode worker keeps for a request that it was given: those that it has come to need, or else those
    that it was promised."""
    promised = promised_tokens(row.num_started_tokens, row.max_kv_tokens, view.capacity.growth_share)
    return _num_blocks(max(promised, min(row.num_known_tokens, row.max_kv_tokens)), view)


def _has_prefill_blocks(decode: WorkerView, prefill: WorkerView, request: Request, snapshot: ClusterSnapshot) -> bool:
    """Whether the prompt fits beside all that the worker was given; one of several decode workers has a share, and one
    request of it always fits, as the worker's own gate has it."""
    needed = _num_blocks(request.num_known_tokens, prefill)
    held = {row: _num_blocks(row.num_known_tokens, prefill) for row in prefill.assigned}
    if sum(held.values()) + needed > prefill.usable_blocks:
        return False
    mine = [count for row, count in held.items() if row.decode == decode.worker]
    if not mine or len(prefill.ready_pairs) < 2:
        return True
    return sum(mine) + needed <= snapshot.peer_share * prefill.usable_blocks


def _num_blocks(num_tokens: int, view: WorkerView) -> int:
    return -(-num_tokens // view.capacity.block_size)


def _paired_prefill(decode: WorkerView, snapshot: ClusterSnapshot) -> list[WorkerView]:
    return [
        view
        for view in snapshot.with_role(Role.PREFILL)
        if view.takes_work and decode.worker in view.ready_pairs and view.group == decode.group
    ]


def _holds_prompt(decode: WorkerView, request: Request, snapshot: ClusterSnapshot) -> bool:
    """Whether a prefill worker that `decode` can use would hold the prompt if it had nothing else."""
    return any(
        _num_blocks(request.num_known_tokens, view) <= view.usable_blocks for view in _paired_prefill(decode, snapshot)
    )


def _has_prefill_slot(decode: WorkerView, snapshot: ClusterSnapshot) -> bool:
    """Is a slot of the prefill workers left for one more request of `decode`, after those that wait for one? A decode
    worker whose share is used up leaves the rest to others, however many of its requests wait."""
    slots = _slots_of(decode, snapshot)
    if slots <= _num_awaiting(decode):
        return False
    group = [view for view in snapshot.with_role(Role.DECODE) if view.group == decode.group]
    claimed = sum(min(_num_awaiting(view), _slots_of(view, snapshot)) for view in group)
    return claimed < sum(_free_slots(view) for view in _paired_prefill(decode, snapshot))


def _num_awaiting(decode: WorkerView) -> int:
    """Its requests that will need a prefill worker next."""
    return sum(row.awaits_prefill for row in decode.assigned)


def _slots_of(decode: WorkerView, snapshot: ClusterSnapshot) -> int:
    """Requests that the prefill workers paired with `decode` can still take for it."""
    return sum(_slots_for(decode, view, snapshot) for view in _paired_prefill(decode, snapshot))


def _slots_for(decode: WorkerView, prefill: WorkerView, snapshot: ClusterSnapshot) -> int:
    """Requests that this prefill worker can still take for `decode`: one of several has a share."""
    free = _free_slots(prefill)
    if len(prefill.ready_pairs) < 2:
        return free
    given = sum(row.decode == decode.worker for row in prefill.assigned)
    return max(0, min(free, peer_slots(prefill.capacity.max_running, snapshot.peer_share) - given))


def _free_slots(prefill: WorkerView) -> int:
    return max(0, prefill.capacity.max_running - len(prefill.assigned))
