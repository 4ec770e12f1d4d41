"""The receiving half, case by case: each move, each refusal, each way out."""

import pytest

from kvtransfer.handoff import (
    RECEIVE_MOVES,
    Activate,
    AskClose,
    CommitTaken,
    FreeBlocks,
    FreeQuarantined,
    GaveUp,
    Granted,
    Ignored,
    PollToQuiescence,
    Quarantine,
    ReceiveMove,
    ReceiveState,
    Refused,
    StartLocal,
    Tombstones,
    advance,
)
from kvtransfer.receive_table import ReceiveTable
from loopline.errors import IllegalTransition, InvariantBroken
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import CloseState, Commit, PushNotice, PushRange, TokenRow

WRITER = Peer(WorkerId("w", 2), "prefill-0", "host:1")
OTHER = Peer(WorkerId("o", 1), "prefill-1", "host:2")
KEY = HandoffKey("r", 1)
BLOCKS = (7, 8, 9, 3)
FIRST, SECOND = PushRange(0, 2, 3), PushRange(1, 5, 1)


def bound() -> ReceiveTable:
    table = ReceiveTable()
    assert table.reserve(KEY, 2, BLOCKS) == ()
    assert table.bind(KEY, WRITER) == Granted(KEY, WRITER, 2, BLOCKS)
    return table


def commit(*pushes: PushRange, key: HandoffKey = KEY, writer: WorkerId = WRITER.worker) -> Commit:
    return Commit(key, writer, 0, TokenRow(key.request_id, 0, 40, 5, 4), pushes)


def arrive(table: ReceiveTable, part: PushRange, peer: Peer = WRITER, key: HandoffKey = KEY) -> tuple[object, ...]:
    return table.push_arrived(peer.worker.agent_name, PushNotice(key, part))


def test_pushes_then_commit_activates() -> None:
    table = bound()
    assert arrive(table, SECOND) == ()
    assert arrive(table, FIRST) == ()
    assert table.committed(commit(FIRST, SECOND)) == Activate(KEY, commit(FIRST, SECOND), BLOCKS)
    assert table.counts() == ()
    assert table.holders() == {}


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_corrupted_push_is_not_counted_on_and_its_blocks_wait_for_the_writer(is_committed: bool) -> None:
    table, agent = bound(), WRITER.worker.agent_name
    assert table.landing_blocks(agent, PushNotice(KEY, FIRST)) == (7, 8, 9)
    assert table.landing_blocks(OTHER.worker.agent_name, PushNotice(KEY, FIRST)) == ()
    assert arrive(table, FIRST) == ()
    assert table.landing_blocks(agent, PushNotice(KEY, FIRST)) == ()  # a second time
    if is_committed:
        assert table.committed(commit(FIRST, SECOND)) == CommitTaken(KEY)
    assert table.landing_blocks(agent, PushNotice(KEY, SECOND)) == (3,)
    assert table.push_corrupted(PushNotice(KEY, SECOND)) == (
        GaveUp(KEY, Cause.CORRUPTED),
        FreeBlocks(KEY, (7, 8, 9)),
        Quarantine(KEY, (3,), WRITER),
        AskClose(KEY, WRITER),
    )
    assert table.ignored() == (("corrupted", 1),)
    assert table.landing_blocks(agent, PushNotice(KEY, SECOND)) == ()
    assert arrive(table, SECOND) == (Ignored(Cause.DUPLICATE),)  # the same notice again
    assert table.writer_closed(KEY, WRITER.worker, CloseState.CLOSED) == (FreeQuarantined(KEY, (3,)),)
    assert table.landing_blocks(agent, PushNotice(KEY, SECOND)) == ()


def test_commit_then_pushes_activates_with_the_last() -> None:
    table = bound()
    assert table.committed(commit(FIRST, SECOND)) == CommitTaken(KEY)
    assert table.counts() == (("committed", 1),)
    assert arrive(table, FIRST) == ()
    assert arrive(table, SECOND) == (Activate(KEY, commit(FIRST, SECOND), BLOCKS),)


