"""Whom the gate lets in beside requests that are being fetched for, which hold blocks and are not computed yet."""

import pytest

from loopline.kv.ledger import Allocation
from loopline.sched.scheduler import Scheduler
from prefill_worker.gate import PushGate
from prefill_worker.policy import PrefillPolicy
from tests.support.scheduling import BLOCK_SIZE, NUM_BLOCKS, make, request, run_scripted


@pytest.fixture
def gate() -> PushGate:
    gate = PushGate()
    gate.num_peers = 2
    return gate


@pytest.fixture
def scheduler(gate: PushGate) -> Scheduler:
    return make(policy=PrefillPolicy(gate=gate))[1]


def fetch(scheduler: Scheduler, gate: PushGate, name: str, peer: str, num_blocks: int) -> Allocation:
    """What a fetch holds while it is under way."""
    allocation = scheduler.reserve(request(name, num_blocks * BLOCK_SIZE, 5))
    assert isinstance(allocation, Allocation)
    gate.enter(name, peer, num_blocks)
    return allocation


def submit(scheduler: Scheduler, gate: PushGate, name: str, peer: str, num_blocks: int) -> None:
    assert scheduler.submit(request(name, num_blocks * BLOCK_SIZE, 5)) is None
    gate.enter(name, peer, num_blocks)


def test_a_slow_fetch_does_not_keep_out_others_for_its_peer(scheduler: Scheduler, gate: PushGate) -> None:
    fetch(scheduler, gate, "fetched for", "d0", 2)
    submit(scheduler, gate, "computed", "d0", 1)
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["computed"]


def test_what_a_fetch_holds_is_of_its_peers_share(scheduler: Scheduler, gate: PushGate) -> None:
    gate.peer_share = 0.5
    allocation = fetch(scheduler, gate, "fetched for", "d0", NUM_BLOCKS // 2 - 1)
    submit(scheduler, gate, "too much", "d0", 2)
    submit(scheduler, gate, "other peer", "d1", 2)
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["other peer"]
    scheduler.commit(plan, run_scripted(plan))
    scheduler.unreserve(allocation)
    gate.leave("fetched for")
    plan = scheduler.plan()
    assert plan is not None and plan.request_ids == ["too much"]
