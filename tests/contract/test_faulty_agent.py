"""The transport that goes wrong on purpose: each kind of fault against the in-process transport, some over NIXL as
well; and that what no fault meets goes through as it was."""

import contextlib
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtransfer.agent import Handle, HandleState, TransferAgent
from kvtransfer.faulty_agent import FaultyAgent
from kvtransfer.links import WARM_UP_NOTICE
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.nixl_agent import NixlAgent
from loopline.errors import TransferError
from loopline.settings import FaultSettings, TransferSettings
from tests.contract.test_transport import Pair, wait_for
from tests.unit.worker.clocks import OwnClock

ROUNDS = 50
"""Polls in which something that must not come has had its chance."""
MakePair = Callable[..., "FaultyPair"]


class FaultyPair(Pair):
    """Source and target with faults, on a clock that the test owns. Push n carries bytes [64 n, 64 n + 64)."""

    def __init__(
        self, make_agent: Callable[[str], TransferAgent], faults: tuple[FaultSettings, ...], whose: str = ""
    ) -> None:
        """`whose`: source or target; empty: both have the faults."""
        self.clock = OwnClock()
        self.num_posted = 0

        def make(name: str) -> TransferAgent:
            own = faults if name.startswith(whose) else ()
            return FaultyAgent(make_agent(name), own, self.clock, self._on_posted)

        super().__init__(make)

    def _on_posted(self) -> None:
        self.num_posted += 1

    def push(self, number: int, notice: bytes | None = None) -> Handle:
        return self.post([(64 * number, 64 * number, 64)], notice or self.notice(number))

    @staticmethod
    def notice(number: int) -> bytes:
        return f"push {number}".encode()

    def has_bytes(self, number: int) -> bool:
        part = slice(64 * number, 64 * number + 64)
        return bool(np.array_equal(self.to_bytes[part], self.from_bytes[part]))

    def heard(self) -> list[bytes]:
        assert {sender for sender, _ in self.notices} <= {self.source.name}
        return [notice for _, notice in self.notices]

    def turn(self, *handles: Handle) -> None:
        """Poll both sides for a while."""
        for _ in range(ROUNDS):
            with contextlib.suppress(TransferError):  # it stands still
                self.poll_target()
            self.source.take_notices()
            for handle in handles:
                self.source.poll(handle)


@pytest.fixture(params=["local"])
def make_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    """Makes a pair with faults; closes its agents at the end."""
    hub = LocalHub()
    agents: list[TransferAgent] = []
    ucx = (("TLS", "tcp"), ("NET_DEVICES", "lo"))
    for name, value in ucx:
        monkeypatch.setenv(f"UCX_{name}", value)

    def make_agent(name: str) -> TransferAgent:
        agent: TransferAgent
        name = f"{name}-{uuid.uuid4()}"
        agent = LocalAgent(name, hub) if request.param == "local" else NixlAgent(name, TransferSettings(ucx=ucx))
        agents.append(agent)
        return agent

    yield lambda *faults, whose="": FaultyPair(make_agent, faults, whose)
    for agent in agents:
        agent.close()


both_transports = pytest.mark.parametrize("make_pair", ["local", "nixl"], indirect=True)


@both_transports
def test_what_no_fault_meets_goes_through(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="fail_push", at=100), FaultSettings(do="reorder_notices", at=100))
    handles = [pair.push(number) for number in range(8)]
    assert [pair.finish(handle).state for handle in handles] == [HandleState.DONE] * 8
    wait_for(lambda: pair.poll_target() or len(pair.notices) >= 8)
    assert sorted(pair.heard()) == [pair.notice(number) for number in range(8)]
    assert all(pair.has_bytes(number) for number in range(8))
    assert pair.num_posted == 8
    for handle in handles:
        pair.source.release(handle)


def test_a_push_that_fails_to_be_posted(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="fail_push", at=2, times=2))
    first = pair.push(1)
    for number in (2, 3):
        with pytest.raises(TransferError, match=f"push {number}"):
            pair.push(number)
    last = pair.push(4)
    assert {pair.finish(handle).state for handle in (first, last)} == {HandleState.DONE}
    pair.turn(first, last)
    assert pair.heard() == [pair.notice(1), pair.notice(4)]
    assert (pair.has_bytes(2), pair.num_posted) == (False, 2)


@both_transports
def test_a_handle_that_fails_although_the_bytes_arrive(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="fail_handle", at=1))
    handle, other = pair.push(1), pair.push(2)
    status = pair.finish(handle)
    assert (status.state, bool(status.reason)) == (HandleState.FAILED, True)
    assert pair.finish(other).state is HandleState.DONE
    wait_for(lambda: pair.poll_target() or len(pair.notices) >= 2)
    assert pair.has_bytes(1)
    assert sorted(pair.heard()) == [pair.notice(1), pair.notice(2)]
    assert pair.source.poll(handle) == status  # a terminal state stays
    pair.source.release(handle)


@both_transports
def test_a_corrupted_push_differs_in_one_byte_and_only_at_the_target(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="corrupt_push", at=2))
    before = pair.from_bytes.copy()
    for number in (1, 2, 3):
        assert pair.finish(pair.push(number)).state is HandleState.DONE
    wait_for(lambda: pair.poll_target() or len(pair.notices) >= 3)
    assert [pair.has_bytes(number) for number in (1, 2, 3)] == [True, False, True]
    assert np.count_nonzero(pair.to_bytes[:256] != pair.from_bytes[:256]) == 64 + 1  # push 0 was not sent
    assert np.array_equal(pair.from_bytes, before)