def test_everything_said_twice_or_after_the_end_is_ignored_and_counted() -> None:
    table = bound()
    assert table.bind(KEY, WRITER) == Granted(KEY, WRITER, 2, BLOCKS)
    arrive(table, FIRST)
    assert arrive(table, FIRST) == (Ignored(Cause.DUPLICATE),)
    assert table.committed(commit(FIRST, SECOND)) == CommitTaken(KEY)
    assert table.committed(commit(FIRST, SECOND)) == Ignored(Cause.DUPLICATE)
    assert table.committed(commit(FIRST, PushRange(2, 5, 1))) == Ignored(Cause.INVALID)
    arrive(table, SECOND)
    assert arrive(table, SECOND) == (Ignored(Cause.DUPLICATE),)
    assert table.committed(commit(FIRST, SECOND)) == Ignored(Cause.DUPLICATE)
    assert table.bind(KEY, WRITER) == Refused(KEY, Cause.DUPLICATE)
    assert table.reserve(KEY, 2, (1,)) == (Refused(KEY, Cause.DUPLICATE),)
    assert table.reserve(HandoffKey("r", 0), 2, (1,)) == (Refused(HandoffKey("r", 0), Cause.STALE),)
    assert table.writer_closed(KEY, WRITER.worker, CloseState.CLOSED) == (Ignored(Cause.UNKNOWN),)
    assert dict(table.ignored()) == {"duplicate": 6, "invalid": 1, "stale": 1, "unknown": 1}


@pytest.mark.parametrize(
    ("part", "peer", "cause"),
    [
        (PushRange(1, 4, 2), WRITER, Cause.INVALID),  # overlaps
        (PushRange(0, 5, 1), WRITER, Cause.INVALID),  # the number of another push
        (PushRange(1, 5, 2), WRITER, Cause.INVALID),  # past the end
        (PushRange(1, 1, 1), WRITER, Cause.INVALID),  # before the start
        (PushRange(1, 5, 0), WRITER, Cause.INVALID),  # nothing
        (PushRange(1, 5, 1), OTHER, Cause.WRONG_WRITER),
    ],
)
def test_a_push_that_does_not_fit_is_ignored(part: PushRange, peer: Peer, cause: Cause) -> None:
    table = bound()
    arrive(table, FIRST)
    assert arrive(table, part, peer) == (Ignored(cause),)
    assert table.committed(commit(FIRST, SECOND)) == CommitTaken(KEY)


@pytest.mark.parametrize(
    "pushes",
    [
        (),
        (FIRST,),
        (SECOND,),
        (FIRST, SECOND, PushRange(2, 6, 1)),
        (FIRST, SECOND, PushRange(2, 5, 1)),
        (FIRST, PushRange(0, 5, 1)),
        (PushRange(0, 2, 4),),  # covers, but is not what arrived
        (PushRange(0, 2, 2), PushRange(1, 4, 2)),
    ],
)
def test_a_commit_that_is_not_what_arrived_or_was_lacked_is_not_taken(pushes: tuple[PushRange, ...]) -> None:
    table = bound()
    arrive(table, FIRST)
    assert table.committed(commit(*pushes)) == Ignored(Cause.INCOMPLETE)
    assert table.state(KEY) is ReceiveState.BOUND


def test_a_push_that_the_commit_does_not_list_is_ignored() -> None:
    table = bound()
    table.committed(commit(FIRST, SECOND))
    assert arrive(table, PushRange(0, 2, 1)) == (Ignored(Cause.INVALID),)
    assert arrive(table, PushRange(5, 5, 1)) == (Ignored(Cause.INVALID),)


def test_only_the_bound_writer_may_commit() -> None:
    table = ReceiveTable()
    table.reserve(KEY, 2, BLOCKS)
    assert arrive(table, FIRST) == (Ignored(Cause.WRONG_WRITER),)
    assert table.committed(commit(FIRST, SECOND)) == Ignored(Cause.WRONG_WRITER)
    table.bind(KEY, WRITER)
    assert table.bind(KEY, OTHER) == Refused(KEY, Cause.WRONG_WRITER)
    assert table.committed(commit(FIRST, SECOND, writer=OTHER.worker)) == Ignored(Cause.WRONG_WRITER)
    assert table.committed(commit(FIRST, SECOND, writer=WorkerId("w", 1))) == Ignored(Cause.WRONG_WRITER)


def test_blocks_without_a_writer_are_free_at_once() -> None:
    table = ReceiveTable()
    table.reserve(KEY, 0, BLOCKS)
    assert table.cancel(KEY, Cause.DEADLINE) == (GaveUp(KEY, Cause.DEADLINE), FreeBlocks(KEY, BLOCKS))
    assert table.counts() == ()


