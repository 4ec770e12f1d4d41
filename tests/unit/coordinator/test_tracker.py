"""Every way through the life of a request, one test each."""

import pytest

from coordinator.effects import AttemptFailed, Deliver, Effect, End, Ending, Freed, Requeue, Send
from coordinator.life import MOST_UNANSWERED, TABLE, Move, State
from coordinator.tracker import MAX_FRUITLESS_ATTEMPTS, Tracker
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey
from loopline.messages import Bind, Cancel, Reserve, StartPrefill
from loopline.request import FinishReason
from tests.unit.coordinator.builders import (
    STATS,
    VirtualClock,
    failed,
    granted,
    peer,
    prefilled,
    request,
    reserved,
    row,
    step,
)

P, D, D2 = peer("prefill-0"), peer("decode-0"), peer("decode-1")


class Bench:
    """A tracker with one request, r1: five prompt tokens, so that its first token has position 5."""

    def __init__(self, max_tokens: int = 4) -> None:
        self.clock = VirtualClock()
        self.tracker = Tracker(self.clock)
        self.tracker.admit(request(max_tokens=max_tokens), deadline_s=60.0)

    def to_reserving(self) -> "Bench":
        self.tracker.reserve("r1", D)
        return self

    def to_binding(self) -> "Bench":
        self.to_reserving().tracker.on_reserved(D.worker, reserved("r1"))
        self.tracker.bind("r1", P)
        return self

    def to_prefilling(self) -> "Bench":
        self.to_binding().tracker.on_granted(D.worker, granted("r1", P))
        return self

    def to_decoding(self) -> "Bench":
        self.to_prefilling().tracker.on_prefilled(P.worker, prefilled(row("r1", 5, 50)))
        return self


def cancels(effects: list[Effect]) -> list[tuple[str, int]]:
    """(worker uuid, generation) of every Cancel."""
    sends = [(effect.worker, effect.message) for effect in effects if isinstance(effect, Send)]
    return [(worker.uuid, message.key.generation) for worker, message in sends if isinstance(message, Cancel)]


def the_end(effects: list[Effect]) -> End:
    (end,) = [effect for effect in effects if isinstance(effect, End)]
    return end


def test_the_way_of_a_request_without_trouble() -> None:
    bench = Bench(max_tokens=2)
    tracker = bench.tracker
    key = HandoffKey("r1", 1)
    assert tracker.reserve("r1", D) == [Send(D.worker, Reserve(key, tracker.request("r1"), 60.0))]
    bench.clock.s += 1.0
    assert tracker.on_reserved(D.worker, reserved("r1")) == []
    assert tracker.awaiting_prefill() == ["r1"]
    assert tracker.bind("r1", P) == [Send(D.worker, Bind(key, P))]
    grant = granted("r1", P)
    assert tracker.on_granted(D.worker, grant) == [
        Send(P.worker, StartPrefill(key, tracker.request("r1"), D, 0, grant.runs, 59.0))
    ]
    first, last = row("r1", 5, 50), row("r1", 6, 51, finish=FinishReason.LENGTH)
    assert tracker.on_prefilled(P.worker, prefilled(first)) == [Deliver("r1", first)]
    assert tracker.on_step_tokens(D.worker, step(first)) == []
    effects = tracker.on_step_tokens(D.worker, step(last))
    assert effects[0] == Deliver("r1", last)
    outcome = the_end(effects).outcome
    assert (outcome.ending, outcome.reason, outcome.stats) == (Ending.FINISHED, FinishReason.LENGTH, STATS)
    assert (outcome.usage.completion_tokens, outcome.timing.total_s) == (2, 1.0)
    assert (outcome.route.prefill, outcome.route.decode, outcome.route.earlier) == ("prefill-0", "decode-0", ())
    assert not cancels(effects) and "r1" not in tracker
    assert tracker.ignored == {Cause.DUPLICATE: 1}


def test_the_decode_workers_copy_of_the_first_token_may_come_first() -> None:
    bench = Bench().to_prefilling()
    first = row("r1", 5, 50)
    assert bench.tracker.on_step_tokens(D.worker, step(first, row("r1", 6, 51))) == [
        Deliver("r1", first),
        Freed(),
        Deliver("r1", row("r1", 6, 51)),
    ]
    assert bench.tracker.on_prefilled(P.worker, prefilled(first)) == []
    assert bench.tracker.ignored[Cause.DUPLICATE] == 1


def test_a_stop_id_ends_without_a_token() -> None:
    bench = Bench().to_decoding()
    effects = bench.tracker.on_step_tokens(D.worker, step(row("r1", 6, None, finish=FinishReason.STOP)))
    assert [type(effect) for effect in effects] == [End]
    assert the_end(effects).outcome.usage.completion_tokens == 1