@both_transports
def test_a_delayed_push_is_sent_later(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="delay_push", at=1, seconds=5.0))
    handle, other = pair.push(1), pair.push(2)
    assert pair.finish(other).state is HandleState.DONE
    pair.clock.time_s += 4.9
    pair.turn(handle)
    assert not pair.source.poll(handle).is_terminal
    assert (pair.has_bytes(1), pair.heard()) == (False, [pair.notice(2)])
    pair.clock.time_s += 0.2
    assert pair.finish(handle).state is HandleState.DONE
    wait_for(lambda: pair.poll_target() or len(pair.notices) >= 2)
    assert (pair.has_bytes(1), pair.heard()[-1]) == (True, pair.notice(1))


def test_a_dropped_push_never_ends(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="drop_push", at=1))
    handle, other = pair.push(1), pair.push(2)
    assert pair.finish(other).state is HandleState.DONE
    pair.clock.time_s += 1e6
    pair.turn(handle)
    assert not pair.source.poll(handle).is_terminal
    assert (pair.has_bytes(1), pair.heard(), pair.num_posted) == (False, [pair.notice(2)], 1)


@pytest.mark.parametrize("kind", ["drop_push", "delay_push"])
def test_a_push_that_was_never_sent_fails_with_its_peer(make_pair: MakePair, kind: str) -> None:
    pair = make_pair(FaultSettings(do=kind, seconds=5.0))
    handle = pair.push(1)
    pair.source.remove_peer(pair.peer)
    assert pair.source.poll(handle).state is HandleState.FAILED
    pair.clock.time_s += 10.0
    pair.turn(handle)
    assert (pair.source.poll(handle).state, pair.heard()) == (HandleState.FAILED, [])
    pair.source.release(handle)


def test_a_delayed_push_that_can_not_be_posted_any_more_fails(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="delay_push", seconds=5.0))
    handle = pair.post([(0, 0, 1 << 30)], b"too much")
    pair.clock.time_s += 6.0
    assert pair.finish(handle).state is HandleState.FAILED


def test_a_source_that_stops_polling(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="stop_polling", at=2, seconds=3.0))
    first = pair.push(1)
    assert pair.finish(first).state is HandleState.DONE
    second = pair.push(2)
    pair.clock.time_s += 2.9
    for _ in range(ROUNDS):
        with pytest.raises(TransferError, match="nothing was polled"):
            pair.source.take_notices()
        assert not pair.source.poll(second).is_terminal
        assert pair.source.poll(first).state is HandleState.DONE  # a terminal state stays
    pair.clock.time_s += 0.2
    assert pair.finish(second).state is HandleState.DONE


def test_a_target_that_stops_polling(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="stop_polling", at=2, seconds=3.0), whose="target")
    handles = [pair.push(number) for number in (1, 2, 3)]
    pair.turn(*handles)
    assert pair.heard() == [pair.notice(1)]
    handles.append(pair.push(4))
    pair.clock.time_s += 2.9
    pair.turn(*handles)
    assert pair.heard() == [pair.notice(1)]
    assert not pair.has_bytes(4)
    pair.clock.time_s += 0.2
    assert pair.finish(handles[-1]).state is HandleState.DONE
    assert pair.heard() == [pair.notice(number) for number in (1, 2, 3, 4)]


@both_transports
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("drop_notice", [1, 3, 4]), ("repeat_notice", [1, 2, 2, 3, 4]), ("reorder_notices", [1, 3, 2, 4])],
)
def test_notices_that_are_lost_repeated_or_swapped(make_pair: MakePair, kind: str, expected: list[int]) -> None:
    pair = make_pair(FaultSettings(do=kind, at=2))
    for number in (1, 2, 3, 4):
        handle = pair.push(number)
        assert pair.finish(handle).state is HandleState.DONE
        pair.turn(handle)
    wait_for(lambda: pair.poll_target() or len(pair.notices) >= len(expected))
    pair.turn()
    assert pair.heard() == [pair.notice(number) for number in expected]
    assert all(pair.has_bytes(number) for number in (1, 2, 3, 4))


def test_pushes_and_notices_at_a_rate(make_pair: MakePair) -> None:
    failing, lost = FaultSettings(do="fail_push", rate=0.3), FaultSettings(do="drop_notice", rate=0.3, seed=1)
    pair = make_pair(failing, lost)
    posted = []
    for number in range(1, 61):
        if failing.is_due(number):
            with pytest.raises(TransferError, match=f"push {number}"):
                pair.push(number)
        else:
            assert pair.finish(pair.push(number)).state is HandleState.DONE
            posted.append(number)
    pair.turn()
    assert 30 < len(posted) < 55
    expected = [pair.notice(number) for place, number in enumerate(posted, 1) if not lost.is_due(place)]
    assert pair.heard() == expected
    assert 15 < len(expected) < len(posted)


def test_warm_ups_are_not_counted(make_pair: MakePair) -> None:
    pair = make_pair(FaultSettings(do="drop_push", at=1), FaultSettings(do="drop_notice", at=1))
    assert pair.finish(pair.push(1, WARM_UP_NOTICE)).state is HandleState.DONE
    assert pair.heard() == [WARM_UP_NOTICE]
    dropped, second = pair.push(1), pair.push(2)
    assert pair.finish(second).state is HandleState.DONE
    pair.turn(dropped)
    assert pair.heard() == [WARM_UP_NOTICE]  # of two pushes one was not sent, and the other one's notice is lost
    assert pair.has_bytes(2)
    assert pair.num_posted == 1
