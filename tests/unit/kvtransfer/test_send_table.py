"""The sending half, case by case."""

import pytest

from kvtransfer.handoff import SEND_MOVES, Closed, Drained, Ignored, Opened, Refused, SendMove, SendState, advance
from kvtransfer.send_table import SendTable
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey, WorkerId
from loopline.messages import CloseState, PushRange

TARGET = WorkerId("d", 1)
KEY = HandoffKey("r", 1)
NEXT = HandoffKey("r", 2)
FIRST, SECOND = PushRange(0, 0, 3), PushRange(1, 3, 1)


def opened(*pushes: PushRange) -> SendTable:
    table = SendTable()
    assert table.open(KEY, TARGET) == (Opened(KEY),)
    for part in pushes:
        table.posted(KEY, part)
    return table


def test_commit_drains_with_the_last_handle() -> None:
    table = opened(FIRST, SECOND)
    assert table.push_done(KEY, 1) == ()
    assert table.commit(KEY) == ()
    assert table.counts() == (("committed", 1),)
    assert table.pushes(KEY) == (FIRST, SECOND)
    assert table.push_done(KEY, 0) == (Drained(KEY),)
    assert table.counts() == ()
    assert table.close(KEY) == (Closed(KEY, CloseState.CLOSED),)
    assert table.open(KEY, TARGET) == (Refused(KEY, Cause.TOMBSTONED),)


def test_commit_after_the_last_handle_drains_at_once() -> None:
    table = opened(FIRST)
    assert table.push_done(KEY, 0) == ()
    assert table.commit(KEY) == (Drained(KEY),)
    assert table.commit(KEY) == (Ignored(Cause.DUPLICATE),)


def test_close_waits_for_the_handles_and_may_be_asked_again() -> None:
    table = opened(FIRST, SECOND)
    assert table.close(KEY) == ()
    assert table.close_state(KEY) is CloseState.PENDING
    assert not table.may_post(KEY, 2)
    assert table.commit(KEY) == (Ignored(Cause.TOMBSTONED),)
    assert table.push_done(KEY, 0) == ()
    assert table.close(KEY) == ()
    assert table.push_done(KEY, 1) == (Closed(KEY, CloseState.CLOSED),)
    assert table.close(KEY) == (Closed(KEY, CloseState.CLOSED),)


def test_a_committed_handoff_can_be_closed() -> None:
    table = opened(FIRST)
    table.commit(KEY)
    assert table.close(KEY) == ()
    assert table.push_done(KEY, 0) == (Closed(KEY, CloseState.CLOSED),)


def test_a_failed_push_closes_and_the_answer_stays_failed() -> None:
    table = opened(FIRST, SECOND)
    assert table.push_failed(KEY, 0) == ()  # the sibling is still in flight: nothing is free
    assert not table.may_post(KEY, 2)
    assert table.close_state(KEY) is CloseState.PENDING
    assert table.push_done(KEY, 1) == (Closed(KEY, CloseState.FAILED),)
    assert table.close(KEY) == (Closed(KEY, CloseState.FAILED),)
    assert table.close_state(KEY) is CloseState.FAILED
    assert table.state(KEY) is SendState.FAILED
    assert table.open(NEXT, TARGET) == (Opened(NEXT),)
    assert table.close(NEXT) == (Closed(NEXT, CloseState.CLOSED),)
    assert table.close_state(KEY) is CloseState.FAILED


def test_close_of_something_unknown_forbids_it() -> None:
    table = SendTable()
    assert table.close(KEY) == (Closed(KEY, CloseState.CLOSED),)
    assert table.is_tombstoned(KEY)
    assert table.open(KEY, TARGET) == (Refused(KEY, Cause.TOMBSTONED),)
    assert table.open(HandoffKey("r", 0), TARGET) == (Refused(HandoffKey("r", 0), Cause.STALE),)
    assert table.open(NEXT, TARGET) == (Opened(NEXT),)
    assert table.close(KEY) == (Closed(KEY, CloseState.CLOSED),)  # an older close does not reach the newer one
    assert table.may_post(NEXT, 0)
    assert dict(table.ignored()) == {"tombstoned": 1, "stale": 1}


def test_a_newer_generation_closes_the_older() -> None:
    table = opened(FIRST)
    assert table.open(NEXT, TARGET) == (Opened(NEXT),)
    assert table.state(KEY) is SendState.CLOSING
    assert table.open(KEY, TARGET) == (Refused(KEY, Cause.STALE),)
    assert table.open(NEXT, TARGET) == (Refused(NEXT, Cause.DUPLICATE),)
    assert table.push_done(KEY, 0) == (Closed(KEY, CloseState.CLOSED),)
    idle = opened()
    assert idle.open(NEXT, TARGET) == (Closed(KEY, CloseState.CLOSED), Opened(NEXT))


def test_close_reaches_older_generations() -> None:
    table = opened(FIRST)
    assert table.close(NEXT) == (Closed(NEXT, CloseState.CLOSED),)
    assert table.state(KEY) is SendState.CLOSING


def test_handoffs_to_a_process_are_found_in_any_epoch() -> None:
    table = opened()
    table.open(HandoffKey("s", 0), WorkerId("other", 1))
    assert table.keys_to(WorkerId("d", 7)) == (KEY,)


def test_what_the_rules_forbid_raises_and_changes_nothing() -> None:
    table = opened(FIRST)
    with pytest.raises(IllegalTransition, match="posted before"):
        table.posted(KEY, PushRange(0, 3, 1))
    with pytest.raises(IllegalTransition, match="unknown"):
        table.posted(NEXT, FIRST)
    with pytest.raises(IllegalTransition, match="not in flight"):
        table.push_done(KEY, 1)
    with pytest.raises(IllegalTransition, match="not in flight"):
        table.push_failed(NEXT, 0)
    assert table.pushes(KEY) == (FIRST,)
    table.push_done(KEY, 0)
    with pytest.raises(IllegalTransition, match="not in flight"):
        table.push_done(KEY, 0)
    table.commit(KEY)
    with pytest.raises(IllegalTransition):
        table.posted(KEY, SECOND)


def test_every_move_that_is_not_in_the_table_raises() -> None:
    for state, moves in SEND_MOVES.items():
        for move in SendMove:
            if move in moves:
                assert advance(SEND_MOVES, state, move) is moves[move]
            else:
                with pytest.raises(IllegalTransition):
                    advance(SEND_MOVES, state, move)
