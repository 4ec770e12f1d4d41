"""What nobody says: requests start again where a worker's own books show that something was lost, and only there."""

import asyncio

import pytest

from coordinator.effects import Effect, End, Ending, Requeue, Send
from coordinator.life import Books, State
from coordinator.registry import Registry
from coordinator.reply_watch import ReplyWatch
from coordinator.tracker import MAX_FRUITLESS_ATTEMPTS
from loopline.identity import Cause, HandoffKey, Role, WorkerId
from loopline.messages import Cancel, Heartbeat
from tests.unit.coordinator.builders import (
    failed,
    granted,
    heartbeat,
    register,
    reserved,
    row,
    step,
)
from tests.unit.coordinator.test_tracker import Bench, D, P, cancels

LIMIT_S = 5.0
KEY = HandoffKey("r1", 1)
ALL, NONE = frozenset({KEY}), frozenset[HandoffKey]()


def books(bench: Bench, *, prefill: frozenset[HandoffKey] = ALL, decode: frozenset[HandoffKey] = ALL) -> list[Effect]:
    """Look, with books of this moment."""
    now_s = bench.clock.s
    return bench.tracker.look({P.worker: Books(now_s, prefill), D.worker: Books(now_s, decode)})


@pytest.mark.parametrize("state", [State.RESERVING, State.BINDING])
def test_an_answer_that_does_not_come_costs_the_limit_and_no_more(state: State) -> None:
    bench = Bench()
    bench.to_reserving() if state is State.RESERVING else bench.to_binding()
    bench.clock.s += LIMIT_S - 0.1
    assert books(bench) == []
    bench.clock.s += 0.1
    effects = books(bench)  # whether the command or its answer was lost: the worker is told to forget it
    assert cancels(effects) == [("uuid-decode-0", 1)] and effects[-1] == Requeue("r1")
    assert bench.tracker.state("r1") is State.QUEUED
    late = reserved("r1") if state is State.RESERVING else granted("r1", P)
    assert getattr(bench.tracker, "on_reserved" if state is State.RESERVING else "on_granted")(D.worker, late) == []
    assert bench.tracker.ignored[Cause.STALE] == 1


def test_a_worker_whose_step_takes_long_is_waited_for() -> None:
    bench = Bench().to_reserving()
    old = Books(bench.clock.s, NONE)
    for _ in range(10):
        bench.clock.s += LIMIT_S
        assert bench.tracker.look({D.worker: old}) == []  # it has not looked at what came since then
    assert bench.tracker.look({}) == []  # nor one that has not spoken yet
    assert bench.tracker.on_reserved(D.worker, reserved("r1")) == []
    assert bench.tracker.state("r1") is State.RESERVED


def test_a_start_that_was_lost_is_seen_in_the_prefill_workers_books() -> None:
    bench = Bench().to_prefilling()
    for _ in range(20):  # however long it computes
        bench.clock.s += LIMIT_S
        assert books(bench) == []
    bench.clock.s += 1.0
    assert books(bench, prefill=NONE) == []
    bench.clock.s += LIMIT_S - 1.0
    effects = books(bench, prefill=NONE)
    assert cancels(effects) == [("uuid-decode-0", 1), ("uuid-prefill-0", 1)] and effects[-1] == Requeue("r1")


def test_a_prefill_worker_that_has_said_its_token_need_not_know_the_request() -> None:
    bench = Bench().to_decoding()
    bench.clock.s += 2 * LIMIT_S
    assert books(bench, prefill=NONE) == []


@pytest.mark.parametrize("to", ["to_prefilling", "to_decoding"])
def test_a_decode_worker_that_has_forgotten_the_request_is_seen(to: str) -> None:
    bench = getattr(Bench(), to)()
    assert books(bench) == []
    bench.clock.s += LIMIT_S
    assert books(bench, decode=NONE)[-1] == Requeue("r1")


def test_books_that_are_wrong_for_a_moment_cost_nothing() -> None:
    """A heartbeat may overtake the row that ends a request."""
    bench = Bench().to_decoding()
    for _ in range(10):
        bench.clock.s += LIMIT_S - 0.1
        assert books(bench, decode=NONE) == []
        assert books(bench) == []


