"""When a prefill worker fetches and when it computes instead, with a scripted scheduler and a decode worker that the
test speaks for."""

import itertools
from types import SimpleNamespace

import pytest

from kvtransfer.commands import Command
from loopline.fetch_messages import PrefixSent
from loopline.holds import FIRST_HOLD_S, MOST_HOLD_S
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.kv.ledger import Allocation
from loopline.messages import CloseState, StartPrefill
from loopline.worker.events import PrefixAnswered, WriterClosed
from prefill_worker.fetch_in import LEAST_LIMIT_S, SLOWER, FetchIn, FetchPorts, Wanted
from tests.support.scheduling import BLOCK_SIZE, NUM_BLOCKS, HoldPolicy, make, request
from tests.unit.worker.clocks import OwnClock

SOURCE = Peer(WorkerId("d0", 1), "decode-0", "nowhere:1")
LIMIT_S = 30.0
BLOCK_BYTES = 1 << 20
FAST = 1e9  # bytes a second


class Bench:
    """Fetches of two blocks of prompts of three."""

    def __init__(self) -> None:
        self.ledger, self.scheduler = make(policy=HoldPolicy())
        self.clock = OwnClock()
        self.asked: list[Wanted] = []
        self.to_transfer: list[Command] = []
        self._numbers = itertools.count()
        ports = FetchPorts(
            to_transfer=self.to_transfer.append,
            ask_prefix=lambda source, wanted: self.asked.append(wanted),
            ask_close=lambda key, writer: None,
            entered=lambda state: None,
            landed=lambda key, num_blocks: None,
        )
        layout = SimpleNamespace(block_bytes=BLOCK_BYTES)
        engine = SimpleNamespace(scheduler=self.scheduler, ledger=self.ledger, layout=layout)
        self.fetches = FetchIn(engine, ports, self.clock, LIMIT_S)  # type: ignore[arg-type]

    def begin(self, bytes_per_s: float = FAST) -> HandoffKey | None:
        """A new request; None: it is not fetched for."""
        name = f"r{next(self._numbers)}"
        start = StartPrefill(
            key=HandoffKey(name, 1),
            request=request(name, 3 * BLOCK_SIZE, 5),
            target=SOURCE,
            first_block=2,
            runs=(),
            deadline_s=60.0,
            fetch_from_tokens=1,
        )
        return start.key if self.fetches.begin(start, bytes_per_s) else None

    def is_fetching(self, key: HandoffKey) -> bool:
        return key.request_id in self.scheduler.reserved.request_ids

    def answer(self, key: HandoffKey, cause: Cause) -> None:
        """The decode worker pushes nothing; the request is taken back too."""
        self.fetches.handle(PrefixAnswered(PrefixSent(key, SOURCE.worker, cause=cause)))
        self.fetches.handle(WriterClosed(key, SOURCE.worker, CloseState.CLOSED))
        self.scheduler.remove(key.request_id)
        self.ledger.audit()

    def fail(self, cause: Cause) -> None:
        key = self.begin()
        assert key is not None
        self.answer(key, cause)


@pytest.mark.parametrize("cause", [Cause.CANCELLED, Cause.UNKNOWN, Cause.DUPLICATE, Cause.STALE])
def test_an_end_that_is_no_fault_pauses_nothing(cause: Cause) -> None:
    bench = Bench()
    bench.fail(cause)
    assert bench.begin() is not None


@pytest.mark.parametrize("cause", [Cause.PEER_LOST, Cause.CORRUPTED, Cause.TRANSFER_FAILED, Cause.TRANSFER_TIMEOUT])
def test_a_fault_pauses_fetching_for_a_second(cause: Cause) -> None:
    bench = Bench()
    bench.fail(cause)
    assert bench.begin() is None
    bench.clock.time_s += FIRST_HOLD_S
    assert bench.begin() is not None


def test_several_failures_at_once_are_one_pause() -> None:
    bench = Bench()
    for key in [bench.begin() for _ in range(3)]:
        assert key is not None
        bench.answer(key, Cause.PEER_LOST)
    bench.clock.time_s += FIRST_HOLD_S
    assert bench.begin() is not None


@pytest.mark.parametrize(
    ("bytes_per_s", "limit_s"),
    [
        (FAST, LEAST_LIMIT_S),
        (2 * BLOCK_BYTES, SLOWER * 1.0),
        (2 * BLOCK_BYTES / 100, LIMIT_S),
        (0.0, LIMIT_S),  # not known
    ],
)
def test_a_fetch_may_take_what_its_bytes_should_take_many_times_over(bytes_per_s: float, limit_s: float) -> None:
    bench = Bench()
    key = bench.begin(bytes_per_s)
    assert key is not None and bench.asked[-1].limit_s == pytest.approx(limit_s)
    bench.clock.time_s += limit_s - 0.01
    bench.fetches.tick()
    assert bench.is_fetching(key) and not bench.scheduler.num_waiting
    bench.clock.time_s += 0.02
    bench.fetches.tick()
    assert not bench.is_fetching(key) and bench.scheduler.num_waiting == 1, "it is computed"
    assert bench.ledger.counts().quarantined == 2, "a late push may still write them"
    bench.ledger.audit()
    bench.fetches.handle(WriterClosed(key, SOURCE.worker, CloseState.CLOSED))
    assert not bench.ledger.counts().quarantined
    bench.ledger.audit()


def test_a_fetch_waits_for_those_that_are_on_their_way_from_the_same_worker() -> None:
    bench, bytes_per_s = Bench(), 4 * BLOCK_BYTES
    assert all(bench.begin(bytes_per_s) for _ in range(3))
    assert [wanted.limit_s for wanted in bench.asked] == pytest.approx([SLOWER * n * 0.5 for n in (1, 2, 3)])


@pytest.mark.parametrize("bytes_per_s", [FAST, 0.0])
def test_fetches_that_are_lost_without_a_word_are_tried_less_and_less_often(bytes_per_s: float) -> None:
    bench, pauses_s = Bench(), []
    for _ in range(7):
        began_s = bench.clock.time_s
        while (key := bench.begin(bytes_per_s)) is None:
            bench.clock.time_s += 0.25
        pauses_s.append(bench.clock.time_s - began_s)
        bench.clock.time_s += bench.asked[-1].limit_s
        bench.fetches.tick()
        bench.fetches.handle(WriterClosed(key, SOURCE.worker, CloseState.CLOSED))
        bench.scheduler.remove(key.request_id)
        bench.ledger.audit()
    assert pauses_s == [0, 1, 2, 4, 8, 16, MOST_HOLD_S]


def test_nothing_is_fetched_past_those_who_wait() -> None:
    bench = Bench()
    big = bench.scheduler.reserve(request("runs", (NUM_BLOCKS - 5) * BLOCK_SIZE, 5))
    assert isinstance(big, Allocation)
    assert bench.scheduler.submit(request("first in line", 6 * BLOCK_SIZE, 5)) is None
    assert bench.begin() is None, "there are blocks for it, but not its turn"
    bench.scheduler.remove("first in line")
    assert bench.begin() is not None
