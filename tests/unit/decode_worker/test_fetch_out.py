"""What a decode worker lends, with a scripted scheduler that has a prompt cached; the test speaks for its transfer
thread and for the prefill worker."""

from types import SimpleNamespace

import pytest

from decode_worker.fetch_out import FetchOut
from kvtransfer.commands import CloseReport, Command, PeerConnected, PeerRemoved
from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import BlockRun, Cause, HandoffKey, Peer, WorkerId
from loopline.kv.ledger import Allocation
from loopline.messages import CloseState
from loopline.worker.events import FetchAsked
from tests.support.scheduling import BLOCK_SIZE, make, request, run_scripted

READER = Peer(WorkerId("p0", 1), "prefill-0", "nowhere:1")
ME = WorkerId("d0", 1)
NUM_LENT = 2


class Bench:
    """A prompt of three blocks, of which the first two can be lent."""

    def __init__(self) -> None:
        self.ledger, self.scheduler = make(parts=("weights",))
        self.commands: list[Command] = []
        self.answers: list[PrefixSent] = []
        engine = SimpleNamespace(
            scheduler=self.scheduler, ledger=self.ledger, layout=SimpleNamespace(block_bytes=BLOCK_SIZE)
        )
        self.lending = FetchOut(engine, self.commands.append, lambda: ME, lambda state: None)  # type: ignore[arg-type]
        self.scheduler.submit(request("warm", 3 * BLOCK_SIZE, 1))
        while (plan := self.scheduler.plan()) is not None:
            self.scheduler.commit(plan, run_scripted(plan))
        assert self.ledger.counts().held == 0

    def lend(self, generation: int) -> Allocation:
        """The reservation whose blocks are lent."""
        reserved = self.scheduler.reserve(request("r", 3 * BLOCK_SIZE, 5))
        assert isinstance(reserved, Allocation)
        key, runs = HandoffKey("r", generation), (BlockRun(7, NUM_LENT),)
        fetch = FetchPrefix(key, READER, b"", None, 0, runs, 30.0)  # type: ignore[arg-type]
        self.lending.begin(FetchAsked(fetch, self.answers.append), reserved, NUM_LENT)
        return reserved

    def end(self, reserved: Allocation) -> None:
        self.scheduler.unreserve(reserved)
        self.ledger.release(reserved)
        self.ledger.audit()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_newer_generation_ends_the_loan_of_an_older_one(bench: Bench) -> None:
    first = bench.lend(1)
    bench.lending.handle(PeerConnected(READER, "tcp", 1.0))
    second = bench.lend(2)
    (answer,) = bench.answers
    assert (answer.key.generation, answer.cause) == (1, Cause.STALE)
    assert dict(bench.lending.counts()) == {"lending": 1, "closing": 1, "failed": 0}
    bench.lending.handle(CloseReport(HandoffKey("r", 1), CloseState.CLOSED, ()))
    bench.end(first)
    bench.lend(1)  # late: the newer one goes on
    assert bench.answers[-1].cause is Cause.DUPLICATE
    assert bench.lending.counts()["lending"] == 1
    bench.end(second)


def test_blocks_of_a_failed_loan_are_counted_as_in_quarantine_once_nobody_else_holds_them(bench: Bench) -> None:
    bench.lending.handle(PeerConnected(READER, "tcp", 1.0))
    reserved = bench.lend(1)
    bench.lending.end(HandoffKey("r", 1), Cause.CANCELLED, "given up")
    bench.lending.handle(CloseReport(HandoffKey("r", 1), CloseState.FAILED, ()))
    assert (bench.ledger.counts().quarantined, bench.ledger.counts().held) == (0, 3)
    bench.end(reserved)
    assert (bench.ledger.counts().quarantined, bench.ledger.counts().held) == (NUM_LENT, 0)
    again = bench.scheduler.reserve(request("again", 3 * BLOCK_SIZE, 5))  # others may still read them
    assert isinstance(again, Allocation)
    assert bench.ledger.written_tokens(again, 2) == NUM_LENT * BLOCK_SIZE
    assert (bench.ledger.counts().quarantined, bench.ledger.counts().held) == (0, 3)
    bench.end(again)
    bench.lending.handle(PeerRemoved(READER.worker))
    counts = bench.ledger.counts()
    assert (counts.quarantined, counts.held, counts.free + counts.cached) == (0, 0, counts.total)