def test_a_first_token_that_is_the_last_cancels_the_reservation() -> None:
    bench = Bench().to_prefilling()
    effects = bench.tracker.on_prefilled(P.worker, prefilled(row("r1", 5, 50, finish=FinishReason.LENGTH)))
    assert cancels(effects) == [("uuid-decode-0", 1)]
    assert the_end(effects).outcome.reason is FinishReason.LENGTH


def test_a_worker_that_does_not_stop_at_max_tokens_is_stopped() -> None:
    bench = Bench(max_tokens=2).to_decoding()
    effects = bench.tracker.on_step_tokens(D.worker, step(row("r1", 6, 51)))
    assert cancels(effects) == [("uuid-decode-0", 1)]
    assert the_end(effects).outcome.reason is FinishReason.LENGTH


BOTH = ["uuid-decode-0", "uuid-prefill-0"]


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("to_reserving", BOTH[:1]),
        ("to_binding", BOTH[:1]),
        ("to_prefilling", BOTH),
        ("to_decoding", BOTH),  # the decode worker has not shown that it has everything
    ],
)
@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
def test_every_end_of_ours_tells_all_who_may_hold_something(way: str, told: list[str], how: str) -> None:
    bench = Bench()
    getattr(bench, way)()
    effects = getattr(bench.tracker, how)("r1")
    assert cancels(effects) == [(name, 1) for name in told]
    assert the_end(effects).request_id == "r1"
    assert getattr(bench.tracker, how)("r1") == []


def test_a_queued_request_is_cancelled_without_a_word_to_workers() -> None:
    effects = Bench().tracker.cancel("r1")
    assert [type(effect) for effect in effects] == [End]


def test_after_the_decode_workers_first_row_the_prefill_worker_holds_nothing() -> None:
    bench = Bench().to_decoding()
    bench.tracker.on_step_tokens(D.worker, step(row("r1", 5, 50)))
    assert bench.tracker.on_worker_lost(P.worker, "prefill-0") == []
    assert cancels(bench.tracker.cancel("r1")) == [("uuid-decode-0", 1)]


def test_no_room_costs_no_attempt_but_a_generation() -> None:
    bench = Bench().to_reserving()
    tracker = bench.tracker
    for generation in range(1, 10):
        effects = tracker.on_reserved(D.worker, reserved("r1", generation, Cause.NO_ROOM))
        assert effects == [Requeue("r1")]
        assert tracker.request("r1").attempt == 1
        (send,) = tracker.reserve("r1", D)
        assert isinstance(send, Send) and isinstance(send.message, Reserve)
        assert send.message.key.generation == generation + 1


def test_a_prefill_workers_refusal_frees_the_reservation() -> None:
    bench = Bench().to_prefilling()
    effects = bench.tracker.on_request_failed(P.worker, failed("r1", Cause.NO_ROOM))
    assert cancels(effects) == [("uuid-decode-0", 1)]
    assert effects[-1] == Requeue("r1")


@pytest.mark.parametrize(("cause", "ending"), [(Cause.TOO_LARGE, Ending.TOO_LARGE), (Cause.INVALID, Ending.INVALID)])
def test_a_refusal_for_good_ends_the_request_with_its_text(cause: Cause, ending: Ending) -> None:
    bench = Bench().to_reserving()
    outcome = the_end(bench.tracker.on_reserved(D.worker, reserved("r1", 1, cause, "9 blocks of 4"))).outcome
    assert outcome.ending is ending and outcome.detail.startswith("9 blocks of 4")


def test_a_lost_decode_worker_restarts_with_the_delivered_tokens() -> None:
    bench = Bench().to_decoding()
    tracker = bench.tracker
    tracker.on_step_tokens(D.worker, step(row("r1", 6, 51)))
    lost = AttemptFailed("r1", Cause.PEER_LOST, "worker decode-0 was lost")
    assert tracker.on_worker_lost(D.worker, "decode-0") == [lost, Requeue("r1")]
    again = tracker.request("r1")
    assert (again.attempt, again.generated_ids, again.num_known_tokens) == (2, (50, 51), 7)
    tracker.reserve("r1", D2)
    tracker.on_reserved(D2.worker, reserved("r1", 2))
    tracker.bind("r1", P)
    tracker.on_granted(D2.worker, granted("r1", P, 2))
    assert tracker.on_step_tokens(D.worker, step(row("r1", 7, 99))) == []  # from the worker that was lost
    effects = tracker.on_prefilled(P.worker, prefilled(row("r1", 7, 52, attempt=2), 2))
    assert effects == [Deliver("r1", row("r1", 7, 52, attempt=2))]
    end = the_end(tracker.on_step_tokens(D2.worker, step(row("r1", 8, 53, attempt=2, finish=FinishReason.LENGTH))))
    assert end.outcome.route.earlier == ("decode-0",)
    assert end.outcome.usage.completion_tokens == 4


