"""A worker without links: its transfer thread runs over any kind of memory, and ends."""

import queue

import numpy as np
import pytest

from kvtransfer.commands import Event
from kvtransfer.manifest import Descriptors
from kvtransfer.region import ArenaSpan
from kvtransfer.transfer_thread import NoticeCodec, TransferThread
from kvtransfer.unlinked_agent import UnlinkedAgent
from loopline.clock import MonotonicClock
from loopline.errors import TransferError
from loopline.settings import TransferSettings
from loopline.wire.convert import decode_push_notice, encode_push_notice


@pytest.mark.parametrize("kind", ["DRAM", "VRAM"])
def test_its_transfer_thread_runs_and_is_quiet(kind: str) -> None:
    span = ArenaSpan(base_address=4096, block_bytes=64, num_blocks=2, null_block=2, memory_kind=kind)
    events: queue.Queue[Event] = queue.Queue()
    thread = TransferThread(
        lambda: UnlinkedAgent("u0"),
        span,
        settings=TransferSettings(backend="none", poll_interval_s=1.0),
        codec=NoticeCodec(encode_push_notice, decode_push_notice),
        clock=MonotonicClock(),
        on_event=events.put,
    )
    assert thread.start().region.memory_kind == kind
    assert thread.ignored() == ()
    assert thread.stop(30.0)
    assert events.empty()


def test_it_has_no_peers() -> None:
    agent = UnlinkedAgent("u0")
    with pytest.raises(TransferError, match="agent u0 has no links"):
        agent.add_peer(b"x")
    rows = Descriptors("DRAM", np.zeros((1, 3), np.uint64))
    with pytest.raises(TransferError, match="none to p0"):
        agent.post_write("p0", rows, rows, b"n")
    assert agent.take_notices() == []
