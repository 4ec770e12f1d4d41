"""One suite for every `TransferAgent`: what the rest of kvtransfer relies on, run against the in-process transport and
against NIXL over UCX, both with two agents in this process."""

import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtransfer.agent import Handle, HandleState, HandleStatus, TransferAgent
from kvtransfer.local_agent import LocalAgent, LocalHub
from kvtransfer.manifest import Descriptors
from kvtransfer.nixl_agent import NixlAgent
from loopline.clock import MonotonicClock
from loopline.errors import TransferError
from loopline.settings import TransferSettings

SIZE = 1 << 16
DEADLINE_S = 20.0
MakeAgent = Callable[[str], TransferAgent]


def unique(role: str) -> str:
    return f"{role}-{uuid.uuid4()}"


@pytest.fixture(params=["local", "nixl"])
def make_agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAgent]:
    """Makes agents of one transport; closes them at the end."""
    hub = LocalHub()
    agents: list[TransferAgent] = []
    ucx = (("TLS", "tcp"), ("NET_DEVICES", "lo"))
    for name, value in ucx:
        monkeypatch.setenv(f"UCX_{name}", value)

    def make(name: str) -> TransferAgent:
        agent: TransferAgent
        agent = LocalAgent(name, hub) if request.param == "local" else NixlAgent(name, TransferSettings(ucx=ucx))
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.close()


class Pair:
    """A source with bytes, a target with zeros, and the source knows the target."""

    def __init__(self, make_agent: MakeAgent) -> None:
        self.source, self.target = make_agent(unique("source")), make_agent(unique("target"))
        self.from_bytes = np.random.default_rng(7).integers(1, 256, SIZE, dtype=np.uint8)
        self.to_bytes = np.zeros(SIZE, dtype=np.uint8)
        self.source.register(self.from_bytes.ctypes.data, SIZE, "DRAM", 0)
        self.target.register(self.to_bytes.ctypes.data, SIZE, "DRAM", 0)
        self.peer = self.source.add_peer(self.target.metadata())
        self.notices: list[tuple[str, bytes]] = []

    def post(self, pieces: list[tuple[int, int, int]], notice: bytes) -> Handle:
        """Pieces are (source offset, target offset, bytes)."""
        return self.source.post_write(
            self.peer,
            rows(self.from_bytes, [(source, size) for source, _, size in pieces]),
            rows(self.to_bytes, [(target, size) for _, target, size in pieces]),
            notice,
        )

    def poll_target(self) -> None:
        self.notices += self.target.take_notices()

    def finish(self, handle: Handle) -> HandleStatus:
        """Poll both sides until the handle is terminal."""
        status = [self.source.poll(handle)]

        def is_over() -> bool:
            self.poll_target()
            self.source.take_notices()
            status.append(self.source.poll(handle))
            return status[-1].is_terminal

        wait_for(is_over)
        return status[-1]


def rows(memory: NDArray[np.uint8], pieces: list[tuple[int, int]]) -> Descriptors:
    base = memory.ctypes.data
    return Descriptors("DRAM", np.array([[base + offset, size, 0] for offset, size in pieces], dtype=np.uint64))


def wait_for(condition: Callable[[], bool]) -> None:
    clock = MonotonicClock()
    deadline_s = clock.now_s() + DEADLINE_S
    while not condition():
        assert clock.now_s() < deadline_s, "the transport did not get there in time"


@pytest.fixture
def pair(make_agent: MakeAgent) -> Pair:
    return Pair(make_agent)


def heard(pair: Pair, count: int) -> bool:
    pair.poll_target()
    pair.source.take_notices()
    return len(pair.notices) >= count


def test_metadata_names_the_agent_and_adding_again_is_fine(pair: Pair) -> None:
    assert pair.peer == pair.target.name
    assert pair.source.add_peer(pair.target.metadata()) == pair.target.name
    assert isinstance(pair.target.metadata(), bytes)
    assert pair.source.transport_name(pair.peer)


def test_a_write_lands_with_exactly_its_bytes(pair: Pair) -> None:
    handle = pair.post([(100, 3000, 500), (4096, 0, 1000), (9000, 20000, 1)], b"one")
    assert pair.finish(handle).state is HandleState.DONE
    wait_for(lambda: heard(pair, 1))
    expected = np.zeros(SIZE, dtype=np.uint8)
    for source, target, size in [(100, 3000, 500), (4096, 0, 1000), (9000, 20000, 1)]:
        expected[target : target + size] = pair.from_bytes[source : source + size]
    assert np.array_equal(pair.to_bytes, expected)
    pair.source.release(handle)


def test_a_notice_comes_once_from_the_source_and_after_the_bytes(pair: Pair) -> None:
    for turn in range(20):
        pair.to_bytes[:] = 0
        handle = pair.post([(0, 0, SIZE)], f"turn {turn}".encode())
        complete: list[bool] = []

        def arrived(handle: Handle = handle, complete: list[bool] = complete) -> bool:
            pair.source.poll(handle)
            before = len(pair.notices)
            pair.poll_target()
            if len(pair.notices) > before:
                complete.append(bool(np.array_equal(pair.to_bytes, pair.from_bytes)))
            return bool(complete)

        wait_for(arrived)
        assert complete == [True]
        assert pair.finish(handle).state is HandleState.DONE
        pair.source.release(handle)
    for _ in range(50):
        heard(pair, 0)
    assert pair.notices == [(pair.source.name, f"turn {turn}".encode()) for turn in range(20)]


