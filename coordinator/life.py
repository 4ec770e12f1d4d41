"""The life of one request: a transition table, and the record that walks through it. No I/O; the tracker calls it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from coordinator.effects import Assigned, Ending, Outcome
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import HandoffStats
from loopline.request import FinishReason, PrefixSource, Request, Route, Timing, Usage


class State(StrEnum):
    """Where a request is."""

    QUEUED = "queued"  # no worker knows it
    RESERVING = "reserving"  # Reserve went to a decode worker
    RESERVED = "reserved"  # blocks are held there; a prefill worker with room is waited for
    BINDING = "binding"  # Bind went to the decode worker
    PREFILLING = "prefilling"  # blocks were granted, StartPrefill went to the prefill worker
    STARTING_LOCAL = "starting_local"  # StartLocalPrefill went to the decode worker
    PREFILLING_LOCALLY = "prefilling_locally"  # it computes the prompt itself
    DECODING = "decoding"  # at least one token of this attempt is known
    ENDED = "ended"


class Move(StrEnum):
    """What moves it."""

    RESERVE = "reserve"
    HOLD = "hold"
    BIND = "bind"
    GRANT = "grant"
    START_LOCAL = "start_local"
    STARTED = "started"
    TOKEN = "token"
    REQUEUE = "requeue"
    END = "end"


LOCAL = (State.STARTING_LOCAL, State.PREFILLING_LOCALLY)
"""The decode worker has the prompt to compute."""
_ON_WORKERS = (State.RESERVING, State.RESERVED, State.BINDING, State.PREFILLING, *LOCAL, State.DECODING)
TABLE: dict[tuple[State, Move], State] = {
    (State.QUEUED, Move.RESERVE): State.RESERVING,
    (State.RESERVING, Move.HOLD): State.RESERVED,
    (State.RESERVED, Move.BIND): State.BINDING,
    (State.BINDING, Move.GRANT): State.PREFILLING,
    (State.RESERVED, Move.START_LOCAL): State.STARTING_LOCAL,
    (State.STARTING_LOCAL, Move.STARTED): State.PREFILLING_LOCALLY,
    (State.PREFILLING, Move.TOKEN): State.DECODING,
    (State.STARTING_LOCAL, Move.TOKEN): State.DECODING,  # the token shows what the lost answer would have said
    (State.PREFILLING_LOCALLY, Move.TOKEN): State.DECODING,
    (State.DECODING, Move.TOKEN): State.DECODING,
    **{(state, Move.REQUEUE): State.QUEUED for state in _ON_WORKERS},
    **{(state, Move.END): State.ENDED for state in (State.QUEUED, *_ON_WORKERS)},
}


_ASKED: Mapping[State, str] = MappingProxyType(
    {State.RESERVING: "Reserve", State.BINDING: "Bind", State.STARTING_LOCAL: "StartLocalPrefill"}
)
"""What the decode worker must answer."""
_WORKER_FAULTS = (Cause.INTERNAL, Cause.NO_REPLY)
_LINK_FAULTS = (
    Cause.TRANSFER_FAILED,
    Cause.TRANSFER_TIMEOUT,
    Cause.CORRUPTED,
    Cause.INCOMPLETE,
    Cause.PEER_LOST,
)


FROM_PREFILL = 1
"""Tokens of an attempt that come with its prompt: one that brought no more got nowhere, or else a request that ends
every decode worker would end as many as it has tokens."""
MOST_UNANSWERED = 10
"""Losses of workers that had not answered Reserve, before these count as attempts, too: a request that ends workers by
being offered to them has an end."""


@dataclass(frozen=True)
class Books:
    """What a worker says that it has of requests, after it had handled everything that came to it until `as_of_s`."""

    as_of_s: float
    keys: frozenset[HandoffKey]


@dataclass
class Life:
    """One request's record.

    `request` is always the current attempt: its `generated_ids` are the tokens known when the attempt began.
    `generated` has all tokens, those of this attempt too. `decode` and `prefill` name the workers of the current
    generation; a prefill worker may hold something only while `handoff_open`, and there is none while `is_local`.
    A unified worker is its requests' decode worker.
    """

    request: Request
    order: int  # of arrival
    arrived_at_s: float
    deadline_at_s: float
    state: State = State.QUEUED
    generation: int = 0
    generated: list[int] = field(default_factory=list)
    decode: Peer | None = None
    prefill: Peer | None = None
    takes_whole: bool = False  # the decode worker computes the prompt in any case
    is_local: bool = False  # the decode worker computes the prompt, or has
    fetch_from_tokens: int = 0  # as in the StartPrefill of this generation
    handoff_open: bool = False  # the decode worker has not shown that it has the whole handoff
    writer_left: bool = False  # the prefill worker has drained and gone while `handoff_open`
    prefill_running: bool = False  # the prefill worker computes, or is about to
    fruitless_attempts: int = 0  # in a row: those in which no decode worker computed a token
    unanswered_losses: int = 0  # of workers that were asked to reserve and had not answered
    is_suspect: bool = False  # a worker was lost with it, and none has got on with it since
    delivered_in_attempt: int = 0
    cached_tokens: int = 0  # of the known tokens, at the decode worker that holds the reservation
    found_tokens: int = 0  # of them, those that the worker which computed the prompt last had
    hinted_tokens: int = 0  # what the prefill worker was believed to have cached when it was chosen
    stats: HandoffStats | None = None
    left_queue_at_s: float | None = None
    began_at_s: float | None = None  # the current generation, or the last one
    first_token_at_s: float | None = None
    earlier_workers: list[str] = field(default_factory=list)
    sound_at_s: dict[WorkerId, float] = field(default_factory=dict)  # asked, or seen to know it, for the last time

    def take(self, move: Move) -> None:
        """One step of the table; IllegalTransition changes nothing. `Lives.move` calls it, which keeps the tables."""
        target = TABLE.get((self.state, move))
        if target is None:
            raise IllegalTransition(f"request {self.request.request_id} is {self.state}: it cannot {move}")
        self.state = target

    @property
    def key(self) -> HandoffKey:
        return HandoffKey(self.request.request_id, self.generation)

    @property
    def next_position(self) -> int:
        """Number of known tokens: the position that the next token is sampled for."""
        return len(self.request.prompt_ids) + len(self.generated)

    def is_decode(self, worker: WorkerId) -> bool:
        return self.decode is not None and self.decode.worker == worker

    def is_prefill(self, worker: WorkerId) -> bool:
        return self.prefill is not None and self.prefill.worker == worker

    def holders(self) -> list[WorkerId]:
        """Workers that may hold something of the current generation, the decode worker first."""
        held = [self.decode.worker] if self.decode is not None else []
        if self.prefill is not None and self.handoff_open:
            held.append(self.prefill.worker)
        return held

    def workers(self) -> list[Peer]:
        """Those that must know the request now."""
        computes = self.prefill if self.state is State.PREFILLING and self.prefill_running else None
        return [peer for peer in (self.decode, computes) if peer is not None]

    def fault_of(self, peer: Peer, books: Books) -> str | None:
        """What looks wrong by these books of one of its `workers`; nothing may be, if the books are old."""
        if self.is_decode(peer.worker) and self.state in _ASKED:
            return f"has not answered {_ASKED[self.state]}"
        return None if self.key in books.keys else "does not know the request"

    def fault(self, cause: Cause, worker: WorkerId | None) -> tuple[WorkerId, ...]:
        """Whose fault a failure is that `worker` told of, or is the reason of: its own, the link's, or nobody's. What
        fails at one worker after the other is the request's own."""
        if worker is None or self.decode is None or (cause is Cause.INTERNAL and self.fruitless_attempts):
            return ()
        if cause in _WORKER_FAULTS:
            return (worker,)
        if cause in _LINK_FAULTS and self.prefill is not None:
            return (self.prefill.worker, self.decode.worker)
        return ()

    def begin(self, decode: Peer, takes_whole: bool, now_s: float) -> None:
        """A new generation, at that decode worker; `takes_whole`: it computes the prompt in any case."""
        self.generation += 1
        self.decode, self.takes_whole = decode, takes_whole
        self.sound_at_s[decode.worker] = self.began_at_s = now_s
        if self.left_queue_at_s is None:
            self.left_queue_at_s = now_s

    def charge(self, cause: Cause, *, is_loss: bool) -> None:
        """Count an attempt that failed, if it got nowhere. The loss of a worker that had not answered Reserve is none:
        it may have been gone when it was asked, and those that are gone together would use up all attempts."""
        no_progress = FROM_PREFILL if is_loss or cause is Cause.INTERNAL else 0
        if self.delivered_in_attempt > no_progress:
            return
        self.is_suspect = self.is_suspect or is_loss
        if is_loss and self.state is State.RESERVING and self.unanswered_losses < MOST_UNANSWERED:
            self.unanswered_losses += 1
        else:
            self.fruitless_attempts += 1

    def leave_workers(self) -> None:
        """Forget the current generation's workers, keeping their names for the route."""
        for peer in (self.prefill, self.decode):
            if peer is not None and peer.name not in self.earlier_workers:
                self.earlier_workers.append(peer.name)
        self.decode = self.prefill = None
        self.takes_whole = self.is_local = False
        self.fetch_from_tokens = 0
        self.handoff_open = self.prefill_running = self.writer_left = False
        self.hinted_tokens = 0
        self.sound_at_s.clear()

    @property
    def num_uncached(self) -> int:
        """Known tokens whose KV the decode worker did not have when it was asked to reserve."""
        return self.request.num_known_tokens - self.cached_tokens

    def assignment(self) -> dict[WorkerId, Assigned]:
        """What each worker has been given of it."""
        known, most = self.next_position, self.request.max_kv_tokens
        loops, left = self.request.params.loops, self.request.params.max_tokens - len(self.generated)
        rows = {}
        if self.decode is not None:
            waits = self.state in (State.RESERVING, State.RESERVED) and not self.takes_whole
            prompt = self.num_uncached if self.state in LOCAL else 0
            prompt += known if self.takes_whole and self.state is State.RESERVING else 0
            rows[self.decode.worker] = Assigned(
                request_id=self.request.request_id,
                num_known_tokens=known,
                max_kv_tokens=most,
                token_loops=(left + prompt) * loops,
                awaits_prefill=waits,
                is_suspect=self.is_suspect,
                prompt_token_loops=prompt * loops,
                num_started_tokens=self.request.num_known_tokens,
            )
        if self.prefill is not None and self.prefill_running:
            target = self.decode.worker if self.decode is not None else None
            work = max(1, known - self.hinted_tokens) * loops
            rows[self.prefill.worker] = Assigned(
                request_id=self.request.request_id,
                num_known_tokens=known,
                max_kv_tokens=most,
                token_loops=work,
                awaits_prefill=False,
                decode=target,
                is_suspect=self.is_suspect,
                prompt_token_loops=work,
            )
        return rows

    def outcome(self, ending: Ending, reason: FinishReason | None, detail: str, now_s: float) -> Outcome:
        """How it ended and what it took; of one that did not finish `detail` goes on with what was delivered."""
        delivered = f"{len(self.generated)} tokens were delivered"
        return Outcome(
            ending=ending,
            reason=reason,
            detail=detail if ending is Ending.FINISHED else f"{detail}; {delivered}",
            usage=self.usage(),
            timing=self.timing(now_s),
            route=self.route(),
            stats=self.stats,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.generated),
            cached_tokens=min(self.found_tokens, len(self.request.prompt_ids)),
        )

    def timing(self, now_s: float) -> Timing:
        left_s = now_s if self.left_queue_at_s is None else self.left_queue_at_s
        first_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        arrived_s = self.arrived_at_s
        return Timing(queued_s=left_s - arrived_s, ttft_s=first_s - arrived_s, total_s=now_s - arrived_s)

    def route(self) -> Route:
        prefill = self.decode if self.is_local else self.prefill
        current = [peer.name if peer is not None else "" for peer in (prefill, self.decode)]
        earlier = tuple(name for name in self.earlier_workers if name not in current)
        return Route(prefill=current[0], decode=current[1], earlier=earlier, prefix_source=self._prefix_source())

    def _prefix_source(self) -> str:
        """What its prompt came from; a fetch that brought nothing has ended as a recompute."""
        if self.is_local:
            return PrefixSource.LOCAL
        if self.prefill is None or self.stats is None:
            return ""
        return PrefixSource.FETCH if self.stats.fetched_bytes else PrefixSource.RECOMPUTE
