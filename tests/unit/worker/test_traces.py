"""A worker's spans: what the core is told and says decides when they begin and end, and nothing of it is changed."""

from dataclasses import replace

import pytest

from kvtransfer.commands import CloseReport, Command, HandoffDrained, Push, TransferCost
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import (
    Cancel,
    CloseState,
    HandoffStats,
    LocalPrefillStarted,
    Prefilled,
    PushRange,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
    StepTokens,
    TokenRow,
    WorkerMessage,
)
from loopline.request import FinishReason, Request, SamplingParams
from loopline.sched.plan import StepOutcome
from loopline.worker.events import CoordinatorLost
from loopline.worker.traces import WorkerTraces
from tests.support.spans import KeptTracing

KEY = HandoffKey("r1", 1)
REQUEST = Request(request_id="r1", prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=4, loops=5))
TARGET = Peer(WorkerId("d", 1), "decode-0", "h:1")
START = StartPrefill(KEY, REQUEST, TARGET, 0, (), 10.0, "attempt-1")
RESERVE = Reserve(KEY, REQUEST, 10.0, "attempt-1")
PUSH = Push(KEY, PushRange(0, 0, 1), (0,))
STATS = HandoffStats(1, 1, 64, "scripted", 0.1, cached_tokens=2)


class Core:
    """Keeps what it is given."""

    is_draining = False

    def __init__(self) -> None:
        self.taken: list[object] = []

    def handle(self, event: object) -> None:
        self.taken.append(event)

    def stepped(self, outcome: StepOutcome) -> None: ...

    def tick(self) -> None: ...

    def handoffs(self) -> tuple[tuple[str, int], ...]:
        return ()

    def ignored(self) -> tuple[tuple[str, int], ...]:
        return ()

    def known(self) -> tuple[HandoffKey, ...]:
        return (KEY,)


class Bench:
    def __init__(self) -> None:
        self.tracing = KeptTracing()
        traces = WorkerTraces(self.tracing)
        self.inner = Core()
        self.core = traces.core(self.inner)
        self.sent: list[WorkerMessage] = []
        self.submitted: list[Command] = []
        self.send, self.submit = traces.sending(self.sent.append), traces.submitting(self.submitted.append)

    @property
    def errors(self) -> dict[str, str]:
        """Of the spans that have ended."""
        return {span.name: span.error for span in self.tracing.spans if span.has_ended}


def row(position: int, finish: FinishReason | None = None) -> TokenRow:
    return TokenRow("r1", 1, position, 7, 5, finish)


def steps(*rows: TokenRow) -> StepTokens:
    return StepTokens(1, rows)


def test_a_prefill_and_its_handoff() -> None:
    bench = Bench()
    bench.core.handle(START)
    bench.submit(PUSH)
    bench.submit(replace(PUSH, range=PushRange(1, 1, 1)))
    assert bench.tracing.open_names == ["prefill", "handoff"]
    bench.send(Prefilled(KEY, 1, row(3), STATS))
    assert bench.tracing.open_names == ["handoff"]
    bench.core.handle(HandoffDrained(KEY, TransferCost(2, 2, 128, "tcp")))
    prefill, handoff = bench.tracing.spans
    assert (prefill.parent, handoff.parent) == ("attempt-1", "attempt-1")
    assert bench.errors == {"prefill": "", "handoff": ""}
    named = {"request_id": "r1", "tokens": 3, "depth": 5, "attempt": 1, "cached_tokens": 2}
    assert prefill.attributes == named
    cost = {"request_id": "r1", "pushes": 2, "descriptors": 2, "num_bytes": 128, "transport": "tcp"}
    assert handoff.attributes == cost
    assert len(bench.submitted) == 2 and len(bench.sent) == 1 and len(bench.inner.taken) == 2


def test_a_decode_counts_what_its_steps_computed() -> None:
    bench = Bench()
    bench.core.handle(RESERVE)
    bench.send(Reserved(KEY))
    assert bench.tracing.spans == []
    bench.send(steps(row(3)))  # the first token, as the prefill worker computed it
    bench.send(steps(row(4)))
    assert bench.tracing.open_names == ["decode"]
    bench.send(steps(row(5), replace(row(9), request_id="other", finish=FinishReason.STOP)))
    bench.send(steps(row(6, FinishReason.LENGTH)))
    (decode,) = bench.tracing.spans
    assert bench.errors == {"decode": ""}
    assert decode.attributes == {
        "request_id": "r1",
        "depth": 5,
        "attempt": 1,
        "finish": "length",
        "tokens": 3,
        "token_loops": 15,
    }


def test_a_decode_outlives_a_fetch_that_was_given_up_with_nothing_posted() -> None:
    bench = Bench()
    bench.core.handle(RESERVE)
    bench.send(Reserved(KEY))
    bench.send(steps(row(3)))
    bench.core.handle(CloseReport(KEY, CloseState.CLOSED))
    assert bench.tracing.open_names == ["decode"]
    bench.send(steps(row(4, FinishReason.LENGTH)))
    assert bench.errors == {"decode": ""}


