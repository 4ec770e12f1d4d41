"""Prompts that a decode worker computes itself: the tracker's states for it, with every message in every state, and the
coordinator's decision.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.effects import Deliver, Effect, End, Ending, Requeue, Send
from coordinator.life import Books, State
from coordinator.tracker import Tracker
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey
from loopline.messages import LocalPrefillStarted, Reserved, StartLocalPrefill, StartPrefill
from loopline.request import FinishReason
from tests.unit.coordinator.builders import failed, granted, prefilled, reserved, row, step
from tests.unit.coordinator.cluster import ScriptedCluster, text_of
from tests.unit.coordinator.test_service import Answer, message, run
from tests.unit.coordinator.test_tracker import D2, Bench, D, P, cancels, the_end

KEY = HandoffKey("r1", 1)


def started(generation: int = 1, cause: Cause | None = None) -> LocalPrefillStarted:
    return LocalPrefillStarted(HandoffKey("r1", generation), cause, "why" if cause else "")


class LocalBench(Bench):
    """Its decode worker has four of the five prompt tokens."""

    def to_reserved(self) -> "LocalBench":
        self.to_reserving().tracker.on_reserved(D.worker, Reserved(KEY, cached_tokens=4))
        return self

    def to_starting_local(self) -> "LocalBench":
        self.to_reserved().tracker.start_local("r1")
        return self

    def to_prefilling_locally(self) -> "LocalBench":
        self.to_starting_local().tracker.on_local_started(D.worker, started())
        return self


def at(state: State) -> Tracker:
    bench = LocalBench()
    if state is not State.QUEUED:
        getattr(bench, f"to_{state.value}")()
    assert bench.tracker.state("r1") is state
    return bench.tracker


def test_the_way_of_a_request_that_stays_on_its_decode_worker() -> None:
    bench = LocalBench(max_tokens=2)
    tracker = bench.to_reserved().tracker
    assert tracker.num_uncached("r1") == 1
    assert tracker.start_local("r1") == [Send(D.worker, StartLocalPrefill(KEY))]
    assert tracker.awaiting_prefill() == []
    (given,) = tracker.assigned()[D.worker]
    assert (given.awaits_prefill, given.token_loops) == (False, (1 + 2) * 2)  # a prompt token, two of the answer
    assert tracker.on_local_started(D.worker, started()) == []
    first, last = row("r1", 5, 50), row("r1", 6, 51, finish=FinishReason.LENGTH)
    assert tracker.on_step_tokens(D.worker, step(first)) == [Deliver("r1", first)]
    assert tracker.state("r1") is State.DECODING
    assert tracker.assigned()[D.worker][0].token_loops == 1 * 2
    deliver, end = tracker.on_step_tokens(D.worker, step(last))
    assert deliver == Deliver("r1", last) and isinstance(end, End)
    outcome = end.outcome
    assert (outcome.ending, outcome.stats, outcome.usage.cached_tokens) == (Ending.FINISHED, None, 4)
    assert (outcome.route.prefill, outcome.route.decode) == ("decode-0", "decode-0")


def test_where_a_prefill_worker_computes_its_own_finds_are_counted() -> None:
    bench = LocalBench(max_tokens=1)
    tracker = bench.to_reserved().tracker
    tracker.bind("r1", P)
    tracker.on_granted(D.worker, granted("r1", P))
    first = prefilled(row("r1", 5, 50, finish=FinishReason.LENGTH))
    effects = tracker.on_prefilled(P.worker, replace(first, stats=replace(first.stats, cached_tokens=3)))
    assert the_end(effects).outcome.usage.cached_tokens == 3, "of the decode worker's four nothing was saved"


def test_a_token_shows_what_a_lost_answer_would_have_said() -> None:
    tracker = at(State.STARTING_LOCAL)
    assert tracker.on_step_tokens(D.worker, step(row("r1", 5, 50))) == [Deliver("r1", row("r1", 5, 50))]
    assert tracker.on_local_started(D.worker, started()) == []
    assert (tracker.state("r1"), tracker.ignored) == (State.DECODING, {Cause.DUPLICATE: 1})


STATES = [
    State.QUEUED,
    State.RESERVING,
    State.RESERVED,
    State.BINDING,
    State.PREFILLING,
    State.STARTING_LOCAL,
    State.PREFILLING_LOCALLY,
    State.DECODING,
]
EVENTS: dict[str, Callable[[Tracker], list[Effect]]] = {
    "reserved": lambda tracker: tracker.on_reserved(D.worker, reserved("r1")),
    "granted": lambda tracker: tracker.on_granted(D.worker, granted("r1", P)),
    "started": lambda tracker: tracker.on_local_started(D.worker, started()),
    "started_again": lambda tracker: tracker.on_local_started(D.worker, started(cause=Cause.DUPLICATE)),
    "started_by_another": lambda tracker: tracker.on_local_started(D2.worker, started()),
    "started_earlier": lambda tracker: tracker.on_local_started(D.worker, started(generation=0)),
    "prefilled": lambda tracker: tracker.on_prefilled(P.worker, prefilled(row("r1", 5, 50))),
    "old_token": lambda tracker: tracker.on_step_tokens(D.worker, step(row("r1", 5, 50, attempt=0))),
    "foreign_token": lambda tracker: tracker.on_step_tokens(D2.worker, step(row("r1", 5, 50))),
    "token": lambda tracker: tracker.on_step_tokens(D.worker, step(row("r1", 5, 50))),
}
MOVES = {
    ("reserved", State.RESERVING): State.RESERVED,
    ("granted", State.BINDING): State.PREFILLING,
    ("started", State.STARTING_LOCAL): State.PREFILLING_LOCALLY,
    ("prefilled", State.PREFILLING): State.DECODING,
    ("token", State.PREFILLING): State.DECODING,
    ("token", State.STARTING_LOCAL): State.DECODING,
    ("token", State.PREFILLING_LOCALLY): State.DECODING,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_message_in_every_state(event: str, state: State) -> None:
    """What does not fit is counted once and changes nothing."""
    tracker = at(state)
    before = tracker.assigned()
    effects = EVENTS[event](tracker)
    moved = MOVES.get((event, state))
    assert tracker.state("r1") is (moved or state)
    if moved is None:
        assert effects == [] and tracker.assigned() == before
        assert sum(tracker.ignored.values()) == 1
    else:
        assert not tracker.ignored


@pytest.mark.parametrize("state", STATES)
def test_only_a_reservation_can_be_prefilled_locally(state: State) -> None:
    tracker = at(state)
    if state is State.RESERVED:
        tracker.start_local("r1")
        return
    with pytest.raises(IllegalTransition, match=f"r1 is {state}: it cannot start_local"):
        tracker.start_local("r1")
    assert tracker.state("r1") is state


@pytest.mark.parametrize("state", [State.STARTING_LOCAL, State.PREFILLING_LOCALLY])
def test_ways_out_of_local_prefill(state: State) -> None:
    for end in ("cancel", "deadline", "stop"):
        tracker = at(state)
        effects: list[Effect] = getattr(tracker, end)("r1")
        assert cancels(effects) == [("uuid-decode-0", 1)]
        assert the_end(effects) and "r1" not in tracker and tracker.assigned() == {}
        assert tracker.on_local_started(D.worker, started()) == []
        assert tracker.on_step_tokens(D.worker, step(row("r1", 5, 50))) == []
        assert tracker.ignored == {Cause.UNKNOWN: 2}
    for cause in (Cause.INTERNAL, Cause.TRANSFER_FAILED):
        tracker = at(state)
        assert tracker.on_request_failed(D.worker, failed("r1", cause))[-1] == Requeue("r1")
        assert (tracker.state("r1"), tracker.request("r1").attempt) == (State.QUEUED, 2)
    tracker = at(state)
    assert tracker.on_worker_lost(P.worker, "prefill-0") == []  # it has nothing to do with it
    assert tracker.on_worker_lost(D.worker, "decode-0")[-1] == Requeue("r1")
    assert tracker.is_suspect("r1")
    tracker.reserve("r1", D2)  # the next attempt begins from nothing
    assert tracker.on_reserved(D2.worker, reserved("r1", 2)) == []
    assert tracker.num_uncached("r1") == 5 and tracker.awaiting_prefill() == ["r1"]


@pytest.mark.parametrize("cause", [Cause.TOMBSTONED, Cause.UNKNOWN, Cause.WRONG_WRITER, Cause.STALE])
def test_a_refused_start_begins_a_new_attempt(cause: Cause) -> None:
    tracker = at(State.STARTING_LOCAL)
    assert tracker.on_local_started(D.worker, started(cause=cause))[-1] == Requeue("r1")
    assert tracker.request("r1").attempt == 2


def test_a_start_that_got_lost_is_seen() -> None:
    """Its worker has the reservation in its books, and will never compute it."""
    bench = LocalBench().to_starting_local()
    bench.clock.s += 6.0
    books = Books(bench.clock.s, frozenset({KEY}))
    effects = bench.tracker.look({D.worker: books})
    assert cancels(effects) == [("uuid-decode-0", 1)] and effects[-1] == Requeue("r1")


def test_a_long_local_prefill_is_waited_for() -> None:
    bench = LocalBench().to_prefilling_locally()
    for _ in range(5):
        bench.clock.s += 6.0
        assert bench.tracker.look({D.worker: Books(bench.clock.s, frozenset({KEY}))}) == []
    assert bench.tracker.look({D.worker: Books(bench.clock.s, frozenset())}) == []
    bench.clock.s += 6.0
    effects = bench.tracker.look({D.worker: Books(bench.clock.s, frozenset())})
    assert isinstance(effects[-1], Requeue)  # it has lost the request


def test_the_route_of_a_request_that_moved_on_names_both() -> None:
    tracker = at(State.PREFILLING_LOCALLY)
    tracker.on_worker_lost(D.worker, "decode-0")
    tracker.reserve("r1", D2)
    tracker.on_reserved(D2.worker, reserved("r1", 2))
    tracker.bind("r1", P)
    outcome = the_end(tracker.cancel("r1")).outcome
    assert (outcome.route.prefill, outcome.route.decode, outcome.route.earlier) == (
        "prefill-0",
        "decode-1",
        ("decode-0",),
    )


def test_the_answer_to_reserve_decides_who_prefills() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, decode = await cluster.pair()
        await cluster.until_idle()
        assert not decode.heard_of(StartLocalPrefill), "the probe shows that a pair works"
        for cached, is_local in ((0, False), (2, False), (3, True), (4, True)):  # of five, with a bound of three
            decode.cached_tokens = cached
            handed_over = len(prefill.heard_of(StartPrefill))
            answer = await Answer(cluster, message(max_tokens=4)).whole()
            assert answer.text == text_of(range(5, 9))
            route = answer.finished.route
            assert (route.prefill, route.decode) == ("decode-0" if is_local else "prefill-0", "decode-0")
            assert answer.finished.usage.cached_tokens == (cached if is_local else 0), "the prefill worker has none"
            assert route.prefix_source == ("local" if is_local else "recompute"), "no worker has been timed"
            assert answer.finished.HasField("handoff") is not is_local
            assert len(prefill.heard_of(StartPrefill)) == handed_over + (not is_local)
        await cluster.until_idle()

    run(script, routing={"local_prefill_below_tokens": 3})


def test_nothing_is_prefilled_locally_unless_asked_for() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        _, decode = await cluster.pair()
        decode.cached_tokens = 4
        await Answer(cluster, message(max_tokens=4)).whole()
        assert not decode.heard_of(StartLocalPrefill)

    run(script)


@pytest.mark.parametrize("choice", ["local", "recompute", "fetch"])
def test_a_way_that_is_forced_is_taken_by_all(choice: str) -> None:
    async def script(cluster: ScriptedCluster) -> None:
        prefill, decode = await cluster.pair()
        await cluster.until_idle()
        probes = prefill.heard_of(StartPrefill), decode.heard_of(StartLocalPrefill)
        if choice == "local":
            assert len(probes[1]) == 1 and not probes[0], "no request needs a pair"
        else:
            assert [one.fetch_from_tokens for one in probes[0]] == [0] and not probes[1], "it shows that a pair works"
        for cached in (0, 4):
            decode.cached_tokens = cached
            answer = await Answer(cluster, message(max_tokens=4)).whole()
            source = answer.finished.route.prefix_source
            assert source == ("local" if choice == "local" else "recompute"), "a scripted worker fetches nothing"
        fetches = [start.fetch_from_tokens for start in prefill.heard_of(StartPrefill)[1:]]
        assert fetches == {"local": [], "recompute": [0, 0], "fetch": [0, 1]}[choice]
        assert len(decode.heard_of(StartLocalPrefill)) == (3 if choice == "local" else 0)
        await cluster.until_idle()

    run(script, routing={"prefix_source": choice, "local_prefill_below_tokens": 5})
