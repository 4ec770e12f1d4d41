"""The one place where things happen: queue, router, tracker, registry and streams meet here. One event loop, no locks.

gRPC handlers call in (`submit`, `join`, `on_message`, ...); every call that may make room or work wakes `run`, which
places requests on workers. Timers: one per request (its deadline), one for the leases, one for replies.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from coordinator.clients import Clients
from coordinator.effects import AttemptFailed, Deliver, Effect, End, Ending, Freed, Outcome, Requeue, Send
from coordinator.leases import LeaseTimer
from coordinator.metrics import CoordinatorMetrics
from coordinator.placing import Placer
from coordinator.policies import LeastWork, Policy
from coordinator.prefix_source import SourceRule
from coordinator.queue import RequestQueue
from coordinator.readiness import Readiness
from coordinator.registry import LossReason, Refused, Registry
from coordinator.reply_watch import ReplyWatch
from coordinator.request_traces import RequestTraces
from coordinator.router import Router
from coordinator.snapshot import Backlog, ClusterSnapshot
from coordinator.streams import ClientStream, Taken, WorkerStream
from coordinator.tracker import Tracker
from loopline.clock import Clock
from loopline.errors import DeadlineExceeded, RequestRefused
from loopline.identity import Cause, WorkerId
from loopline.messages import (
    Granted,
    Heartbeat,
    LocalPrefillStarted,
    PairFailed,
    PairReady,
    Prefilled,
    PrefixReport,
    Register,
    RequestFailed,
    Reserved,
    StepTokens,
    TokenRow,
    Welcome,
    WorkerMessage,
)
from loopline.request import Limits, Request, SamplingParams, check_size
from loopline.telemetry.logs import about
from loopline.telemetry.traces import Tracing
from loopline.text import TextStream

_LOG = logging.getLogger(__name__)
_REFUSALS = (Cause.NO_ROOM, Cause.DRAINING)
_PROBE_DEADLINE_S = 60.0


class Dispatcher:
    """Owns every request from `submit` to its end, and every worker from `join` to its loss."""

    def __init__(
        self,
        *,
        clock: Clock,
        epoch: int,
        lease_s: float,
        reply_timeout_s: float,
        peer_share: float,
        sources: SourceRule | None = None,
        queue_limit: int,
        unread_tokens: int,
        limits: Limits,
        rate_floor_bytes_per_s: float | None = None,
        policy: Policy | None = None,
        probe_params: SamplingParams,
        probe_token_id: int,
        tracing: Tracing | None = None,
    ) -> None:
        """`limits.arena_tokens` holds until workers have joined. `policy`: by default the least work.
        `sources`: how it is chosen where what a decode worker lacks of a prompt comes from; by default by estimate.
        `tracing`: where spans go; None: nowhere."""
        self.epoch = epoch
        self.lease_s = lease_s
        self.readiness = Readiness(probe_params, probe_token_id)
        self._clock = clock
        self._limits = limits
        self._most_unread = unread_tokens
        self._most_arena_tokens = 0
        self._tracker = Tracker(clock, reply_timeout_s)
        rule = sources or SourceRule()
        self._registry = Registry(lease_s, rate_floor_bytes_per_s, peer_share, rule)
        self.metrics = CoordinatorMetrics(clock, self._tracker.ignored)
        self._traces = RequestTraces(tracing)
        self._reply_watch = ReplyWatch(self._tracker, self._registry, self._carry_out, reply_timeout_s)
        self._router = Router(policy or LeastWork())
        self._queue = RequestQueue(queue_limit)
        self._placer = Placer(clock, self._tracker, self._queue, self._router, self._carry_out, rule)
        self._workers: dict[WorkerId, WorkerStream] = {}
        self._clients = Clients(unread_tokens, self._on_deadline)
        self._leases = LeaseTimer(clock, lease_s, self._registry.next_expiry_s, self._lose_expired)
        self._wake = asyncio.Event()
        self._draining = False

    # ---- questions --------------------------------------------------------------------------------------------------

    @property
    def ignored(self) -> Counter[Cause]:
        """Messages of workers that changed nothing, by cause."""
        return self._tracker.ignored

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return self._tracker.num_running()

    def snapshot(self) -> ClusterSnapshot:
        return self._registry.snapshot(self._clock.now_s(), self._tracker.assigned())

    def backlog(self) -> Backlog:
        first = next(iter(self._queue), None)
        request = None if first is None else self._tracker.request(first)
        return Backlog(request, len(self._queue), len(self._tracker.awaiting_prefill()))

    def membership(self) -> ClusterSnapshot:
        """A snapshot without requests: what it costs does not grow with them."""
        return self._registry.snapshot(self._clock.now_s(), {})

    def _limits_of(self, snapshot: ClusterSnapshot) -> Limits:
        """What a request is checked against: the arena counts once a request could run. The largest that was ever
        seen counts: a worker that left or was lost may come back."""
        self._most_arena_tokens = max(self._most_arena_tokens, snapshot.arena_tokens() or 0)
        most = self._most_arena_tokens
        return replace(self._limits, arena_tokens=most) if most else self._limits

    # ---- clients ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hold_place(self) -> Iterator[None]:
        """Hold a place in the queue for a request that is being read, so that its refusal costs nothing more. Raises
        what `submit` would raise of any request: RequestRefused while draining, Overloaded."""
        self._require_open()
        self._queue.hold_place(self._clock.now_s())
        try:
            yield
        finally:
            self._queue.give_place_back()

    def _require_open(self) -> None:
        if self._draining:
            raise RequestRefused("the coordinator is shutting down and takes no new requests; 0 tokens were delivered")

    def submit(
        self,
        request: Request,
        deadline_s: float,
        decoder: TextStream | None,
        priority: int = 0,
        traceparent: str = "",
    ) -> ClientStream:
        """Queue a request whose values were checked; its size is checked here. `traceparent`: the client's, "" if none.

        Raises RequestError, Overloaded, DeadlineExceeded where it has none left, or RequestRefused while draining; then
        nothing is kept.
        """
        self._require_open()
        if deadline_s <= 0:
            raise DeadlineExceeded("deadline passed; 0 tokens were delivered")
        check_size(request, self._limits_of(self.membership()))
        self._queue.put(request.request_id, self._clock.now_s(), priority)
        self.metrics.admitted(request.request_id)
        self._traces.admitted(request, traceparent)
        return self._admit(request, deadline_s, decoder)

    def cancel(self, request_id: str) -> None:
        """The client went away. Nothing happens where the request has ended."""
        if request_id in self._tracker:
            self._carry_out(self._tracker.cancel(request_id))

    def not_read(self, request_id: str, detail: str) -> None:
        """The client does not take its answer. Nothing happens where the request has ended."""
        self._carry_out(self._tracker.give_up(request_id, Ending.UNREAD, detail))

    async def drain(self, limit_s: float) -> None:
        """Take no new requests, let those that are here finish within the limit, then end the rest."""
        self._draining = True
        self.readiness.close()
        try:
            async with asyncio.timeout(limit_s):
                await self._clients.wait_none()
        except TimeoutError:
            for request_id in self._clients.ids():
                self._carry_out(self._tracker.give_up(request_id, Ending.LEAVING, "the coordinator is shutting down"))

    def _admit(self, request: Request, deadline_s: float, decoder: TextStream | None) -> ClientStream:
        self._tracker.admit(request, deadline_s)
        stream = self._clients.open(request.request_id, deadline_s, decoder)
        self._wake.set()
        self._reply_watch.start()
        return stream

    def _on_deadline(self, request_id: str) -> None:
        self._carry_out(self._tracker.deadline(request_id))

    # ---- workers ----------------------------------------------------------------------------------------------------

    def join(self, register: Register) -> WorkerStream | Refused:
        """Take a worker in; its stream begins with Welcome."""
        joined = self._registry.join(register, self._clock.now_s())
        if isinstance(joined, Refused):
            return joined
        _LOG.info("worker %s joined (%s, pid %d)", register.peer.name, register.role, register.pid)
        if joined.superseded is not None:
            self.lose(joined.superseded, LossReason.REPLACED)
        self._workers[register.peer.worker] = stream = WorkerStream()
        stream.send(Welcome(self.epoch, self.lease_s))
        self._carry_out((*joined.commands, *self._router.joined(register, self._clock.now_s())))
        self._leases.arm()
        return stream

    def lose(self, worker: WorkerId, reason: LossReason, why: str = "") -> None:
        """The worker is gone, or must be taken to be; REAPED is the proof. `why`: what else the log should say. May be
        called again."""
        name = self._registry.name(worker)
        if self._registry.is_missed(worker) and not self._draining:
            _LOG.warning("worker %s is lost: %s", name, why or reason)
            self.metrics.worker_lost(reason)
        proven, lapsed = reason is LossReason.REAPED, reason is LossReason.LEASE
        commands = self._registry.lose(worker, proven=proven, lapsed=lapsed)
        self._router.lost(worker)
        stream = self._workers.pop(worker, None)
        if stream is not None:
            stream.close()
        self._carry_out(commands)
        left = self._registry.has_left(worker)
        self._carry_out(self._tracker.on_worker_lost(worker, name, left=left))
        self._wake.set()

    def drain_worker(self, name: str, limit_s: float) -> WorkerId:
        """Have a worker finish within the limit and leave. Raises OperatorError where no such worker lives."""
        order = self._registry.drain(name, limit_s)
        self._carry_out((order,))
        return order.worker

    def on_ended(self, uuids: Iterable[str]) -> None:
        """A launcher reaped these processes, now or under an earlier coordinator."""
        for process in uuids:
            for worker in self._registry.lives_with(process):
                self.lose(worker, LossReason.REAPED)
            self._carry_out(self._registry.prove(process))

    def on_message(self, worker: WorkerId, message: WorkerMessage, coordinator_epoch: int) -> None:
        """Take one message of an attached worker; of another epoch or a lost worker: ignored and counted."""
        if coordinator_epoch != self.epoch or worker not in self._registry:
            self.ignored[Cause.STALE] += 1
            return
        match message:
            case Heartbeat():
                self.readiness.heartbeat()
                self._carry_out(self._registry.heartbeat(worker, message, self._clock.now_s()))
            case PairReady():
                if not self._registry.pair_ready(worker, message):
                    self.ignored[Cause.UNKNOWN] += 1
            case PairFailed():
                self._registry.pair_failed(worker, message)
            case PrefixReport():
                self._carry_out(self._router.reported(worker, message, self._clock.now_s()))
            case Register():
                self.ignored[Cause.DUPLICATE] += 1
            case _:
                self._on_request_message(worker, message)
        if not isinstance(message, StepTokens):
            self._wake.set()

    def _on_request_message(
        self,
        worker: WorkerId,
        message: Reserved | Granted | LocalPrefillStarted | Prefilled | StepTokens | RequestFailed,
    ) -> None:
        if isinstance(message, Reserved | Granted | RequestFailed) and message.cause in _REFUSALS:
            self._registry.refused(worker)
        if isinstance(message, Reserved | Granted | LocalPrefillStarted):
            self._traces.answered(message)
        match message:
            case Reserved():
                effects = self._tracker.on_reserved(worker, message)
            case Granted():
                effects = self._tracker.on_granted(worker, message)
            case LocalPrefillStarted():
                effects = self._tracker.on_local_started(worker, message)
            case Prefilled():
                effects = self._tracker.on_prefilled(worker, message)
            case StepTokens():
                effects = self._tracker.on_step_tokens(worker, message)
            case RequestFailed():
                effects = self._tracker.on_request_failed(worker, message)
        self._carry_out(effects)

    def close_workers(self) -> None:
        """End every worker's stream: this coordinator is leaving."""
        for stream in self._workers.values():
            stream.close()

    def count_garbage(self) -> None:
        """A worker sent something that is no message."""
        self.ignored[Cause.INVALID] += 1

    def _lose_expired(self) -> None:
        for worker in self._registry.expired(self._clock.now_s()):
            self.lose(worker, LossReason.LEASE)

    # ---- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry effects out in order, with those that they cause. Placing is woken by those that may make room."""
        left = deque(effects)
        while left:
            effect = left.popleft()
            match effect:
                case Send(worker, message):
                    if worker in self._workers:  # a lost worker's requests are restarted, not told
                        self._workers[worker].send(self._traces.stamped(message))
                case Deliver(request_id, row):
                    self._see_token()
                    self.metrics.token(request_id)
                    left.extend(self._deliver(request_id, row))
                case AttemptFailed(request_id, cause, detail):
                    self._router.failed(effect, self._clock.now_s(), self._registry.name)
                    _LOG.warning("an attempt failed: %s", detail, extra=about(request_id))
                    self.metrics.attempt_failed(cause)
                    self._traces.failed(request_id, cause)
                case Freed():
                    self._wake.set()
                case Requeue(request_id):
                    self._put_back(request_id)
                    self._traces.requeued(request_id)
                case End(request_id, outcome):
                    self._end(request_id, outcome)

    def _deliver(self, request_id: str, row: TokenRow) -> list[Effect]:
        match self._clients[request_id].push(row):
            case Taken.STOPPED:
                return self._tracker.stop(request_id)
            case Taken.UNREAD:
                detail = f"the client has left more than {self._most_unread} tokens unread"
                return self._tracker.give_up(request_id, Ending.UNREAD, detail)
            case Taken.OPEN:
                return []

    def _end(self, request_id: str, outcome: Outcome) -> None:
        if request_id != self.readiness.probe_id:  # no client asked for that one
            self.metrics.ended(request_id, outcome)
            self._traces.ended(request_id, outcome)
            text, route = "%s after %d tokens; prefilled by %s, decoded by %s", outcome.route
            numbers = outcome.ending, outcome.usage.completion_tokens
            _LOG.info(text, *numbers, route.prefill or "nobody", route.decode or "nobody", extra=about(request_id))
        self._wake.set()
        self._queue.remove(request_id, self._clock.now_s())
        self._placer.ended(request_id)
        self._clients.end(request_id, outcome)
        if request_id == self.readiness.probe_id and self.readiness.probe_ended(outcome):
            self._see_token()

    def _see_token(self) -> None:
        """A token has come through."""
        if not self.readiness.serving:
            self.readiness.token_came(self._registry.can_serve)

    def _probe_if_needed(self) -> None:
        probe = self.readiness.look(self._registry.can_serve)
        if probe is not None:
            self._admit(probe, _PROBE_DEADLINE_S, None)
            self._put_back(probe.request_id)

    def _put_back(self, request_id: str) -> None:
        self._queue.put_back(request_id, self._tracker.order(request_id), self._clock.now_s())
        self._wake.set()

    # ---- placing ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Place requests whenever something changed. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._probe_if_needed()
            awaiting = self._tracker.awaiting_prefill()
            if awaiting or len(self._queue):
                snapshot = self.snapshot()
                self._placer.place(awaiting, snapshot, self._limits_of(snapshot), self.readiness.probe_id)