def test_many_handles_in_flight_at_once(pair: Pair) -> None:
    count, size = 32, SIZE // 32
    handles = [pair.post([(i * size, i * size, size)], f"{i}".encode()) for i in range(count)]
    assert all(pair.finish(handle).state is HandleState.DONE for handle in handles)
    wait_for(lambda: heard(pair, count))
    assert sorted(notice for _, notice in pair.notices) == sorted(f"{i}".encode() for i in range(count))
    assert np.array_equal(pair.to_bytes, pair.from_bytes)
    for handle in handles:
        assert pair.source.poll(handle).state is HandleState.DONE  # a terminal state stays
        pair.source.release(handle)


def test_nothing_arrives_while_the_target_does_not_poll(pair: Pair) -> None:
    handle = pair.post([(0, 0, SIZE)], b"waits")
    for _ in range(20):
        pair.source.poll(handle)
        pair.source.take_notices()
    assert pair.notices == []
    assert pair.finish(handle).state is HandleState.DONE
    wait_for(lambda: heard(pair, 1))


@pytest.mark.parametrize("piece", [(0, SIZE - 10, 11), (SIZE - 10, 0, 11), (0, SIZE, 1), (0, -1, 2)])
def test_a_row_outside_of_the_registered_memory_is_refused(pair: Pair, piece: tuple[int, int, int]) -> None:
    with pytest.raises(TransferError):
        pair.post([(0, 0, 16), piece], b"outside")
    assert pair.finish(pair.post([(0, 0, 16)], b"inside")).state is HandleState.DONE
    wait_for(lambda: heard(pair, 1))
    assert [notice for _, notice in pair.notices] == [b"inside"]


def test_unequal_sides_and_an_empty_notice_are_refused(pair: Pair) -> None:
    local, remote = rows(pair.from_bytes, [(0, 16)]), rows(pair.to_bytes, [(0, 8)])
    with pytest.raises(TransferError):
        pair.source.post_write(pair.peer, local, remote, b"unequal")
    with pytest.raises(TransferError):
        pair.post([(0, 0, 16)], b"")


def test_an_unknown_peer_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferError):
        pair.source.post_write("nobody", rows(pair.from_bytes, [(0, 8)]), rows(pair.to_bytes, [(0, 8)]), b"x")
    pair.source.remove_peer("nobody")


def test_garbage_metadata_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferError):
        pair.source.add_peer(b"no agent's metadata")


def test_a_name_belongs_to_one_agent(pair: Pair, make_agent: MakeAgent) -> None:
    with pytest.raises(TransferError):
        pair.source.add_peer(make_agent(pair.target.name).metadata())


def test_a_removed_peer_is_unknown_and_may_be_added_again(pair: Pair) -> None:
    assert pair.finish(pair.post([(0, 0, 16)], b"before")).state is HandleState.DONE
    pair.source.remove_peer(pair.peer)
    with pytest.raises(TransferError):
        pair.post([(0, 0, 16)], b"between")
    assert pair.source.add_peer(pair.target.metadata()) == pair.peer
    assert pair.finish(pair.post([(0, 0, 16)], b"after")).state is HandleState.DONE
    wait_for(lambda: heard(pair, 2))
    assert [notice for _, notice in pair.notices] == [b"before", b"after"]


def test_removing_a_peer_fails_what_is_in_flight(pair: Pair) -> None:
    assert pair.finish(pair.post([(0, 0, 16)], b"opens the connection")).state is HandleState.DONE
    handle = pair.post([(0, 0, SIZE)], b"never taken")
    if not pair.source.poll(handle).is_terminal:
        pair.source.remove_peer(pair.peer)
        assert pair.source.poll(handle).state is HandleState.FAILED
    pair.source.release(handle)


def test_a_dead_peer_is_a_failed_handle(pair: Pair) -> None:
    assert pair.finish(pair.post([(0, 0, 16)], b"alive")).state is HandleState.DONE
    pair.target.close()
    handle = pair.post([(0, 0, SIZE)], b"dead")
    statuses: list[HandleStatus] = []

    def is_over() -> bool:
        pair.source.take_notices()
        statuses.append(pair.source.poll(handle))
        return statuses[-1].is_terminal

    wait_for(is_over)
    assert statuses[-1].state is HandleState.FAILED
    assert statuses[-1].reason
    assert pair.source.poll(handle) == statuses[-1]
    pair.source.release(handle)
    pair.source.remove_peer(pair.peer)


def test_two_sources_write_to_one_target(make_agent: MakeAgent) -> None:
    first = Pair(make_agent)
    second = make_agent(unique("second"))
    second.register(first.from_bytes.ctypes.data, SIZE, "DRAM", 0)
    peer = second.add_peer(first.target.metadata())
    ours = first.post([(0, 0, 1000)], b"from the first")
    theirs = second.post_write(
        peer, rows(first.from_bytes, [(1000, 1000)]), rows(first.to_bytes, [(1000, 1000)]), b"from the second"
    )
    wait_for(lambda: first.finish(ours).is_terminal and second.poll(theirs).is_terminal and heard(first, 2))
    assert sorted(first.notices) == sorted([(first.source.name, b"from the first"), (second.name, b"from the second")])
    assert np.array_equal(first.to_bytes[:2000], first.from_bytes[:2000])


def test_close_may_be_called_twice(make_agent: MakeAgent) -> None:
    agent = make_agent(unique("closed"))
    agent.close()
    agent.close()
