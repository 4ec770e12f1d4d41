"""Policies prefer and rules hold: whatever the policy, who is chosen has room, and who has room is found."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.effects import Assigned
from coordinator.policies import make_policy
from coordinator.registry import Registry
from coordinator.router import Router
from coordinator.snapshot import Avoided, ClusterSnapshot, WorkerView
from loopline.bench import router_plain
from loopline.identity import Role, WorkerId
from loopline.messages import PairReady, Register
from loopline.request import Request
from tests.unit.coordinator.builders import FINGERPRINT, OTHER_FINGERPRINT, heartbeat, register, request

POLICIES = ("least_work", "power_of_two", "prefix_aware", "session_affinity")
Table = dict[WorkerId, tuple[Assigned, ...]]


@st.composite
def snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    registry = Registry(1e9, None, draw(st.sampled_from((0.25, 0.5, 1.0))))
    workers: dict[Role, list[Register]] = {role: [] for role in Role}
    for role, members in workers.items():
        for number in range(draw(st.integers(0, 2) if role is Role.UNIFIED else st.integers(1, 4))):
            fingerprint = draw(st.sampled_from((FINGERPRINT, FINGERPRINT, OTHER_FINGERPRINT)))
            blocks, slots = draw(st.integers(1, 3) | st.integers(4, 12)), draw(st.integers(1, 4))
            share = draw(st.sampled_from((0.0, 0.3, 1.0)))
            sizes = {"total_blocks": blocks, "max_running": slots}
            one = register(f"{role}-{number}", role, fingerprint=fingerprint, growth_share=share, **sizes)
            registry.join(one, 0.0)
            members.append(one)
    for prefill in workers[Role.PREFILL]:
        for decode in workers[Role.DECODE]:
            if draw(st.integers(0, 4)):
                registry.pair_ready(prefill.peer.worker, PairReady(decode.peer.worker, "tcp", 1.0))
    table: Table = {}
    for one in (member for members in workers.values() for member in members):
        rows = [draw(rows_of(one, workers[Role.DECODE], number)) for number in range(draw(st.integers(0, 3)))]
        table[one.peer.worker] = tuple(rows)
        if not draw(st.integers(0, 5)):
            registry.heartbeat(one.peer.worker, heartbeat(draining=draw(st.booleans()), quarantined=1), 0.0)
        if not draw(st.integers(0, 5)):
            registry.refused(one.peer.worker)
    return registry.snapshot(0.0, table)


@st.composite
def rows_of(draw: st.DrawFn, worker: Register, decode: list[Register], number: int) -> Assigned:
    is_decode = worker.role.generates
    known, most = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    return Assigned(
        f"{worker.peer.name}/{number}",
        known,
        most,
        draw(st.integers(1, 50)),
        worker.role is Role.DECODE and draw(st.booleans()),
        None if is_decode else draw(st.sampled_from(decode)).peer.worker,
        not draw(st.integers(0, 5)),
        num_started_tokens=draw(st.integers(1, min(known, most))),  # what needs KV is never less than what was given
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    one = request(f"new-{draw(st.integers(0, 99))}", prompt=draw(st.integers(1, 40)))
    return replace(one, session=draw(st.sampled_from(("", "a", "b"))))


def given_rows(one: Request, decode: WorkerView, prefill: WorkerView | None) -> dict[WorkerId, Assigned]:
    awaits = prefill is None and decode.role is Role.DECODE
    known = one.num_known_tokens
    rows = {
        decode.worker: Assigned(one.request_id, known, one.max_kv_tokens, 8, awaits, num_started_tokens=known),
    }
    if prefill is not None:
        rows[prefill.worker] = Assigned(
            one.request_id, one.num_known_tokens, one.max_kv_tokens, 9, False, decode.worker
        )
    return rows


@pytest.mark.parametrize("policy", POLICIES)
@given(
    snapshot=snapshots(),
    asked=st.lists(
        st.tuples(requests(), st.booleans(), st.booleans()), max_size=6, unique_by=lambda a: a[0].request_id
    ),
)
def test_who_is_chosen_has_room_and_who_has_room_is_found(
    policy: str, snapshot: ClusterSnapshot, asked: list[tuple[Request, bool, bool]]
) -> None:
    """Against the plain rules, which add up all requests at every decision."""
    placing = Router(make_policy(policy)).begin(snapshot, 0.0)
    for one, is_suspect, binds in asked:
        able = router_plain.decode_candidates(one, snapshot, is_suspect=is_suspect)
        decode = placing.choose_decode(one, is_suspect=is_suspect)
        assert (decode and decode.worker) in {view.worker for view in able} if able else decode is None
        if policy == "least_work":
            expected = router_plain.choose_decode(one, snapshot, is_suspect=is_suspect)
            assert (decode and decode.peer.name) == (expected and expected.peer.name)
        if decode is None:
            continue
        rows = given_rows(one, decode, None)
        placing.placed(one, {}, rows)
        snapshot = router_plain.with_request(snapshot, rows)
        if binds and decode.role is Role.DECODE:
            found = snapshot.find(decode.worker)
            assert found is not None
            able = router_plain.prefill_candidates(one, snapshot, found, is_suspect=is_suspect)
            prefill = placing.choose_prefill(one, decode.worker, is_suspect=is_suspect)
            assert (prefill and prefill.worker) in {view.worker for view in able} if able else prefill is None
            if prefill is not None:
                after = given_rows(one, decode, prefill)
                placing.placed(one, rows, after)
                snapshot = router_plain.with_request(snapshot, after)


@pytest.mark.parametrize("policy", POLICIES)
@given(snapshot=snapshots(), one=requests())
def test_the_same_snapshot_gives_the_same_answer(policy: str, snapshot: ClusterSnapshot, one: Request) -> None:
    answers = [Router(make_policy(policy)).begin(snapshot, 0.0).choose_decode(one) for _ in range(2)]
    assert answers[0] == answers[1]


@given(snapshot=snapshots(), one=requests(), data=st.data())
def test_avoiding_takes_nobody_out_for_good(snapshot: ClusterSnapshot, one: Request, data: st.DataObject) -> None:
    """Whoever is avoided, a cluster in which something is ready has a worker to ask, with room or without; and with
    nobody avoided any more the choice is what it was."""
    workers = [view.worker for view in snapshot.workers]
    links = [(view.worker, other) for view in snapshot.with_role(Role.PREFILL) for other in view.ready_pairs]
    avoided = Avoided(
        workers=frozenset(data.draw(st.sets(st.sampled_from(workers)))),
        links=frozenset(data.draw(st.sets(st.sampled_from(links))) if links else ()),
    )
    router = Router(make_policy("least_work"))
    for fault in [(worker,) for worker in avoided.workers]:
        router.avoidance.failed(fault, 0.0)
    for link in avoided.links:
        router.avoidance.failed(link, 0.0)
    chosen = router.begin(snapshot, 0.0).choose_decode(one)
    everyone = Avoided(workers=frozenset(workers), links=frozenset(links))
    if avoided == everyone:
        assert chosen == router_plain.choose_decode(one, snapshot)
    able = [view for view in snapshot.workers if view.role.generates and view.takes_work]
    if chosen is not None and chosen.worker in avoided.workers:
        assert all(view.worker in avoided.workers or _is_cut_off(view, snapshot, avoided) for view in able)
    assert router.begin(snapshot, 1000.0).choose_decode(one) == router_plain.choose_decode(one, snapshot)


def _is_cut_off(decode: WorkerView, snapshot: ClusterSnapshot, avoided: Avoided) -> bool:
    """Whether all of its prefill workers are avoided, or their links to it are, or they do not take work. A unified
    worker has none and needs none."""
    if decode.role is Role.UNIFIED:
        return False
    for worker in decode.ready_pairs:
        prefill = snapshot.find(worker)
        is_good = worker not in avoided.workers and (worker, decode.worker) not in avoided.links
        if is_good and prefill is not None and prefill.group == decode.group and prefill.state == "ready":
            return False
    return True