def test_a_lost_prefill_worker_cancels_the_reservation_and_restarts() -> None:
    bench = Bench().to_prefilling()
    effects = bench.tracker.on_worker_lost(P.worker, "prefill-0")
    assert cancels(effects) == [("uuid-decode-0", 1)] and effects[-1] == Requeue("r1")


def test_attempts_that_got_nowhere_are_bounded() -> None:
    bench = Bench()
    tracker = bench.tracker
    for generation in range(1, MAX_FRUITLESS_ATTEMPTS + 1):
        tracker.reserve("r1", D)
        effects = tracker.on_reserved(D.worker, reserved("r1", generation, Cause.INTERNAL))
    outcome = the_end(effects).outcome
    assert outcome.ending is Ending.GIVEN_UP
    assert "3 attempts" in outcome.detail and "0 tokens were delivered" in outcome.detail


def test_workers_that_drained_cost_no_attempt() -> None:
    bench = Bench()
    tracker = bench.tracker
    for generation in range(1, 2 * MAX_FRUITLESS_ATTEMPTS):
        tracker.reserve("r1", D)
        tracker.on_reserved(D.worker, reserved("r1", generation))
        tracker.bind("r1", P)
        tracker.on_granted(D.worker, granted("r1", P, generation))
        assert Requeue("r1") in tracker.on_worker_lost(P.worker, "prefill-0", left=True)
        assert tracker.request("r1").attempt == generation + 1  # it may have computed: what it said is of another try


def test_what_a_prefill_worker_computed_before_it_drained_goes_on_where_it_is() -> None:
    bench = Bench().to_decoding()  # the decode worker has said nothing of it
    assert bench.tracker.on_worker_lost(P.worker, "prefill-0", left=True) == []
    bench.tracker.on_step_tokens(D.worker, step(row("r1", 5, 50)))
    token = row("r1", 6, 51)
    assert bench.tracker.on_step_tokens(D.worker, step(token)) == [Deliver("r1", token)]


def test_what_had_not_arrived_of_it_starts_again_and_costs_no_attempt() -> None:
    tracker = Bench(max_tokens=50).tracker
    for number in range(1, 2 * MAX_FRUITLESS_ATTEMPTS):
        attempt(tracker, number, 4 + number, count=1)
        assert tracker.on_worker_lost(P.worker, "prefill-0", left=True) == []
        effects = tracker.on_request_failed(D.worker, failed("r1", Cause.PEER_LOST, number))
        assert effects[-1] == Requeue("r1") and not tracker.is_suspect("r1")
        assert not any(isinstance(effect, AttemptFailed) for effect in effects)
    tracker.cancel("r1")


def attempt(tracker: Tracker, number: int, position: int, count: int) -> None:
    """One attempt as far as its first `count` tokens."""
    tracker.reserve("r1", D)
    tracker.on_reserved(D.worker, reserved("r1", number))
    tracker.bind("r1", P)
    tracker.on_granted(D.worker, granted("r1", P, number))
    for index in range(count):
        token = row("r1", position + index, 50, attempt=number)
        is_first = index == 0
        effects = (
            tracker.on_prefilled(P.worker, prefilled(token, number))
            if is_first
            else tracker.on_step_tokens(D.worker, step(token))
        )
        assert effects == [Deliver("r1", token)]


def test_a_token_of_a_decode_worker_starts_the_count_of_attempts_over() -> None:
    tracker = Bench(max_tokens=50).tracker
    for number in range(1, 10):
        attempt(tracker, number, 3 + 2 * number, count=2)
        assert Requeue("r1") in tracker.on_worker_lost(D.worker, "decode-0")


def test_a_worker_that_had_not_answered_says_nothing_of_the_request() -> None:
    tracker = Bench().tracker
    for number in range(1, MOST_UNANSWERED + 1):
        tracker.reserve("r1", D)
        assert tracker.on_worker_lost(D.worker, "decode-0")[-1] == Requeue("r1"), number
        assert tracker.is_suspect("r1")
    for _ in range(MAX_FRUITLESS_ATTEMPTS):
        tracker.reserve("r1", D)
        effects = tracker.on_worker_lost(D.worker, "decode-0")
    assert the_end(effects).outcome.ending is Ending.GIVEN_UP


def test_a_request_that_ends_decode_workers_is_given_up_whatever_prefill_workers_make_of_it() -> None:
    tracker = Bench(max_tokens=50).tracker
    for number in range(1, MAX_FRUITLESS_ATTEMPTS + 1):
        attempt(tracker, number, 4 + number, count=1)
        effects = tracker.on_worker_lost(D.worker, "decode-0")
    outcome = the_end(effects).outcome
    assert outcome.ending is Ending.GIVEN_UP
    assert outcome.detail == (
        "given up after 3 attempts that brought no token of a decode worker, the last one: worker decode-0 was lost; "
        "3 tokens were delivered"
    )