def test_no_reply_counts_as_an_attempt() -> None:
    bench = Bench()
    for _ in range(MAX_FRUITLESS_ATTEMPTS):
        bench.to_reserving()
        bench.clock.s += LIMIT_S
        effects = books(bench, prefill=NONE, decode=NONE)
    end = effects[-1]
    assert isinstance(end, End) and end.outcome.ending is Ending.GIVEN_UP
    assert "the last one: worker decode-0 has not answered Reserve after 5 s" in end.outcome.detail


def test_who_was_not_listening_blames_nobody() -> None:
    bench = Bench().to_reserving()
    bench.clock.s += LIMIT_S
    bench.tracker.excuse()
    assert books(bench) == []
    bench.clock.s += LIMIT_S
    assert books(bench)[-1] == Requeue("r1")


def test_what_nobody_needs_is_cancelled_again() -> None:
    bench = Bench().to_prefilling()
    bench.tracker.cancel("r1")
    assert books(bench) == []  # the Cancel may be on its way
    expected = [Send(worker, Cancel(KEY, Cause.STALE)) for worker in (D.worker, P.worker)]
    assert books(bench) == expected
    assert books(bench, prefill=NONE, decode=NONE) == []


def test_an_older_generation_is_not_needed_and_the_current_one_is() -> None:
    bench = Bench().to_prefilling()
    bench.tracker.on_request_failed(D.worker, failed("r1", Cause.INTERNAL))
    bench.to_reserving()
    both = frozenset({KEY, HandoffKey("r1", 2)})
    assert books(bench, decode=both, prefill=NONE) == []
    assert books(bench, decode=both, prefill=NONE) == [Send(D.worker, Cancel(KEY, Cause.STALE))]


def test_rows_of_a_request_that_is_known_go_on() -> None:
    bench = Bench().to_decoding()
    bench.clock.s += LIMIT_S
    assert books(bench) == []
    assert len(bench.tracker.on_step_tokens(D.worker, step(row("r1", 6, 51)))) == 1


def test_the_registry_dates_books_by_the_engine_threads_lag() -> None:
    registry = Registry(3.0)
    registry.join(register("decode-0", Role.DECODE), 100.0)
    assert registry.books() == {}
    registry.heartbeat(D.worker, Heartbeat(heartbeat().load, False, lag_s=2.5), 104.0)
    assert registry.books() == {D.worker: Books(101.5, NONE)}
    registry.lose(D.worker, proven=False)
    assert registry.books() == {}


class _Watched:
    """A tracker as the watch sees it, and the registry too."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = 3  # looks until no request is left
        self.done = asyncio.Event()

    def __len__(self) -> int:
        return self.left

    def look(self, books: dict[WorkerId, Books]) -> list[Effect]:
        return self._called("look")

    def excuse(self) -> None:
        self._called("excuse")

    def books(self) -> dict[WorkerId, Books]:
        return {}

    def _called(self, what: str) -> list[Effect]:
        self.calls.append(what)
        self.left -= 1
        if not self.left:
            self.done.set()
        return []


def test_the_watch_looks_until_nothing_is_left_and_excuses_when_it_is_late() -> None:
    async def script() -> None:
        watched = _Watched()
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        loop.time = lambda: now_s  # type: ignore[method-assign]
        watch = ReplyWatch(watched, watched, lambda effects: None, 5.0)  # type: ignore[arg-type]
        watch.start()
        watch.start()
        for late_s in (0.0, 1.5, 0.5):
            now_s += 1.0 + late_s
            calls = len(watched.calls)
            async with asyncio.timeout_at(now_s + 1e6):
                while len(watched.calls) == calls:  # noqa: ASYNC110 - the loop's own time stands still
                    await asyncio.sleep(0)
        assert watched.calls == ["look", "excuse", "look"]
        assert watch._due_s is None  # it rests until the next request
        watched.left = 1
        watch.start()
        assert watch._due_s is not None

    asyncio.run(script())
