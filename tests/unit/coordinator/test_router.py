from dataclasses import replace

from coordinator.effects import Assigned
from coordinator.policies import LeastWork
from coordinator.registry import Registry
from coordinator.router import Round, Router
from coordinator.snapshot import ClusterSnapshot
from loopline.identity import Fingerprint, Role, WorkerId
from loopline.messages import PairReady, Register
from tests.unit.coordinator.builders import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    assigned,
    heartbeat,
    register,
    request,
)

P0, P1 = register("prefill-0", Role.PREFILL), register("prefill-1", Role.PREFILL)
D0, D1 = register("decode-0", Role.DECODE), register("decode-1", Role.DECODE)
Table = dict[WorkerId, tuple[Assigned, ...]]


def cluster(*registers: Register, table: Table | None = None, refused: tuple[Register, ...] = ()) -> ClusterSnapshot:
    """All pairs of one group ready."""
    registry = Registry(3.0)
    for one in registers:
        registry.join(one, 0.0)
    for prefill in registers:
        for decode in registers:
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE:
                registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))
    for one in refused:
        registry.refused(one.peer.worker)
    return registry.snapshot(0.0, table or {})


def begin(snapshot: ClusterSnapshot) -> Round:
    return Router(LeastWork()).begin(snapshot, 0.0)


def decode_name(snapshot: ClusterSnapshot, group: Fingerprint | None = None, prompt: int = 5) -> str | None:
    view = begin(snapshot).choose_decode(request("new", prompt=prompt), group)
    return view.peer.name if view else None


def prefill_name(snapshot: ClusterSnapshot, prompt: int = 5) -> str | None:
    view = begin(snapshot).choose_prefill(request("new", prompt=prompt), D0.peer.worker)
    return view.peer.name if view else None


def test_least_work_then_fewest_requests_then_the_name() -> None:
    assert decode_name(cluster(P0, D1, D0)) == "decode-0"
    assert decode_name(cluster(P0, D0, D1, table={D0.peer.worker: (assigned("a", token_loops=8),)})) == "decode-1"
    table: Table = {
        D0.peer.worker: (assigned("a", token_loops=4), assigned("b", token_loops=4)),
        D1.peer.worker: (assigned("c", token_loops=8),),
    }
    assert decode_name(cluster(P0, D0, D1, table=table)) == "decode-1"
    assert prefill_name(cluster(P0, P1, D0, table={P0.peer.worker: (assigned("a"),)})) == "prefill-1"


def test_no_worker_has_two_suspects() -> None:
    suspect = replace(assigned("a"), is_suspect=True)

    def names(*holders: Register, is_suspect: bool) -> tuple[str | None, str | None]:
        placing = begin(cluster(P0, P1, D0, D1, table={holder.peer.worker: (suspect,) for holder in holders}))
        assert placing.has_suspects
        decode = placing.choose_decode(request("new"), is_suspect=is_suspect)
        prefill = placing.choose_prefill(request("new"), D0.peer.worker, is_suspect=is_suspect)
        return prefill and prefill.peer.name, decode and decode.peer.name

    assert names(P1, D1, is_suspect=True) == ("prefill-0", "decode-0")
    assert names(P0, D0, is_suspect=True) == ("prefill-1", "decode-1")
    assert names(P0, P1, D0, D1, is_suspect=True) == (None, None)
    assert names(P0, P1, D0, D1, is_suspect=False) == ("prefill-0", "decode-0")
    assert not begin(cluster(P0, D0, table={D0.peer.worker: (assigned("a"),)})).has_suspects


def test_running_slots_are_room() -> None:
    small = replace(D0, capacity=replace(D0.capacity, max_running=1))
    assert decode_name(cluster(P0, small)) == "decode-0"
    assert decode_name(cluster(P0, small, table={D0.peer.worker: (assigned("a"),)})) is None


def test_worst_case_blocks_are_room() -> None:
    small = replace(D0, capacity=replace(D0.capacity, total_blocks=3))
    table: Table = {D0.peer.worker: (assigned("a", max_kv_tokens=17),)}  # 2 blocks
    assert decode_name(cluster(P0, small, table=table), prompt=13) == "decode-0"  # 13 + 4 - 1 = 16: 1 block
    assert decode_name(cluster(P0, small, table=table), prompt=14) is None


def test_a_decode_worker_needs_a_prefill_worker_with_room() -> None:
    assert decode_name(cluster(D0)) is None
    single = replace(P0, capacity=replace(P0.capacity, max_running=1))
    assert decode_name(cluster(single, D0, table={P0.peer.worker: (assigned("a"),)})) is None
    waiting: Table = {D1.peer.worker: (assigned("a", awaits=True),)}  # will take the only slot
    assert decode_name(cluster(single, D0, D1, table=waiting)) is None
    assert decode_name(cluster(single, P1, D0, D1, table=waiting)) == "decode-0"


