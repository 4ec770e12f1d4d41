"""The coordinator's spans: of one request through a cluster of scripted workers, and of one that is recovered."""

from typing import Any

from coordinator.effects import Ending, Outcome
from coordinator.request_traces import RequestTraces
from loopline.identity import Cause, HandoffKey
from loopline.messages import Bind, Cancel, LocalPrefillStarted, Reserve, StartLocalPrefill, StartPrefill
from loopline.request import Route, Timing, Usage
from tests.support.spans import KeptTracing
from tests.unit.coordinator.builders import granted, peer, request, reserved

DECODE, PREFILL = peer("decode-0"), peer("prefill-0")
CLIENT = "the client's"


def reserve(generation: int) -> Reserve:
    return Reserve(HandoffKey("r1", generation), request(), 10.0)


def bind(generation: int) -> Bind:
    return Bind(HandoffKey("r1", generation), PREFILL)


def start(generation: int) -> StartPrefill:
    return StartPrefill(HandoffKey("r1", generation), request(), DECODE, 0, (), 10.0)


def outcome(ending: Ending) -> Outcome:
    return Outcome(
        ending=ending,
        reason=None,
        detail="",
        usage=Usage(prompt_tokens=5, completion_tokens=4, cached_tokens=2),
        timing=Timing(),
        route=Route("prefill-0", "decode-0"),
        stats=None,
    )


def run_attempt(traces: RequestTraces, generation: int) -> Any:
    """Until both workers have it; the StartPrefill as it is sent."""
    traces.stamped(reserve(generation))
    traces.answered(reserved("r1", generation))
    traces.stamped(bind(generation))
    traces.answered(granted("r1", PREFILL, generation))
    return traces.stamped(start(generation))


def test_a_request_that_goes_well() -> None:
    tracing = KeptTracing()
    traces = RequestTraces(tracing)
    traces.admitted(request(), CLIENT)
    assert tracing.open_names == ["request", "queued"]
    sent = traces.stamped(reserve(1))
    traces.answered(reserved("r1", 1))
    traces.stamped(bind(1))
    traces.answered(granted("r1", PREFILL, 1))
    (root,), (attempt,) = tracing.named("request"), tracing.named("attempt")
    assert isinstance(sent, Reserve) and sent.trace == attempt.traceparent
    started = traces.stamped(start(1))
    assert isinstance(started, StartPrefill) and started.trace == attempt.traceparent
    assert tracing.open_names == ["request", "attempt"]
    traces.ended("r1", outcome(Ending.FINISHED))
    assert tracing.open_names == []
    assert root.parent == CLIENT
    assert [(span.name, span.parent) for span in tracing.spans[1:]] == [
        ("queued", root.traceparent),
        ("attempt", root.traceparent),
        ("reserve", attempt.traceparent),
        ("bind", attempt.traceparent),
    ]
    assert [span.error for span in tracing.spans] == [""] * 5
    assert root.attributes["completion_tokens"] == 4 and root.attributes["decode"] == "decode-0"


def test_a_local_prefill_is_a_question_of_its_attempt() -> None:
    tracing, key = KeptTracing(), HandoffKey("r1", 1)
    traces = RequestTraces(tracing)
    traces.admitted(request(), "")
    traces.stamped(reserve(1))
    traces.answered(reserved("r1", 1))
    assert traces.stamped(StartLocalPrefill(key)) == StartLocalPrefill(key)
    assert tracing.open_names == ["request", "attempt", "start_local"]
    traces.answered(LocalPrefillStarted(key))
    (question,), (attempt,) = tracing.named("start_local"), tracing.named("attempt")
    assert (question.parent, question.error) == (attempt.traceparent, "")
    assert tracing.open_names == ["request", "attempt"]


def test_a_recovery_is_a_second_attempt_and_the_first_one_says_why() -> None:
    tracing = KeptTracing()
    traces = RequestTraces(tracing)
    traces.admitted(request(), "")
    run_attempt(traces, 1)
    traces.failed("r1", Cause.PEER_LOST)
    traces.requeued("r1")
    assert tracing.open_names == ["request", "queued"]
    started = run_attempt(traces, 2)
    first, second = tracing.named("attempt")
    assert (first.error, second.has_ended) == ("peer_lost", False)
    assert started.trace == second.traceparent
    traces.ended("r1", outcome(Ending.FINISHED))
    assert (second.error, tracing.named("request")[0].error) == ("", "")
    assert len(tracing.named("queued")) == 2


def test_answers_of_older_generations_change_nothing_and_a_refusal_is_an_error() -> None:
    tracing = KeptTracing()
    traces = RequestTraces(tracing)
    traces.admitted(request(), "")
    traces.stamped(reserve(2))
    traces.answered(reserved("r1", 1))
    assert tracing.open_names == ["request", "attempt", "reserve"]
    traces.answered(reserved("r1", 2, Cause.NO_ROOM))
    assert tracing.named("reserve")[0].error == "no_room"


def test_an_ending_is_an_error_unless_the_client_went_away() -> None:
    errors = {}
    for ending in Ending:
        tracing = KeptTracing()
        traces = RequestTraces(tracing)
        traces.admitted(request(), "")
        traces.ended("r1", outcome(ending))
        assert tracing.open_names == []
        errors[ending] = tracing.named("request")[0].error
    fine = (Ending.FINISHED, Ending.CANCELLED)
    assert errors == {ending: "" if ending in fine else ending.value for ending in Ending}


def test_other_messages_and_untraced_requests_pass_as_they_are() -> None:
    cancel = Cancel(HandoffKey("r1", 1), Cause.CANCELLED)
    for traces in (RequestTraces(), RequestTraces(KeptTracing())):
        for message in (reserve(1), bind(1), start(1), cancel):
            assert traces.stamped(message) is message
        traces.answered(reserved("r1", 1))
        traces.failed("r1", Cause.INTERNAL)
        traces.requeued("r1")
        traces.ended("r1", outcome(Ending.FINISHED))
    untraced = RequestTraces()
    untraced.admitted(request(), CLIENT)
    assert untraced.stamped(start(1)).trace == ""  # type: ignore[union-attr]
