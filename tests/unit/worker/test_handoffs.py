"""Both roles' cores where a handoff goes wrong: commits that are lost, refused or wrong, writers that do not answer,
grants that do not fit. Real engines and copies, one thread, every message delivered by the test."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.commands import Close, Quiesce, Quiesced
from loopline.engine.engine import Engine
from loopline.identity import BlockRun, Cause, HandoffKey
from loopline.kv.block_pool import ids_of
from loopline.messages import (
    Bind,
    Cancel,
    Commit,
    CommitAnswer,
    Granted,
    PeerGone,
    Prefilled,
    RequestFailed,
    Reserve,
    StartPrefill,
    StepTokens,
)
from loopline.request import FinishReason, Request, SamplingParams
from loopline.worker.deadlines import ASK_AGAIN_S
from loopline.worker.events import BeginDrain, CommitAnswered, CommitReceived, CommitUndelivered
from tests.support.pair import PUSH_TIMEOUT_S, Pair, make_engines
from tests.unit.worker.clocks import OwnClock

KEY = HandoffKey("r", 1)
NAMES = itertools.count()


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    return make_engines(decode_shares=False)  # the same prompt again and again, and always the whole of it


@pytest.fixture(params=[False])
def pair(engines: tuple[Engine, Engine], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair; after the test every block of both is free, once what was left was cancelled. `param`: whether pushes
    carry digests."""
    made = Pair(*engines, name=f"unit{next(NAMES)}", clock=OwnClock(), verify=request.param)
    yield made
    for core in (made.decode, made.prefill):
        core.handle(Cancel(KEY, Cause.CANCELLED))
    made.settle()
    made.audit()
    for engine in engines:
        assert engine.ledger.num_free_blocks == engine.ledger.total_blocks
    assert made.prefill.handoffs() == made.decode.handoffs() == ()
    made.close()


def request() -> Request:
    return Request(request_id="r", prompt_ids=tuple(range(9)), params=SamplingParams(max_tokens=3, loops=4))


def grant(pair: Pair) -> Granted:
    pair.decode.handle(Reserve(KEY, request(), 600.0))
    pair.decode.handle(Bind(KEY, pair.prefill_peer))
    granted = pair.channels.from_decode.pop()
    assert isinstance(granted, Granted) and granted.cause is None
    return granted


def prefill(pair: Pair) -> Commit:
    """Everything up to the commit, which is on its way; all pushes have landed and the handoff has drained."""
    start(pair)
    while pair.deliver_prefill_events() or pair.deliver_decode_events():
        pass
    assert isinstance(pair.channels.from_prefill.pop(), Prefilled)
    (commit,) = pair.channels.commits
    return commit


def failure(pair: Pair) -> RequestFailed:
    (failed,) = pair.channels.from_prefill
    assert isinstance(failed, RequestFailed) and failed.key == KEY
    return failed