def test_prefill_room_is_slots_and_blocks() -> None:
    single = replace(P0, capacity=replace(P0.capacity, max_running=1))
    assert prefill_name(cluster(single, D0, table={P0.peer.worker: (assigned("a"),)})) is None
    small = replace(P0, capacity=replace(P0.capacity, total_blocks=2))
    assert prefill_name(cluster(small, D0), prompt=32) == "prefill-0"
    assert prefill_name(cluster(small, D0), prompt=33) is None


def test_who_refused_is_skipped() -> None:
    assert decode_name(cluster(P0, D0, D1, refused=(D0,))) == "decode-1"
    assert prefill_name(cluster(P0, P1, D0, refused=(P0,))) == "prefill-1"


def test_draining_workers_get_nothing_new() -> None:
    registry = Registry(3.0)
    registry.join(P0, 0.0)
    registry.join(D0, 0.0)
    registry.pair_ready(P0.peer.worker, PairReady(D0.peer.worker, "tcp", 1.0))
    registry.heartbeat(D0.peer.worker, heartbeat(draining=True), 0.0)
    assert decode_name(registry.snapshot(0.0, {})) is None


def test_a_group_keeps_requests_inside() -> None:
    other = replace(D1, fingerprint=OTHER_FINGERPRINT)
    other_prefill = replace(P1, fingerprint=OTHER_FINGERPRINT)
    snapshot = cluster(P0, D0, other_prefill, other)
    assert decode_name(snapshot) == "decode-0"
    assert decode_name(snapshot, OTHER_FINGERPRINT) == "decode-1"
    assert decode_name(cluster(P0, D0), OTHER_FINGERPRINT) is None
    assert decode_name(snapshot, FINGERPRINT) == "decode-0"
    assert prefill_name(snapshot) == "prefill-0"


def test_blocks_in_quarantine_are_no_room() -> None:
    registry = Registry(3.0)
    for one in (P0, D0):
        registry.join(one, 0.0)
    registry.pair_ready(P0.peer.worker, PairReady(D0.peer.worker, "tcp", 1.0))
    registry.heartbeat(D0.peer.worker, heartbeat(quarantined=63), 0.0)
    assert decode_name(registry.snapshot(0.0, {}), prompt=13) == "decode-0"  # 13 + 4 - 1 = 16: 1 block
    assert decode_name(registry.snapshot(0.0, {}), prompt=14) is None
    registry.heartbeat(P0.peer.worker, heartbeat(quarantined=63), 0.0)
    assert prefill_name(registry.snapshot(0.0, {}), prompt=16) == "prefill-0"
    assert prefill_name(registry.snapshot(0.0, {}), prompt=17) is None


def for_decode(name: str, decode: Register) -> Assigned:
    return replace(assigned(name), decode=decode.peer.worker)


def test_one_of_several_decode_workers_has_a_share_of_a_prefill_worker() -> None:
    two = (for_decode("a", D0), for_decode("b", D0))
    snapshot = replace(cluster(P0, D0, D1, table={P0.peer.worker: two}), peer_share=0.5)
    assert prefill_name(snapshot) is None  # two of four slots are D0's
    assert decode_name(snapshot) == "decode-1"
    alone = replace(cluster(P0, D0, table={P0.peer.worker: two}), peer_share=0.5)
    assert prefill_name(alone) == "prefill-0" and decode_name(alone) == "decode-0"


def test_the_share_is_of_blocks_too() -> None:
    one = (replace(for_decode("a", D0), num_known_tokens=400),)  # 25 of 64 blocks of 16 tokens
    snapshot = replace(cluster(P0, D0, D1, table={P0.peer.worker: one}), peer_share=0.5)
    assert prefill_name(snapshot, prompt=112) == "prefill-0"
    assert prefill_name(snapshot, prompt=113) is None
    assert prefill_name(replace(cluster(P0, D0, D1), peer_share=0.5), prompt=640) == "prefill-0"  # one always may
    alone = replace(cluster(P0, D0, table={P0.peer.worker: one}), peer_share=0.5)
    assert prefill_name(alone, prompt=113) == "prefill-0"


def test_requests_that_wait_for_a_used_up_share_hold_back_nobody() -> None:
    waiting = tuple(assigned(f"w{number}", awaits=True) for number in range(6))
    table: Table = {P0.peer.worker: (for_decode("a", D0), for_decode("b", D0)), D0.peer.worker: waiting}
    snapshot = replace(cluster(P0, D0, D1, table=table), peer_share=0.5)
    assert decode_name(snapshot) == "decode-1"
    claimed: Table = {P0.peer.worker: (for_decode("a", D0), for_decode("b", D1)), D0.peer.worker: waiting[:1]}
    one_left = replace(P0, capacity=replace(P0.capacity, max_running=3))
    assert decode_name(replace(cluster(one_left, D0, D1, table=claimed), peer_share=0.7)) is None  # it is D0's