def test_a_request_is_a_suspect_from_the_loss_of_a_worker_until_a_decode_worker_gets_on_with_it() -> None:
    tracker = Bench(max_tokens=50).tracker
    attempt(tracker, 1, 5, count=0)
    tracker.on_request_failed(P.worker, failed("r1", Cause.INTERNAL))
    assert not tracker.is_suspect("r1")  # nobody was lost
    attempt(tracker, 2, 5, count=0)
    tracker.on_worker_lost(P.worker, "prefill-0")
    assert tracker.is_suspect("r1")
    attempt(tracker, 3, 5, count=1)
    assert all(held.is_suspect for held in tracker.assignment("r1").values())
    tracker.on_step_tokens(D.worker, step(row("r1", 6, 50, attempt=3)))
    assert not tracker.is_suspect("r1")
    assert tracker.on_worker_lost(D.worker, "decode-0")
    assert not tracker.is_suspect("r1")  # it had got on


def test_messages_that_do_not_fit_are_counted_and_change_nothing() -> None:
    bench = Bench().to_prefilling()
    tracker = bench.tracker
    tracker.on_reserved(D.worker, reserved("nobody"))
    tracker.on_reserved(D.worker, reserved("r1"))
    tracker.on_granted(D.worker, granted("r1", P))
    tracker.on_granted(D.worker, granted("r1", P, 7))
    tracker.on_granted(P.worker, granted("r1", P))
    tracker.on_prefilled(D.worker, prefilled(row("r1", 5, 50)))
    tracker.on_prefilled(P.worker, prefilled(row("r1", 5, 50, attempt=3)))
    tracker.on_step_tokens(P.worker, step(row("r1", 5, 50)))
    tracker.on_step_tokens(D.worker, step(row("nobody", 5, 50), row("r1", 5, None)))
    tracker.on_request_failed(D2.worker, failed("r1", Cause.INTERNAL))
    assert tracker.state("r1") is State.PREFILLING
    assert tracker.ignored == {
        Cause.UNKNOWN: 2,
        Cause.DUPLICATE: 2,
        Cause.STALE: 6,
        Cause.INVALID: 1,
    }


def test_a_gap_in_the_tokens_restarts_with_those_before_it() -> None:
    """Nobody would ever say the one that is missing: its worker may have ended the request already."""
    bench = Bench().to_decoding()
    tracker = bench.tracker
    effects = tracker.on_step_tokens(D.worker, step(row("r1", 7, 52), row("r1", 6, 51), row("r1", 8, 53)))
    assert cancels(effects) == [("uuid-decode-0", 1)] and effects[-1] == Requeue("r1")
    again = tracker.request("r1")
    assert (again.attempt, again.generated_ids) == (2, (50,))
    assert tracker.ignored == {Cause.INCOMPLETE: 1, Cause.STALE: 2}


def test_a_grant_for_another_writer_is_ignored() -> None:
    bench = Bench().to_binding()
    assert bench.tracker.on_granted(D.worker, granted("r1", peer("prefill-9"))) == []
    assert bench.tracker.ignored == {Cause.WRONG_WRITER: 1}


def test_what_a_worker_was_given_follows_the_table() -> None:
    bench = Bench(max_tokens=4)
    tracker = bench.tracker
    assert tracker.assigned() == {}
    bench.to_reserving()
    (held,) = tracker.assigned()[D.worker]
    assert (held.awaits_prefill, held.max_kv_tokens, held.token_loops) == (True, 8, 4 * 2)
    tracker.on_reserved(D.worker, reserved("r1"))
    tracker.bind("r1", P)
    assert tracker.assigned()[P.worker][0].token_loops == 5 * 2
    tracker.on_granted(D.worker, granted("r1", P))
    tracker.on_prefilled(P.worker, prefilled(row("r1", 5, 50)))
    assert P.worker not in tracker.assigned()
    assert tracker.assigned()[D.worker][0].token_loops == 3 * 2
    tracker.cancel("r1")
    assert tracker.assigned() == {}


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    bench = Bench().to_reserving()
    with pytest.raises(IllegalTransition, match="r1 is reserving"):
        bench.tracker.reserve("r1", D2)
    with pytest.raises(IllegalTransition, match="it cannot bind"):
        bench.tracker.bind("r1", P)
    with pytest.raises(IllegalTransition, match="in the table already"):
        bench.tracker.admit(request(), 1.0)
    assert bench.tracker.state("r1") is State.RESERVING


def test_every_state_but_the_last_can_end() -> None:
    assert {state for state, move in TABLE if move is Move.END} == set(State) - {State.ENDED}
    assert not any(state is State.ENDED for state, _ in TABLE)
