import logging
from dataclasses import replace

import pytest

from coordinator.effects import Send
from coordinator.registry import Joined, Refused, Registry
from loopline.errors import OperatorError
from loopline.identity import LAST_EPOCH, Role, WorkerId, WorkerState
from loopline.messages import Drain, Pair, PairFailed, PairReady, PeerGone
from tests.unit.coordinator.builders import OTHER_FINGERPRINT, heartbeat, peer, register

HOST = "127.0.0.1"
P, D = register("prefill-0", Role.PREFILL, pid=10), register("decode-0", Role.DECODE, pid=11)


def joined(registry: Registry, *registers: object) -> None:
    for one in registers:
        assert isinstance(registry.join(one, 0.0), Joined)  # type: ignore[arg-type]


def states(registry: Registry, now_s: float = 0.0) -> dict[str, WorkerState]:
    return {view.peer.name: view.state for view in registry.snapshot(now_s, {}).workers}


@pytest.mark.parametrize("order", [(P, D), (D, P)])
def test_whoever_joins_second_makes_the_pair(order: tuple[object, object]) -> None:
    registry = Registry(3.0)
    joined(registry, order[0])
    answer = registry.join(order[1], 0.0)  # type: ignore[arg-type]
    assert isinstance(answer, Joined)
    assert answer.commands == (Send(P.peer.worker, Pair(D.peer)),)


def test_a_pair_makes_both_ready() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    assert states(registry) == {"prefill-0": WorkerState.STARTING, "decode-0": WorkerState.STARTING}
    assert registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "tcp", 1e9))
    assert states(registry) == {"prefill-0": WorkerState.READY, "decode-0": WorkerState.READY}
    snapshot = registry.snapshot(0.0, {})
    assert registry.can_serve
    assert snapshot.workers[0].links[0].decode_name == "decode-0"
    assert snapshot.arena_tokens() == 64 * 16


@pytest.mark.parametrize(("floor", "is_slow"), [(None, False), (999, False), (1000, False), (1001, True)])
def test_a_link_under_the_floor_is_used_with_a_warning(
    floor: int | None, is_slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(3.0, floor)
    joined(registry, P, D)
    assert registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "ucx:tcp", 1000.0))
    assert registry.snapshot(0.0, {}).workers[0].links[0].is_slow is is_slow
    words = "pair prefill-0 -> decode-0 is slow: 1000 bytes/s over ucx:tcp, the floor is 1001"
    assert [record.getMessage() for record in caplog.records] == [words] * is_slow


def test_a_name_is_taken_while_its_worker_lives() -> None:
    registry = Registry(3.0)
    joined(registry, P)
    answer = registry.join(register("prefill-0", Role.PREFILL, uuid="another"), 0.0)
    assert isinstance(answer, Refused) and "prefill-0 is alive at 127.0.0.1:prefill-0" in answer.reason
    assert answer.retry
    registry.lose(P.peer.worker, proven=False)
    joined(registry, register("prefill-0", Role.PREFILL, uuid="another"))
    answer = registry.join(P, 0.0)
    assert isinstance(answer, Refused) and not answer.retry  # a lost life does not come back


def test_a_name_is_free_when_the_lease_of_its_worker_has_run_out() -> None:
    registry = Registry(3.0)
    joined(registry, P)
    another = register("prefill-0", Role.PREFILL, uuid="another")
    assert isinstance(registry.join(another, 2.9), Refused)
    answer = registry.join(another, 3.0)
    assert isinstance(answer, Joined) and answer.superseded == P.peer.worker


def test_a_later_epoch_of_the_same_process_takes_over() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    answer = registry.join(register("prefill-0", Role.PREFILL, epoch=2, pid=10), 0.0)
    assert isinstance(answer, Joined) and answer.superseded == P.peer.worker
    assert [send.message for send in answer.commands] == [Pair(D.peer)]