def start(pair: Pair) -> tuple[int, ...]:
    """Everything up to the landing of all pushes, whose notices are on their way; the target's blocks."""
    granted = grant(pair)
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, granted.first_block, granted.runs, 60.0))
    while pair.step_prefill():
        pass
    while pair.carry_out_command() or pair.poll_receiver() or pair.poll_sender():
        pass
    return tuple(ids_of(granted.runs))


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_a_push_whose_bytes_were_changed_fails_its_request_alone(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    block_ids = start(pair)
    pair.decode_engine.arena.tensor[block_ids[1]].view(-1)[3] += 1.0  # of three blocks in two pushes
    pair.channels.from_decode.clear()
    while pair.deliver_decode_events():
        pass
    (failed,) = pair.channels.from_decode
    assert isinstance(failed, RequestFailed)
    assert (failed.key, failed.cause) == (KEY, Cause.CORRUPTED)
    words = "push 0 (blocks 0 to 1 of the request) arrived with other bytes than were sent"
    assert failed.detail == words
    assert f"generation 1: {words}" in caplog.text
    assert dict(pair.decode.ignored())["corrupted"] == 1
    assert pair.decode.handoffs() == (("quarantined", 1),)
    pair.settle()  # the writer closes the handoff, and its blocks are free
    assert pair.decode.handoffs() == ()
    assert pair.decode_engine.ledger.counts().quarantined == 0


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_pushes_whose_bytes_are_right_count(pair: Pair) -> None:
    start(pair)
    pair.settle()
    tokens = [
        row.token_id for message in pair.channels.from_decode if isinstance(message, StepTokens) for row in message.rows
    ]
    assert len(tokens) == 3
    assert dict(pair.decode.ignored()).get("corrupted") is None


def test_an_undelivered_commit_fails_the_request_although_the_handoff_drained(pair: Pair) -> None:
    prefill(pair)
    assert pair.prefill.handoffs() == (("committed", 1),)  # a drain waits for the answer
    pair.lose_commit()
    assert failure(pair).cause is Cause.PEER_LOST
    assert pair.prefill.handoffs() == ()


@pytest.mark.parametrize("cause", [Cause.INCOMPLETE, Cause.WRONG_WRITER, Cause.INVALID, Cause.UNKNOWN])
def test_a_refused_commit_fails_the_request(pair: Pair, cause: Cause) -> None:
    prefill(pair)
    pair.prefill.handle(CommitAnswered(KEY, cause, "decode-0"))
    failed = failure(pair)
    assert failed.cause is Cause.TRANSFER_FAILED
    assert failed.detail == f"decode-0 did not take the commit: {cause}"


@pytest.mark.parametrize("cause", [None, Cause.DUPLICATE, Cause.TOMBSTONED, Cause.STALE])
def test_a_taken_or_outdated_commit_fails_nothing(pair: Pair, cause: Cause | None) -> None:
    prefill(pair)
    pair.prefill.handle(CommitAnswered(KEY, cause, "decode-0"))
    assert not pair.channels.from_prefill
    assert pair.prefill.handoffs() == ()


def test_an_undelivered_commit_ends_what_is_still_in_flight(pair: Pair) -> None:
    granted = grant(pair)
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, 0, granted.runs, 60.0))
    assert pair.prefill.handoffs() == (("open", 1),)
    while pair.step_prefill():
        pass
    assert pair.prefill.handoffs() == (("committed", 1),)
    pair.channels.from_prefill.clear()
    pair.prefill.handle(CommitUndelivered(KEY, "gone"))
    assert failure(pair).cause is Cause.PEER_LOST
    assert pair.prefill.handoffs() == (("closing", 1),)


def test_a_grant_that_does_not_fit_is_a_bug_of_ours(pair: Pair) -> None:
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, 0, (BlockRun(0, 1),), 60.0))
    assert failure(pair).cause is Cause.INTERNAL  # INVALID would blame the client and end the request for good


@pytest.mark.parametrize(
    "fault", ["finish", "no token", "request id", "attempt", "token's attempt", "position", "depth"]
)
def test_a_wrong_commit_is_invalid_and_changes_nothing(pair: Pair, fault: str) -> None:
    good = prefill(pair)
    token = good.token
    wrong = {
        "finish": replace(good, token=replace(token, finish=FinishReason.STOP)),
        "no token": replace(good, token=replace(token, token_id=None)),
        "request id": replace(good, token=replace(token, request_id="other")),
        "attempt": replace(good, attempt=good.attempt + 1),
        "token's attempt": replace(good, token=replace(token, attempt=token.attempt + 1)),
        "position": replace(good, token=replace(token, position=token.position + 1)),
        "depth": replace(good, token=replace(token, depth=token.depth + 1)),
    }[fault]
    answers: list[CommitAnswer] = []
    before = pair.decode_engine.ledger.counts()
    pair.decode.handle(CommitReceived(wrong, answers.append))
    assert answers == [CommitAnswer(Cause.INVALID)]
    assert pair.decode_engine.ledger.counts() == before
    assert pair.decode.handoffs() == (("bound", 1),)
    assert dict(pair.decode.ignored())["invalid"] == 1
    assert pair.deliver_commit() == [CommitAnswer()]  # the right one is still taken
    pair.settle()
    rows = [row for message in pair.channels.from_decode if isinstance(message, StepTokens) for row in message.rows]
    assert len(rows) == 3 and rows[-1].finish is FinishReason.LENGTH


def test_writers_are_asked_again_until_they_have_closed(pair: Pair) -> None:
    clock = pair.clock
    assert isinstance(clock, OwnClock)
    grant(pair)
    pair.decode.handle(Cancel(KEY, Cause.CANCELLED))
    pair.decode.tick()
    pair.channels.closes.clear()
    pair.decode.tick()
    assert pair.channels.closes == []  # not with every tick
    for _ in range(3):
        clock.time_s += ASK_AGAIN_S
        pair.decode.tick()
    assert pair.channels.closes == [KEY] * 3
    pair.settle()
    pair.channels.closes.clear()
    clock.time_s += ASK_AGAIN_S
    pair.decode.tick()
    assert pair.channels.closes == []


