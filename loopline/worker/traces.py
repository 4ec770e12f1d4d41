"""A worker's spans of the requests that the coordinator traces, all made on its engine thread: what comes to the role's
core and what the core sends says where each request is. A worker without an endpoint for spans has none of this.

    prefill   from StartPrefill to the first token             a prefill worker
              from StartLocalPrefill to the first token        a decode worker that computes the prompt itself
    handoff   from the first push until the last one is done   a prefill worker
    fetch     from the first push of cached blocks until the last one is done    a decode worker
    decode    from the first token to the last one             a decode worker
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.commands import CloseReport, Command, HandoffDrained, Push
from loopline.identity import Cause, HandoffKey
from loopline.messages import (
    Cancel,
    CloseState,
    LocalPrefillStarted,
    Prefilled,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
    StepTokens,
    TokenRow,
    WorkerMessage,
)
from loopline.request import Request
from loopline.telemetry.traces import Span, Tracing, Value
from loopline.worker.engine_thread import CoreAround, WorkerCore
from loopline.worker.events import CoordinatorLost

logger = logging.getLogger(__name__)
_MOST_WAYS = 4096
_LOST = "the coordinator was lost"


@dataclass
class _Way:
    """What is traced of one request here. Positions are of its first and its last row so far, on a decode worker."""

    key: HandoffKey
    trace: str
    request: Request
    spans: dict[str, Span] = field(default_factory=dict)
    cached_tokens: int = 0  # on a decode worker
    from_position: int = 0
    last_position: int = 0

    @property
    def depth(self) -> int:
        return self.request.params.loops

    def end_all(self, error: str, **attributes: Value) -> None:
        """End what is open; of a decode with what was computed until now."""
        computed = self.last_position - self.from_position
        counts: dict[str, Value] = {"tokens": computed, "token_loops": computed * self.depth, **attributes}
        for name, span in self.spans.items():
            span.end(error, **(counts if name == "decode" else {}))


class WorkerTraces:
    """Invariant: at most one way for each request, that of the latest generation that is traced; of too many the oldest
    are forgotten."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._ways: OrderedDict[str, _Way] = OrderedDict()
        self._reserved: set[str] = set()  # on a decode worker: no row of it has left yet

    def core(self, core: WorkerCore) -> WorkerCore:
        """The role's logic as the engine thread gets it."""
        return _TracedCore(core, lambda event: self._look(self._before, event))

    def sending(self, send: Callable[[WorkerMessage], None]) -> Callable[[WorkerMessage], None]:
        """`send`, with what it is given looked at first."""

        def look_and_send(message: WorkerMessage) -> None:
            self._look(self._said, message)
            send(message)

        return look_and_send

    def submitting(self, submit: Callable[[Command], None]) -> Callable[[Command], None]:
        """`submit`, with the pushes that it is given looked at first."""

        def look_and_submit(command: Command) -> None:
            if isinstance(command, Push):
                self._look(self._pushes, command)
            submit(command)

        return look_and_submit

    # ---- what the core is told, and what it says

    def _look(self, look: Callable[[Any], None], at: object) -> None:
        """Traces are for people: whatever goes wrong with them is logged, and what is looked at goes its way."""
        try:
            look(at)
        except Exception:
            logger.exception("%s could not be traced", type(at).__name__)

    def _before(self, event: object) -> None:
        match event:
            case StartPrefill(key, request) if event.trace and self._is_news(key):
                self._start_prefill(self._open(key, event.trace, request))
            case Reserve(key, request) if event.trace and self._is_news(key):
                self._open(key, event.trace, request)
                self._reserved.add(key.request_id)
            case StartLocalPrefill(key):
                way = self._way(key)
                if way is not None and not way.spans:
                    self._start_prefill(way)
            case HandoffDrained(key, cost):
                self._pushed(
                    key,
                    "",
                    pushes=cost.pushes,
                    descriptors=cost.descriptors,
                    num_bytes=cost.num_bytes,
                    transport=cost.transport,
                )
            case CloseReport(key, state, _):
                self._pushed(key, state if state is CloseState.FAILED else "")
            case Cancel(key, cause):
                self._cancelled(key, cause)
            case CoordinatorLost():
                for way in list(self._ways.values()):
                    self._end_all(way.key, _LOST)

    def _said(self, message: WorkerMessage) -> None:
        match message:
            case StepTokens():
                self._rows(message.rows)
            case Prefilled():
                self._end(message.key, "prefill", cached_tokens=message.stats.cached_tokens)
            case RequestFailed(key, cause, _):
                self._end_all(key, cause)
            case Reserved(key, cached_tokens, None):
                way = self._way(key)
                if way is not None:
                    way.cached_tokens = cached_tokens
            case Reserved(key, _, cause) | LocalPrefillStarted(key, cause):
                if cause is not None and cause is not Cause.DUPLICATE:
                    self._end_all(key, cause)

    def _pushes(self, push: Push) -> None:
        way = self._way(push.key)
        name = "fetch" if push.key.request_id in self._reserved else "handoff"
        if way is not None and name not in way.spans:
            self._start(way, name)

    def _pushed(self, key: HandoffKey, error: str, **attributes: Value) -> None:
        """The last push has ended: the end of a prefill worker's part, and of a fetch on a decode worker."""
        way = self._way(key)
        if way is None:
            return
        if "fetch" in way.spans:
            self._end(key, "fetch", error, **attributes)
        elif "handoff" in way.spans:  # without either, a fetch was given up that had posted nothing
            self._end(key, "handoff", error, **attributes)
            self._forget(key)

    def _rows(self, rows: tuple[TokenRow, ...]) -> None:
        if not self._ways:
            return
        for row in rows:
            way = self._ways.get(row.request_id)
            if way is None:
                continue
            way.last_position = row.position
            if row.request_id in self._reserved:
                self._reserved.discard(row.request_id)
                way.from_position = row.position
                self._end(way.key, "prefill", cached_tokens=way.cached_tokens)
                self._start(way, "decode", depth=way.depth, attempt=row.attempt)
            if row.finish is not None:
                way.end_all("", finish=row.finish.value)
                self._forget(way.key)

    # ---- books

    def _is_news(self, key: HandoffKey) -> bool:
        way = self._ways.get(key.request_id)
        return way is None or way.key.generation < key.generation

    def _open(self, key: HandoffKey, trace: str, request: Request) -> _Way:
        self._end_all(key, Cause.STALE)
        self._ways[key.request_id] = way = _Way(key, trace, request)
        if len(self._ways) > _MOST_WAYS:
            self._end_all(next(iter(self._ways.values())).key, "forgotten")
        return way

    def _way(self, key: HandoffKey) -> _Way | None:
        way = self._ways.get(key.request_id)
        return way if way is not None and way.key == key else None

    def _start_prefill(self, way: _Way) -> None:
        request = way.request
        self._start(way, "prefill", tokens=request.num_known_tokens, depth=way.depth, attempt=request.attempt)

    def _start(self, way: _Way, name: str, **attributes: Value) -> None:
        way.spans[name] = self._tracing.start(name, way.trace, request_id=way.key.request_id, **attributes)

    def _end(self, key: HandoffKey, name: str, error: str = "", **attributes: Value) -> None:
        way = self._way(key)
        if way is not None and name in way.spans:
            way.spans[name].end(error, **attributes)

    def _cancelled(self, key: HandoffKey, cause: Cause) -> None:
        """This and every older generation; a handoff that is under way ends with its last handle. What the client or
        a stop string ended is no failure."""
        way = self._ways.get(key.request_id)
        if way is None or way.key.generation > key.generation:
            return
        error = "" if cause is Cause.CANCELLED else cause
        if "handoff" in way.spans:
            self._end(way.key, "prefill", error)
        else:
            way.end_all(error, finish=cause.value)
            self._forget(way.key)

    def _end_all(self, key: HandoffKey, error: str) -> None:
        """End what is open of this or an older generation."""
        way = self._ways.get(key.request_id)
        if way is not None and way.key.generation <= key.generation:
            way.end_all(error)
            self._forget(way.key)

    def _forget(self, key: HandoffKey) -> None:
        if self._way(key) is not None:
            del self._ways[key.request_id]
            self._reserved.discard(key.request_id)


class _TracedCore(CoreAround):
    """A `WorkerCore` whose events are looked at first."""

    def __init__(self, core: WorkerCore, before: Callable[[object], None]) -> None:
        super().__init__(core)
        self._before = before

    def handle(self, event: object) -> None:
        self._before(event)
        self._core.handle(event)