def test_other_fingerprints_form_a_group_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(3.0)
    joined(registry, P)
    other = register("decode-1", Role.DECODE, fingerprint=OTHER_FINGERPRINT)
    with caplog.at_level(logging.WARNING):
        answer = registry.join(other, 0.0)
    assert isinstance(answer, Joined) and answer.commands == ()
    assert "weights: w2 here, w1 there" in caplog.text
    assert not registry.pair_ready(P.peer.worker, PairReady(other.peer.worker, "tcp", 1.0))
    assert registry.snapshot(0.0, {}).arena_tokens() is None


def test_a_lease_lapses_without_heartbeats() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.heartbeat(P.peer.worker, heartbeat(), 2.0)
    assert registry.expired(2.9) == []
    assert registry.next_expiry_s() == 3.0
    assert registry.expired(3.0) == [D.peer.worker]
    assert registry.expired(5.0) == [P.peer.worker, D.peer.worker]


def test_a_loss_is_told_to_the_other_role_and_again_with_its_proof() -> None:
    registry = Registry(3.0)
    joined(registry, P, D, register("prefill-1", Role.PREFILL))
    registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "tcp", 1.0))
    assert registry.lose(P.peer.worker, proven=False) == [Send(D.peer.worker, PeerGone(P.peer.worker, False))]
    assert states(registry)["prefill-0"] is WorkerState.LOST
    assert states(registry)["decode-0"] is WorkerState.STARTING
    assert registry.lose(P.peer.worker, proven=False) == []
    assert registry.lives_with("uuid-prefill-0") == [P.peer.worker]
    assert registry.lose(P.peer.worker, proven=True) == [Send(D.peer.worker, PeerGone(P.peer.worker, True))]
    assert registry.lives_with("uuid-prefill-0") == []
    assert registry.lose(P.peer.worker, proven=True) == []


def test_a_failed_pair_is_tried_again_with_the_next_heartbeat() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.pair_failed(P.peer.worker, PairFailed(D.peer.worker, "refused"))
    assert registry.heartbeat(P.peer.worker, heartbeat(), 1.0) == [Send(P.peer.worker, Pair(D.peer))]
    assert registry.heartbeat(P.peer.worker, heartbeat(), 2.0) == []


def test_a_refusal_lasts_to_the_next_heartbeat_and_draining_shows() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "tcp", 1.0))
    registry.refused(D.peer.worker)
    assert [view.takes_work for view in registry.snapshot(0.0, {}).workers] == [True, False]
    registry.heartbeat(D.peer.worker, heartbeat(), 1.0)
    assert [view.takes_work for view in registry.snapshot(0.0, {}).workers] == [True, True]
    registry.heartbeat(D.peer.worker, heartbeat(draining=True), 2.0)
    assert states(registry)["decode-0"] is WorkerState.DRAINING
    assert not registry.can_serve


def test_a_pair_with_somebody_unknown_is_not_ready() -> None:
    registry = Registry(3.0)
    joined(registry, P)
    assert not registry.pair_ready(P.peer.worker, PairReady(peer("decode-9").worker, "tcp", 1.0))


def test_who_drained_has_left_and_is_not_lost() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.heartbeat(D.peer.worker, heartbeat(draining=True), 1.0)
    registry.lose(D.peer.worker, proven=False)
    assert list(states(registry)) == ["prefill-0"]
    assert registry.lives_with("uuid-decode-0") == [D.peer.worker]


def test_an_ordered_drain_begins_at_once_and_lasts() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.pair_ready(P.peer.worker, PairReady(D.peer.worker, "tcp", 1.0))
    assert registry.drain("decode-0", 2.0) == Send(D.peer.worker, Drain(2.0))
    registry.heartbeat(D.peer.worker, heartbeat(), 1.0)  # sent before the order came
    assert states(registry)["decode-0"] is WorkerState.DRAINING
    registry.lose(D.peer.worker, proven=False)
    assert registry.has_left(D.peer.worker) and not registry.has_left(P.peer.worker)
    with pytest.raises(OperatorError, match="no worker is named 'decode-0'; there are: prefill-0"):
        registry.drain("decode-0", 2.0)


