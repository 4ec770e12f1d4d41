"""How much of a prompt's transfer is left once its last chunk is computed, when each chunk is pushed while the next is
computed. Real transfer threads on both sides; computing is only a wait, without the interpreter's lock, as while a
device computes. `loopline.bench.transfer` calls it."""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvtransfer.commands import (
    CloseReport,
    CommitHandoff,
    ConnectPeer,
    Event,
    HandoffDrained,
    HandoffRefused,
    OpenHandoff,
    PeerConnected,
    PeerConnectFailed,
    Push,
    PushFailed,
    TransferThreadFailed,
)
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.transfer_thread import TransferThread
from loopline.bench.transfer_arms import fresh_blocks
from loopline.bench.transfer_peer import CODEC
from loopline.bench.transfer_side import DEADLINE_S, Channel, Side
from loopline.clock import MonotonicClock
from loopline.errors import TransferError
from loopline.identity import HandoffKey, Peer, RegionManifest, WorkerId
from loopline.messages import PushRange

CHUNKS, CHUNK_TOKENS = 8, 256
OVERLAP_TOKENS = CHUNKS * CHUNK_TOKENS
_FAILURES = (HandoffRefused, PushFailed, CloseReport, PeerConnectFailed, TransferThreadFailed)
_EVENT_WAIT_S = 0.1
_PROBES = 3
_COMPUTE_OF_PUSH = 2.0


@dataclass(frozen=True)
class _Pass:
    """What one handoff took, in seconds after the last chunk was computed, and its descriptors."""

    tail_s: float
    descriptors: int


class _Writer:
    """This process's transfer thread and one prompt in its arena."""

    def __init__(self, side: Side, channel: Channel) -> None:
        self._channel = channel
        self._events: queue.Queue[Event] = queue.Queue()  # a SimpleQueue may wait past its timeout in Python 3.11
        self._worker = WorkerId(str(uuid.uuid4()), 1)  # the target
        self._num_handoffs = 0
        self._blocks_of_chunk = side.settings.layout.blocks_for(CHUNK_TOKENS)
        self.blocks = fresh_blocks(side.settings.num_blocks, CHUNKS * self._blocks_of_chunk)
        me, transfer = WorkerId(str(uuid.uuid4()), 1), side.settings.transfer
        self._thread = TransferThread(
            lambda: NixlAgent(me.agent_name, transfer, side.span.memory_kind),
            side.span,
            settings=transfer,
            codec=CODEC,
            clock=MonotonicClock(),
            on_event=self._events.put,
        )

    def connect(self) -> None:
        """Start both threads and connect them. Raises PeerError kinds."""
        self._thread.start()
        endpoint = self._channel.answer({"do": "thread", "name": self._worker.agent_name}, "endpoint")
        region = RegionManifest(**endpoint["region"])
        self._thread.submit(ConnectPeer(Peer(self._worker, "target", "-"), bytes.fromhex(endpoint["metadata"]), region))
        self._wait(PeerConnected)

    def hand_off(self, parts: Sequence[int], compute_s: float) -> _Pass:
        """One handoff of pushes of so many chunks each; every chunk is computed for `compute_s` before its push, and a
        push is posted as soon as its last chunk is. Raises TransferError with what failed."""
        self._num_handoffs += 1
        key, done, computed_s = HandoffKey("overlap", self._num_handoffs), 0, 0.0
        expect = {"do": "expect", "generation": key.generation, "seqs": list(range(len(parts)))}
        self._channel.answer(expect, "expecting")
        self._thread.submit(OpenHandoff(key, self._worker, 0, self.blocks))
        for seq, chunks in enumerate(parts):
            for _ in range(chunks):
                threading.Event().wait(compute_s)
            computed_s = time.perf_counter()
            first, count = done * self._blocks_of_chunk, chunks * self._blocks_of_chunk
            self._thread.submit(Push(key, PushRange(seq, first, count), self.blocks[first : first + count]))
            done += chunks
        self._wait_complete(key.generation)
        tail_s = time.perf_counter() - computed_s
        self._thread.submit(CommitHandoff(key))
        return _Pass(tail_s, self._wait(HandoffDrained).cost.descriptors)

    def stop(self) -> None:
        """Nothing is in flight afterwards, or the thread has given up."""
        self._thread.stop()

    def _wait(self, kind: type[HandoffDrained] | type[PeerConnected]) -> Any:
        ends_s = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < ends_s:
            event = self._next_event(_EVENT_WAIT_S)
            if isinstance(event, kind):
                return event
        raise TransferError(f"no {kind.__name__} within {DEADLINE_S:g} s")

    def _wait_complete(self, generation: int) -> None:
        ends_s = time.perf_counter() + DEADLINE_S
        while time.perf_counter() < ends_s:
            if any(message.get("complete") == generation for message in self._channel.take(_EVENT_WAIT_S)):
                return
            self._next_event(0.0)  # what fails says so here; nothing else that matters comes before the commit
        raise TransferError(f"the target had not all pushes within {DEADLINE_S:g} s")

    def _next_event(self, wait_s: float) -> Event | None:
        """None when nothing comes in time. Raises TransferError for news of a failure."""
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(event, _FAILURES):
            raise TransferError(f"the transfer thread says {event}")
        return event


def measure_overlap(
    side: Side, channel: Channel, rounds: int, compute_ms: float | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Milliseconds from the end of the last chunk's computing to the target's word that it has all chunks: each pushed
    while the next is computed, all in one push at the end, and one chunk alone. Medians of `rounds` turns; the target's
    word is a message over a socket pair. The agents that this process and the other had are closed before.

    Raises PeerError kinds where a push fails or the bytes that arrived are not those that were sent.
    """
    writer = _Writer(side, channel)
    try:
        say("connecting transfer threads")
        writer.connect()
        alone = [writer.hand_off([1], 0.0) for _ in range(_PROBES)]
        if compute_ms is None:
            compute_ms = _COMPUTE_OF_PUSH * median(one.tail_s for one in alone) * 1e3
        passes: dict[str, list[_Pass]] = {"pushed_while_computing": [], "pushed_at_the_end": [], "one_chunk": []}
        channel.answer({"do": "clear", "blocks": writer.blocks}, "cleared")
        writer.hand_off([1] * CHUNKS, compute_ms / 1e3)
        if channel.answer({"do": "digest", "blocks": writer.blocks}, "digest") != side.digest(writer.blocks):
            raise TransferError("the bytes at the target are not those that were sent")
        for number in range(rounds):
            say(f"overlap, round {number + 1} of {rounds}")
            passes["pushed_while_computing"].append(writer.hand_off([1] * CHUNKS, compute_ms / 1e3))
            passes["pushed_at_the_end"].append(writer.hand_off([CHUNKS], compute_ms / 1e3))
            passes["one_chunk"].append(writer.hand_off([1], compute_ms / 1e3))
    finally:
        writer.stop()
    chunk_bytes = side.settings.layout.blocks_for(CHUNK_TOKENS) * side.settings.layout.block_bytes
    figures: dict[str, Any] = {"chunks": CHUNKS, "chunk_tokens": CHUNK_TOKENS, "chunk_bytes": chunk_bytes}
    return (
        figures
        | {"compute_ms": compute_ms, "checksum_ok": True}
        | {
            name: {"ms": median(one.tail_s for one in taken) * 1e3, "descriptors": taken[0].descriptors}
            | {"rounds_ms": [one.tail_s * 1e3 for one in taken]}
            for name, taken in passes.items()
        }
    )
