"""NIXL between two real processes: the push path, and a peer that is killed or stopped."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.agent import HandleState, HandleStatus
from kvtransfer.manifest import Descriptors
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.receiver import Receiver
from loopline.clock import MonotonicClock
from loopline.errors import TransferError
from loopline.identity import WorkerId
from loopline.settings import TransferSettings
from loopline.wire.convert import decode_push_notice

SIZE = 4 << 20
DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class OtherProcess:
    """`transport_peer.py`, driven line by line."""

    def __init__(self, name: str, size: int = SIZE) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transport_peer.py")), name, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


class Writer:
    """This process's agent, its bytes, and what it knows of the other one."""

    def __init__(self) -> None:
        self.agent = NixlAgent(f"writer-{uuid.uuid4()}", TransferSettings(ucx=(("TLS", "tcp"), ("NET_DEVICES", "lo"))))
        self.memory = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
        self.agent.register(self.memory.ctypes.data, SIZE, "DRAM", 0)
        self.peer = ""
        self.remote_address = 0

    def meet(self, other: OtherProcess) -> None:
        other.say("describe")
        answer = other.hear()
        self.peer = self.agent.add_peer(bytes.fromhex(answer["metadata"]))
        self.remote_address = answer["address"]

    def write(self, offset: int, size: int, notice: bytes) -> Callable[[], HandleStatus]:
        local = Descriptors("DRAM", np.array([[self.memory.ctypes.data + offset, size, 0]], dtype=np.uint64))
        remote = Descriptors("DRAM", np.array([[self.remote_address + offset, size, 0]], dtype=np.uint64))
        handle = self.agent.post_write(self.peer, local, remote, notice)

        def status() -> HandleStatus:
            self.agent.take_notices()
            return self.agent.poll(handle)

        return status


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    writer = Writer()
    yield writer
    writer.agent.close()


@pytest.fixture
def start_other() -> Iterator[Callable[[], OtherProcess]]:
    started: list[OtherProcess] = []

    def start() -> OtherProcess:
        started.append(OtherProcess(f"other-{uuid.uuid4()}"))
        return started[-1]

    yield start
    for other in started:
        other.end()


def terminal(status: Callable[[], HandleStatus]) -> HandleStatus:
    clock = MonotonicClock()
    deadline_s = clock.now_s() + DEADLINE_S
    while not (now := status()).is_terminal:
        assert clock.now_s() < deadline_s, "the write did not end in time"
    return now


def test_a_push_between_processes(writer: Writer, start_other: Callable[[], OtherProcess]) -> None:
    other = start_other()
    writer.meet(other)
    other.say("expect 2")
    half = SIZE // 2
    writes = [writer.write(0, half, b"first"), writer.write(half, half, b"second")]
    assert [terminal(write).state for write in writes] == [HandleState.DONE] * 2
    answer = other.hear()
    assert sorted(answer["notices"]) == sorted([writer.agent.name, notice.hex()] for notice in (b"first", b"second"))
    assert answer["sum"] == int(writer.memory.sum(dtype=np.uint64))


def test_a_killed_peer_fails_and_its_replacement_works(writer: Writer, start_other: Callable[[], OtherProcess]) -> None:
    other, replacement = start_other(), start_other()
    writer.meet(other)
    other.say("expect 1")
    assert terminal(writer.write(0, SIZE, b"alive")).state is HandleState.DONE
    other.hear()
    other.signal(signal.SIGSTOP)
    in_flight = writer.write(0, SIZE, b"in flight")
    assert not in_flight().is_terminal  # a stopped peer is no error
    other.kill()
    assert terminal(in_flight).state is HandleState.FAILED
    try:
        late = writer.write(0, SIZE, b"to the dead")
    except TransferError:
        pass
    else:
        assert terminal(late).state is HandleState.FAILED
    writer.agent.remove_peer(writer.peer)
    writer.meet(replacement)
    replacement.say("expect 1")
    assert terminal(writer.write(0, SIZE, b"again")).state is HandleState.DONE
    assert replacement.hear()["sum"] == int(writer.memory.sum(dtype=np.uint64))


def test_a_stopped_peer_stays_pending_and_finishes_when_it_goes_on(
    writer: Writer, start_other: Callable[[], OtherProcess]
) -> None:
    other = start_other()
    writer.meet(other)
    other.say("expect 1")
    assert terminal(writer.write(0, 16, b"opens the connection")).state is HandleState.DONE
    other.hear()
    other.signal(signal.SIGSTOP)
    status = writer.write(0, SIZE, b"waits")
    for _ in range(200):
        assert not status().is_terminal
    other.say("expect 1")
    other.signal(signal.SIGCONT)
    assert terminal(status).state is HandleState.DONE
    assert other.hear()["sum"] == int(writer.memory.sum(dtype=np.uint64))


def test_after_quiescence_a_dead_writer_writes_no_more(writer: Writer, start_other: Callable[[], OtherProcess]) -> None:
    """Over tcp the target's own poll lands bytes of a writer that was reaped before; after `Quiesced` none are left."""
    other = start_other()
    writer.memory[:] = 0
    other.say("describe")
    other.hear()
    other.say(f"push {writer.memory.ctypes.data} {SIZE} {writer.agent.metadata().hex()}")
    other.hear()
    for _ in range(3):
        writer.agent.take_notices()  # the connection is accepted by polling; the bytes begin to flow
    other.kill()
    writer.memory[:] = 0  # what a receiver must not do: reuse at once
    events: list[object] = []
    clock = MonotonicClock()
    receiver = Receiver(writer.agent, decode_push_notice, clock, events.append)
    receiver.quiesce(WorkerId("dead", 1))
    deadline_s = clock.now_s() + DEADLINE_S
    while not events:
        receiver.poll()
        assert clock.now_s() < deadline_s
    writer.memory[:] = 0
    for _ in range(300):
        receiver.poll()
    assert not writer.memory.any()