def test_cancel_frees_what_arrived_and_quarantines_the_rest() -> None:
    table = bound()
    arrive(table, PushRange(0, 3, 2))
    assert table.cancel(KEY, Cause.CANCELLED) == (
        GaveUp(KEY, Cause.CANCELLED),
        FreeBlocks(KEY, (8, 9)),
        Quarantine(KEY, (7, 3), WRITER),
        AskClose(KEY, WRITER),
    )
    assert table.asks() == (AskClose(KEY, WRITER),)
    assert table.counts() == (("quarantined", 1),)
    assert table.cancel(KEY, Cause.CANCELLED) == ()
    assert table.committed(commit(FIRST, SECOND)) == Ignored(Cause.TOMBSTONED)
    assert arrive(table, PushRange(0, 3, 2)) == (Ignored(Cause.DUPLICATE),)
    assert arrive(table, PushRange(1, 2, 1)) == (FreeQuarantined(KEY, (7,)),)
    assert table.writer_closed(KEY, WRITER.worker, CloseState.PENDING) == ()
    assert table.writer_closed(KEY, OTHER.worker, CloseState.CLOSED) == (Ignored(Cause.WRONG_WRITER),)
    assert table.writer_closed(KEY, WRITER.worker, CloseState.CLOSED) == (FreeQuarantined(KEY, (3,)),)
    assert table.holders() == {}
    assert arrive(table, PushRange(2, 5, 1)) == (Ignored(Cause.TOMBSTONED),)


def test_cancel_of_a_whole_set_without_its_commit_quarantines_nothing() -> None:
    table = bound()
    arrive(table, FIRST)
    arrive(table, SECOND)
    assert table.cancel(KEY, Cause.CANCELLED) == (GaveUp(KEY, Cause.CANCELLED), FreeBlocks(KEY, BLOCKS))


def test_the_last_push_ends_a_quarantine() -> None:
    table = bound()
    table.cancel(KEY, Cause.CANCELLED)
    assert arrive(table, FIRST) == (FreeQuarantined(KEY, (7, 8, 9)),)
    assert arrive(table, SECOND) == (FreeQuarantined(KEY, (3,)),)
    assert table.counts() == ()


def test_a_failed_close_waits_for_the_proven_end_and_for_quiet() -> None:
    table = bound()
    table.cancel(KEY, Cause.TRANSFER_FAILED)
    assert table.writer_closed(KEY, WRITER.worker, CloseState.FAILED) == ()
    assert table.asks() == ()
    assert table.quiesced(WRITER.worker) == ()
    assert table.worker_gone(WRITER.worker, proven=False) == ()
    assert table.worker_gone(WRITER.worker, proven=True) == (PollToQuiescence(WRITER.worker),)
    assert table.state(KEY) is ReceiveState.QUARANTINED
    assert table.quiesced(WRITER.worker) == (FreeQuarantined(KEY, BLOCKS),)
    assert table.quiesced(WRITER.worker) == ()


def test_a_suspected_writer_is_asked_and_a_proven_one_is_not() -> None:
    table = bound()
    assert table.worker_gone(WorkerId("w", 1), proven=False) == ()  # an older epoch than the writer's
    assert table.worker_gone(WRITER.worker, proven=False) == (
        GaveUp(KEY, Cause.PEER_LOST),
        Quarantine(KEY, BLOCKS, WRITER),
        AskClose(KEY, WRITER),
    )
    assert table.writer_closed(KEY, WRITER.worker, CloseState.CLOSED) == (FreeQuarantined(KEY, BLOCKS),)
    other = bound()
    assert other.worker_gone(WorkerId("w", 3), proven=True) == (
        GaveUp(KEY, Cause.PEER_LOST),
        Quarantine(KEY, BLOCKS, WRITER),
        PollToQuiescence(WorkerId("w", 3)),
    )
    assert other.asks() == ()


def test_a_writer_that_is_gone_cannot_be_bound() -> None:
    table = ReceiveTable()
    table.worker_gone(WRITER.worker, proven=False)
    table.reserve(KEY, 0, BLOCKS)
    assert table.bind(KEY, WRITER) == Refused(KEY, Cause.PEER_LOST)
    again = Peer(WorkerId("w", 3), "prefill-0", "host:1")  # the same process under its next epoch
    assert table.bind(KEY, again) == Granted(KEY, again, 0, BLOCKS)


