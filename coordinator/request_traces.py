"""The coordinator's spans of each request. The dispatcher says what happens; nothing is kept where nobody traces.

request (from arrival to end; its parent is the client's)
 |- queued                          until a decode worker is asked; again after each attempt that came to nothing
 |- attempt                         from that question to its end, by a new one for every recovery
 |   |- reserve, bind, start_local  the decode worker's answers: to reserve, then to one of the others
 |   '- prefill, handoff, decode    the workers' own spans
"""

from dataclasses import dataclass, replace

from coordinator.effects import Ending, Outcome
from loopline.messages import (
    Bind,
    CoordinatorMessage,
    Granted,
    LocalPrefillStarted,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
)
from loopline.request import Request
from loopline.telemetry.traces import Span, Tracing

_QUESTIONS = {Reserve: "reserve", Bind: "bind", StartLocalPrefill: "start_local"}
_NO_FAULT = (Ending.FINISHED, Ending.CANCELLED)


@dataclass
class _Way:
    """One request's open spans. `question`: to the decode worker, while it is not answered."""

    request: Span
    queued: Span | None = None
    attempt: Span | None = None
    question: Span | None = None
    generation: int = 0
    failure: str = ""  # of the attempt

    def end_attempt(self) -> None:
        for span in (self.queued, self.question, self.attempt):
            if span is not None:
                span.end(self.failure)
        self.queued = self.question = self.attempt = None
        self.failure = ""


class RequestTraces:
    """Invariant: a request that was `admitted` has open spans until it has `ended`; others have none."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """`tracing` None: nobody traces."""
        self._tracing = tracing
        self._ways: dict[str, _Way] = {}

    def admitted(self, request: Request, parent: str) -> None:
        """A client's request was let in; `parent` is the traceparent that came with it."""
        if self._tracing is None:
            return
        params = request.params
        span = self._tracing.start(
            "request",
            parent,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            max_tokens=params.max_tokens,
            depth=params.loops,
        )
        self._ways[request.request_id] = way = _Way(span)
        self._wait(way)

    def stamped(self, message: CoordinatorMessage) -> CoordinatorMessage:
        """A message as it goes to a worker: with the context of its attempt, where it is about one that is traced."""
        if self._tracing is None or not isinstance(message, Reserve | Bind | StartLocalPrefill | StartPrefill):
            return message
        way = self._ways.get(message.key.request_id)
        if way is None:
            return message
        if isinstance(message, Reserve):
            if way.queued is not None:
                way.queued.end()
                way.queued = None
            numbers = {"attempt": message.request.attempt, "generation": message.key.generation}
            way.attempt = self._tracing.start("attempt", way.request.traceparent, **numbers)
            way.generation = message.key.generation
        if way.attempt is None:
            return message
        if isinstance(message, StartPrefill):
            return replace(message, trace=way.attempt.traceparent)
        way.question = self._tracing.start(_QUESTIONS[type(message)], way.attempt.traceparent)
        return replace(message, trace=way.attempt.traceparent) if isinstance(message, Reserve) else message

    def answered(self, message: Reserved | Granted | LocalPrefillStarted) -> None:
        """A decode worker's answer has come; of an older generation it changes nothing."""
        way = self._ways.get(message.key.request_id)
        if way is not None and way.question is not None and way.generation == message.key.generation:
            way.question.end(message.cause or "")
            way.question = None

    def failed(self, request_id: str, cause: str) -> None:
        """The attempt cannot go on."""
        way = self._ways.get(request_id)
        if way is not None:
            way.failure = cause

    def requeued(self, request_id: str) -> None:
        """It waits for workers again."""
        way = self._ways.get(request_id)
        if way is not None:
            way.end_attempt()
            self._wait(way)

    def ended(self, request_id: str, outcome: Outcome) -> None:
        """The request is over."""
        way = self._ways.pop(request_id, None)
        if way is None:
            return
        is_fault = outcome.ending not in _NO_FAULT
        way.failure = way.failure or (outcome.ending.value if is_fault else "")
        way.end_attempt()
        way.request.end(
            outcome.ending.value if is_fault else "",
            ending=outcome.ending.value,
            completion_tokens=outcome.usage.completion_tokens,
            cached_tokens=outcome.usage.cached_tokens,
            prefill=outcome.route.prefill,
            decode=outcome.route.decode,
        )

    def _wait(self, way: _Way) -> None:
        if self._tracing is not None:
            way.queued = self._tracing.start("queued", way.request.traceparent)