def test_who_hangs_while_draining_is_lost() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    registry.heartbeat(D.peer.worker, heartbeat(draining=True), 1.0)
    assert registry.expired(4.0) == [P.peer.worker, D.peer.worker]
    registry.lose(D.peer.worker, proven=False, lapsed=True)
    registry.lose(D.peer.worker, proven=False)  # its stream is closed because of it
    assert states(registry)["decode-0"] is WorkerState.LOST


def test_an_end_is_that_of_one_process_in_all_its_lives() -> None:
    registry = Registry(3.0)
    later = register("decode-0", Role.DECODE, epoch=2)
    joined(registry, D, register("decode-1", Role.DECODE))
    registry.lose(D.peer.worker, proven=False)
    joined(registry, later)
    assert registry.lives_with("uuid-decode-0") == [later.peer.worker, D.peer.worker]
    assert registry.lives_with("uuid-decode-7") == []


def test_who_joins_hears_which_of_its_peers_are_proven_gone() -> None:
    registry = Registry(3.0)
    unproven = register("prefill-1", Role.PREFILL)
    stranger = register("prefill-2", Role.PREFILL, fingerprint=OTHER_FINGERPRINT)
    joined(registry, P, unproven, stranger)
    for one in (P, stranger):
        registry.lose(one.peer.worker, proven=True)
    registry.lose(unproven.peer.worker, proven=False)
    answer = registry.join(D, 0.0)
    assert isinstance(answer, Joined)
    assert answer.commands == (Send(D.peer.worker, PeerGone(P.peer.worker, True)),)
    assert registry.lose(unproven.peer.worker, proven=True) == [
        Send(D.peer.worker, PeerGone(unproven.peer.worker, True))
    ]


def test_proven_ends_are_forgotten_before_those_that_need_a_proof() -> None:
    registry = Registry(3.0)
    joined(registry, P)
    registry.lose(P.peer.worker, proven=False)
    for number in range(200):
        other = register(f"decode-{number}", Role.DECODE)
        joined(registry, other)
        registry.lose(other.peer.worker, proven=True)
    assert registry.lives_with("uuid-prefill-0") == [P.peer.worker]


@pytest.mark.parametrize("field", ["block_size", "total_blocks", "max_running", "token_bytes"])
def test_an_impossible_capacity_is_refused(field: str) -> None:
    registry = Registry(3.0)
    broken = replace(P, capacity=replace(P.capacity, **{field: 0}))
    answer = registry.join(broken, 0.0)
    assert isinstance(answer, Refused)
    assert f"{field} is 0" in answer.reason
    assert not registry.snapshot(0.0, {}).workers


def test_who_joins_later_hears_of_an_end_under_an_earlier_coordinator() -> None:
    registry = Registry(3.0)
    joined(registry, P)
    gone = PeerGone(WorkerId("long-gone", LAST_EPOCH), proven=True)
    assert registry.prove("long-gone") == [Send(P.peer.worker, gone)]
    assert registry.prove("long-gone") == []  # said once
    answer = registry.join(D, 0.0)
    assert isinstance(answer, Joined)
    assert Send(D.peer.worker, gone) in answer.commands


def test_an_order_to_drain_is_said_until_the_worker_confirms_it() -> None:
    registry = Registry(3.0)
    joined(registry, P, D)
    order = registry.drain("decode-0", 5.0)
    assert registry.heartbeat(D.peer.worker, heartbeat(), 1.0) == [order]
    assert registry.heartbeat(D.peer.worker, heartbeat(draining=True), 2.0) == []
    assert registry.heartbeat(D.peer.worker, heartbeat(), 3.0) == []