@pytest.mark.parametrize(
    ("end", "error"),
    [(RequestFailed(KEY, Cause.TRANSFER_TIMEOUT, "x"), "transfer_timeout"), (Cancel(KEY, Cause.DEADLINE), "deadline")],
)
def test_what_is_given_up_ends_with_its_cause(end: RequestFailed | Cancel, error: str) -> None:
    prefill, decode = Bench(), Bench()
    prefill.core.handle(START)
    decode.core.handle(RESERVE)
    decode.send(steps(row(3)))
    for bench in (prefill, decode):
        if isinstance(end, Cancel):
            bench.core.handle(end)
        else:
            bench.send(end)
    assert prefill.errors == {"prefill": error}
    assert decode.errors == {"decode": error}


def test_a_stop_string_ends_a_decode_without_an_error_and_with_its_counts() -> None:
    bench = Bench()
    bench.core.handle(RESERVE)
    bench.send(steps(row(3)))
    bench.send(steps(row(4)))
    bench.send(steps(row(5)))
    bench.core.handle(Cancel(KEY, Cause.CANCELLED))
    (decode,) = bench.tracing.spans
    assert bench.errors == {"decode": ""}
    counted = {"tokens": 2, "token_loops": 10, "finish": "cancelled"}
    assert decode.attributes == {"request_id": "r1", "depth": 5, "attempt": 1, **counted}


def test_a_decode_worker_that_computes_the_prompt_itself_has_the_prefill() -> None:
    bench = Bench()
    bench.core.handle(RESERVE)
    bench.send(Reserved(KEY, cached_tokens=2))
    for _ in range(2):
        bench.core.handle(StartLocalPrefill(KEY))
    bench.send(LocalPrefillStarted(KEY))
    bench.send(LocalPrefillStarted(KEY, Cause.DUPLICATE))
    assert bench.tracing.open_names == ["prefill"]
    bench.send(steps(row(3)))
    assert bench.tracing.open_names == ["decode"]
    bench.core.handle(StartLocalPrefill(KEY))
    bench.send(steps(row(4, FinishReason.LENGTH)))
    prefill, decode = bench.tracing.spans
    assert (prefill.parent, decode.parent) == ("attempt-1", "attempt-1")
    assert bench.errors == {"prefill": "", "decode": ""}
    named = {"request_id": "r1", "tokens": 3, "depth": 5, "attempt": 1, "cached_tokens": 2}
    assert prefill.attributes == named
    assert (decode.attributes["tokens"], decode.attributes["finish"]) == (1, "length")


def test_a_refused_local_prefill_ends_with_its_cause() -> None:
    bench = Bench()
    bench.core.handle(RESERVE)
    bench.core.handle(StartLocalPrefill(KEY))
    bench.send(LocalPrefillStarted(KEY, Cause.WRONG_WRITER))
    assert bench.errors == {"prefill": "wrong_writer"}


def test_a_cancelled_handoff_ends_with_its_last_handle() -> None:
    bench = Bench()
    bench.core.handle(START)
    bench.submit(PUSH)
    bench.core.handle(Cancel(KEY, Cause.CANCELLED))
    assert bench.tracing.open_names == ["handoff"]
    bench.core.handle(CloseReport(KEY, CloseState.FAILED))
    assert bench.errors == {"prefill": "", "handoff": "failed"}


def test_a_lost_coordinator_ends_all_and_a_refusal_leaves_nothing() -> None:
    bench = Bench()
    bench.core.handle(START)
    bench.core.handle(replace(START, key=HandoffKey("r2", 1)))
    bench.core.handle(CoordinatorLost())
    assert bench.tracing.open_names == []
    refused = Bench()
    refused.core.handle(RESERVE)
    refused.send(Reserved(KEY, cause=Cause.NO_ROOM))
    refused.send(steps(row(3)))
    assert refused.tracing.spans == []


def test_the_same_again_and_older_generations_begin_nothing() -> None:
    bench = Bench()
    newer = replace(START, key=HandoffKey("r1", 2), trace="attempt-2")
    for event in (START, START, newer, START):
        bench.core.handle(event)
    assert [span.parent for span in bench.tracing.spans] == ["attempt-1", "attempt-2"]
    assert bench.tracing.spans[0].error == "stale"
    bench.send(Prefilled(KEY, 1, row(3), STATS))  # of the older one
    assert bench.tracing.open_names == ["prefill"]


def test_what_is_not_traced_leaves_no_span() -> None:
    bench = Bench()
    bench.core.handle(replace(START, trace=""))
    bench.submit(PUSH)
    bench.core.handle(replace(RESERVE, trace="", key=HandoffKey("r2", 1)))
    bench.send(steps(replace(row(3, FinishReason.LENGTH), request_id="r2")))
    assert bench.tracing.spans == []
    assert bench.core.known() == (KEY,)


def test_a_fault_of_tracing_is_logged_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.tracing.start = None  # type: ignore[method-assign,assignment]
    bench.core.handle(START)
    bench.core.handle(replace(RESERVE, key=HandoffKey("r2", 1)))
    bench.send(steps(replace(row(3), request_id="r2")))
    assert len(bench.inner.taken) == 2 and len(bench.sent) == 1
    assert "StartPrefill could not be traced" in caplog.text