def test_cancel_of_something_unknown_leaves_a_tombstone() -> None:
    table = ReceiveTable()
    assert table.cancel(HandoffKey("r", 3), Cause.CANCELLED) == (Ignored(Cause.UNKNOWN),)
    assert table.is_tombstoned(HandoffKey("r", 3))
    assert table.refusal(HandoffKey("r", 2)) is Cause.STALE
    assert table.reserve(HandoffKey("r", 3), 0, (1,)) == (Refused(HandoffKey("r", 3), Cause.TOMBSTONED),)
    assert table.bind(HandoffKey("r", 3), WRITER) == Refused(HandoffKey("r", 3), Cause.TOMBSTONED)
    assert table.reserve(HandoffKey("r", 4), 0, (1,)) == ()
    assert table.cancel(HandoffKey("r", 3), Cause.CANCELLED) == (Ignored(Cause.UNKNOWN),)
    assert table.state(HandoffKey("r", 4)) is ReceiveState.RESERVED


def test_cancel_reaches_older_generations_and_a_newer_one_gives_up_the_older() -> None:
    table = ReceiveTable()
    table.reserve(HandoffKey("r", 1), 0, (1,))
    newer = HandoffKey("r", 2)
    assert table.reserve(HandoffKey("r", 0), 0, (9,)) == (Refused(HandoffKey("r", 0), Cause.STALE),)
    assert table.reserve(newer, 0, (2,)) == (
        GaveUp(HandoffKey("r", 1), Cause.STALE),
        FreeBlocks(HandoffKey("r", 1), (1,)),
    )
    assert table.cancel(HandoffKey("r", 5), Cause.CANCELLED) == (
        GaveUp(newer, Cause.CANCELLED),
        FreeBlocks(newer, (2,)),
    )


def test_start_local_needs_a_reservation_without_a_writer() -> None:
    table = bound()
    assert table.start_local(KEY) == Refused(KEY, Cause.WRONG_WRITER)
    own = HandoffKey("s", 0)
    table.reserve(own, 0, (1, 2))
    assert table.start_local(own) == StartLocal(own, (1, 2))
    assert table.start_local(own) == Refused(own, Cause.DUPLICATE)
    assert table.bind(own, WRITER) == Refused(own, Cause.DUPLICATE)


@pytest.mark.parametrize("block_ids", [(), (1, 1), (1, 7)])
def test_blocks_that_cannot_be_reserved_raise_and_change_nothing(block_ids: tuple[int, ...]) -> None:
    table = bound()
    before = (table.holders(), table.counts(), table.ignored())
    with pytest.raises(InvariantBroken):
        table.reserve(HandoffKey("r", 2), 0, block_ids)
    assert (table.holders(), table.counts(), table.ignored()) == before
    assert table.refusal(HandoffKey("r", 2)) is None


def test_every_move_that_is_not_in_the_table_raises() -> None:
    for state, moves in RECEIVE_MOVES.items():
        for move in ReceiveMove:
            if move in moves:
                assert advance(RECEIVE_MOVES, state, move) is moves[move]
            else:
                with pytest.raises(IllegalTransition, match=f"{move.value} from {state.value}"):
                    advance(RECEIVE_MOVES, state, move)


def test_tombstones_keep_the_highest_generation_and_forget_the_oldest_request() -> None:
    tombstones = Tombstones(limit=2)
    tombstones.bury(HandoffKey("a", 4), Cause.TOMBSTONED)
    tombstones.bury(HandoffKey("a", 2), Cause.DUPLICATE)
    assert tombstones.cause_for(HandoffKey("a", 4)) is Cause.TOMBSTONED
    assert tombstones.cause_for(HandoffKey("a", 3)) is Cause.STALE
    assert tombstones.cause_for(HandoffKey("a", 5)) is None
    tombstones.bury(HandoffKey("b", 0), Cause.TOMBSTONED)
    tombstones.bury(HandoffKey("c", 0), Cause.TOMBSTONED)
    assert len(tombstones) == 2
    assert tombstones.cause_for(HandoffKey("a", 4)) is None