def test_the_coordinator_hears_of_what_a_gone_writer_left_unfinished_and_of_nothing_else(pair: Pair) -> None:
    grant(pair)
    for proven in (False, True):
        pair.decode.handle(PeerGone(pair.prefill_peer.worker, proven=proven))
    (said,) = [each for each in pair.channels.from_decode if isinstance(each, RequestFailed)]
    assert (said.key, said.cause) == (KEY, Cause.PEER_LOST)


def test_a_gone_writer_is_not_asked_but_polled_to_quiescence(pair: Pair) -> None:
    clock = pair.clock
    assert isinstance(clock, OwnClock)
    grant(pair)
    pair.decode.handle(PeerGone(pair.prefill_peer.worker, proven=True))
    assert list(pair.channels.decode_commands) == [Quiesce(pair.prefill_peer.worker)]
    pair.channels.closes.clear()
    clock.time_s += ASK_AGAIN_S
    pair.decode.tick()
    assert pair.channels.closes == []
    assert pair.decode_engine.ledger.counts().quarantined
    pair.decode.handle(Quiesced(pair.prefill_peer.worker))
    assert not pair.decode_engine.ledger.counts().quarantined


def test_draining_takes_nothing_new(pair: Pair) -> None:
    for core in (pair.prefill, pair.decode):
        assert not core.is_draining
        core.handle(BeginDrain())
        assert core.is_draining
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, 0, (BlockRun(0, 3),), 60.0))
    assert failure(pair).cause is Cause.DRAINING
    assert not any(isinstance(command, Close) for command in pair.channels.commands)


def test_a_notice_that_was_lost_costs_the_push_timeout(pair: Pair) -> None:
    """The commit is there and a push never shows: the coordinator hears of it, and the writer has ended."""
    clock = pair.clock
    assert isinstance(clock, OwnClock)
    granted = grant(pair)
    assert pair.decode.known() == (KEY,)
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, granted.first_block, granted.runs, 600.0))
    assert pair.prefill.known() == (KEY,)
    while pair.step_prefill() or pair.carry_out_command() or pair.poll_receiver() or pair.poll_sender():
        pass
    pair.channels.decode_events.popleft()
    while pair.deliver_prefill_events() or pair.deliver_decode_events():
        pass
    assert pair.prefill.known() == ()
    assert pair.deliver_commit() == [CommitAnswer()]
    assert pair.decode.handoffs() == (("committed", 1),)
    clock.time_s += PUSH_TIMEOUT_S - 0.1
    pair.decode.tick()
    assert pair.decode.handoffs() == (("committed", 1),)
    clock.time_s += 0.1
    pair.decode.tick()
    failed = pair.channels.from_decode.pop()
    assert isinstance(failed, RequestFailed) and failed.cause is Cause.TRANSFER_TIMEOUT
    assert failed.detail == "its pushes have not all arrived within 60 s after the commit"
    assert pair.decode.handoffs() == (("quarantined", 1),) and pair.decode.known() == ()
    assert pair.decode_engine.ledger.counts().quarantined
    pair.settle()
    assert pair.decode.handoffs() == () and not pair.decode_engine.ledger.counts().quarantined


def test_a_handoff_that_became_a_running_request_has_no_such_limit(pair: Pair) -> None:
    clock = pair.clock
    assert isinstance(clock, OwnClock)
    granted = grant(pair)
    pair.prefill.handle(StartPrefill(KEY, request(), pair.decode_peer, granted.first_block, granted.runs, 600.0))
    while pair.step_prefill():
        pass
    assert pair.deliver_commit() == [CommitAnswer()]  # before any push
    while pair.carry_out_command() or pair.poll_receiver() or pair.deliver_decode_events():
        pass
    assert pair.decode.known() == (KEY,) and pair.decode.handoffs() == ()
    pair.channels.from_decode.clear()
    clock.time_s += PUSH_TIMEOUT_S
    pair.decode.tick()
    assert not any(isinstance(message, RequestFailed) for message in pair.channels.from_decode)
