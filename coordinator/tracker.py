"""Every request's life from the queue to its end: worker messages, losses and cancels in, effects out.

Pure: no I/O, an injected clock. The dispatcher calls it and carries the effects out in order. Messages of workers
that do not fit the current generation, attempt or position are counted in `ignored` and change nothing, but for a gap
in the tokens, which ends the attempt; an illegal call of our own raises.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.effects import Assigned, AttemptFailed, Deliver, Effect, End, Ending, Freed, Requeue, Send
from coordinator.life import FROM_PREFILL, LOCAL, Books, Life, Move, State
from coordinator.lives import Lives
from coordinator.strays import Strays
from loopline.clock import Clock
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import (
    Bind,
    Cancel,
    Granted,
    LocalPrefillStarted,
    Prefilled,
    RequestFailed,
    Reserve,
    Reserved,
    StartLocalPrefill,
    StartPrefill,
    StepTokens,
    TokenRow,
)
from loopline.request import FinishReason, Request

MAX_FRUITLESS_ATTEMPTS = 3
_GOT_NOWHERE = "brought no token of a decode worker"
_FREE_REFUSALS = (Cause.NO_ROOM, Cause.DRAINING)  # a worker that said so has not tried
_FINAL_CAUSES = {Cause.TOO_LARGE: Ending.TOO_LARGE, Cause.INVALID: Ending.INVALID, Cause.DEADLINE: Ending.DEADLINE}
_WITH_TOKENS = (State.PREFILLING, *LOCAL, State.DECODING)


class Tracker:
    """Table of live requests, in order of arrival. One that ended is forgotten: what still comes for it is UNKNOWN."""

    def __init__(self, clock: Clock, reply_timeout_s: float = 5.0) -> None:
        self._clock = clock
        self._reply_timeout_s = reply_timeout_s
        self._strays = Strays()
        self._lives = Lives()
        self._arrivals = 0
        self.ignored: Counter[Cause] = Counter()

    # ---- questions -------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lives

    def __len__(self) -> int:
        return len(self._lives)

    def state(self, request_id: str) -> State:
        return self._lives[request_id].state

    def request(self, request_id: str) -> Request:
        """The request as its current (or next) attempt."""
        return self._lives[request_id].request

    def order(self, request_id: str) -> int:
        return self._lives[request_id].order

    def decode_worker(self, request_id: str) -> WorkerId | None:
        peer = self._lives[request_id].decode
        return peer.worker if peer is not None else None

    def has_delivered(self, request_id: str) -> bool:
        """Whether a worker has generated tokens of it: from then on it must stay with workers that compute the same."""
        return self._lives[request_id].first_token_at_s is not None

    def is_suspect(self, request_id: str) -> bool:
        """Whether a worker was lost with it, and none has got on with it since: it may be the reason."""
        return self._lives[request_id].is_suspect

    def awaiting_prefill(self) -> list[str]:
        """Requests that hold a reservation and need a prefill worker, oldest first."""
        return [life.request.request_id for life in self._lives.reserved()]

    def num_uncached(self, request_id: str) -> int:
        """Known tokens that the decode worker which holds the reservation does not have."""
        return self._lives[request_id].num_uncached

    def num_running(self) -> int:
        return self._lives.num_placed

    def assigned(self) -> dict[WorkerId, tuple[Assigned, ...]]:
        """What each worker has been given and has not ended."""
        return self._lives.assigned()

    def assignment(self, request_id: str) -> dict[WorkerId, Assigned]:
        """What each worker has been given of one request."""
        return self._lives[request_id].assignment()

    # ---- moves that the coordinator makes --------------------------------------------------------------------------

    def admit(self, request: Request, deadline_s: float) -> None:
        """Take a new request into the table, QUEUED. `deadline_s` is counted from now."""
        if request.request_id in self._lives:
            raise IllegalTransition(f"request {request.request_id} is in the table already")
        now_s = self._clock.now_s()
        generated = list(request.generated_ids)
        self._lives.add(Life(request, self._arrivals, now_s, now_s + deadline_s, generated=generated))
        self._arrivals += 1

    def reserve(self, request_id: str, decode: Peer, *, takes_whole: bool = False) -> list[Effect]:
        """Ask `decode` to hold blocks: a new generation begins. `takes_whole`: it computes the prompt in any case."""
        life = self._lives[request_id]
        self._lives.move(life, Move.RESERVE)
        life.begin(decode, takes_whole, self._clock.now_s())
        reserve = Send(decode.worker, Reserve(life.key, life.request, self._remaining_s(life)))
        return [reserve, Send(decode.worker, StartLocalPrefill(life.key))] if takes_whole else [reserve]

    def bind(self, request_id: str, prefill: Peer, hinted_tokens: int = 0, fetch_from_tokens: int = 0) -> list[Effect]:
        """Name `prefill` to the decode worker as the one writer. `hinted_tokens`: those that it will most likely have,
        fetched ones included; `fetch_from_tokens`: as in StartPrefill."""
        life = self._lives[request_id]
        self._lives.move(life, Move.BIND)
        life.prefill, life.prefill_running, life.hinted_tokens = prefill, True, hinted_tokens
        life.fetch_from_tokens, life.stats = fetch_from_tokens, None
        assert life.decode is not None  # a RESERVED request has one
        life.sound_at_s[life.decode.worker] = self._clock.now_s()
        return [Send(life.decode.worker, Bind(life.key, prefill))]

    def start_local(self, request_id: str) -> list[Effect]:
        """Have the decode worker compute the prompt: no prefill worker will write into its reservation."""
        life = self._lives[request_id]
        self._begin_local(life)
        assert life.decode is not None  # a RESERVED request has one
        return [Send(life.decode.worker, StartLocalPrefill(life.key))]

    def cancel(self, request_id: str) -> list[Effect]:
        """The client went away."""
        return self._end_by_us(request_id, Ending.CANCELLED, Cause.CANCELLED, "cancelled")

    def deadline(self, request_id: str) -> list[Effect]:
        return self._end_by_us(request_id, Ending.DEADLINE, Cause.DEADLINE, "deadline passed")

    def stop(self, request_id: str) -> list[Effect]:
        """A stop string was found in the text."""
        return self._end_by_us(request_id, Ending.FINISHED, Cause.CANCELLED, "", FinishReason.STOP)

    def give_up(self, request_id: str, ending: Ending, detail: str) -> list[Effect]:
        """End it for a reason of the coordinator's own."""
        return self._end_by_us(request_id, ending, Cause.CANCELLED, detail)

    # ---- what workers say ------------------------------------------------------------------------------------------

    def on_reserved(self, worker: WorkerId, message: Reserved) -> list[Effect]:
        life = self._current(worker, message.key, decode_only=True)
        if life is None:
            return []
        if life.state is not State.RESERVING or message.cause is Cause.DUPLICATE:
            return self._ignore(Cause.DUPLICATE)
        if message.cause is not None:
            return self._refused(life, worker, message.cause, message.detail)
        self._lives.move(life, Move.HOLD)
        life.cached_tokens = message.cached_tokens
        if life.takes_whole:
            self._begin_local(life)  # the order went with Reserve
        return []

    def on_granted(self, worker: WorkerId, message: Granted) -> list[Effect]:
        life = self._current(worker, message.key, decode_only=True)
        if life is None:
            return []
        if life.state is not State.BINDING or message.cause is Cause.DUPLICATE:
            return self._ignore(Cause.DUPLICATE)
        if life.prefill is None or life.decode is None or life.prefill.worker != message.writer:
            return self._ignore(Cause.WRONG_WRITER)
        if message.cause is not None:
            return self._refused(life, worker, message.cause, message.detail)
        self._lives.move(life, Move.GRANT)
        life.handoff_open = True
        life.sound_at_s[worker] = life.sound_at_s[life.prefill.worker] = self._clock.now_s()
        blocks, left_s, least = (message.first_block, message.runs), self._remaining_s(life), life.fetch_from_tokens
        start = StartPrefill(life.key, life.request, life.decode, *blocks, left_s, fetch_from_tokens=least)
        return [Send(life.prefill.worker, start)]

    def on_local_started(self, worker: WorkerId, message: LocalPrefillStarted) -> list[Effect]:
        life = self._current(worker, message.key, decode_only=True)
        if life is None:
            return []
        if life.state is not State.STARTING_LOCAL or message.cause is Cause.DUPLICATE:
            return self._ignore(Cause.DUPLICATE)
        if message.cause is not None:
            return self._refused(life, worker, message.cause, message.detail)
        self._lives.move(life, Move.STARTED)
        life.sound_at_s[worker] = self._clock.now_s()
        return []

    def on_prefilled(self, worker: WorkerId, message: Prefilled) -> list[Effect]:
        life = self._current(worker, message.key)
        if life is None:
            return []
        if life.state not in _WITH_TOKENS or not life.is_prefill(worker) or message.attempt != life.request.attempt:
            return self._ignore(Cause.STALE)
        life.stats = message.stats
        life.found_tokens = message.stats.cached_tokens
        life.prefill_running = False
        return self._take_row(life, worker, message.token)

    def on_step_tokens(self, worker: WorkerId, message: StepTokens) -> list[Effect]:
        effects: list[Effect] = []
        for row in message.rows:
            life = self._lives.get(row.request_id)
            if life is None:
                self._ignore(Cause.UNKNOWN)
            elif life.state not in _WITH_TOKENS or not life.is_decode(worker) or row.attempt != life.request.attempt:
                self._ignore(Cause.STALE)
            else:  # whatever the row says, this worker runs the request: the handoff is complete
                hindered = life.prefill_running or life.is_suspect
                life.handoff_open = life.prefill_running = False
                effects += self._take_row(life, worker, row)
                effects += [Freed()] if hindered and not life.is_suspect else []
        return effects

    def on_request_failed(self, worker: WorkerId, message: RequestFailed) -> list[Effect]:
        life = self._current(worker, message.key)
        if life is None:
            return []
        is_of_leaving = life.writer_left and life.is_decode(worker) and message.cause is Cause.PEER_LOST
        return self._refused(life, worker, Cause.DRAINING if is_of_leaving else message.cause, message.detail)

    def on_worker_lost(self, worker: WorkerId, name: str, *, left: bool = False) -> list[Effect]:
        """Restart elsewhere everything that `worker` may hold something of, oldest first. `left`: it drained, and what
        it handed over is not to blame for that. A decode worker most likely has all of a prompt that such a worker had
        computed, and if not says so when it hears who is gone."""
        cause = Cause.DRAINING if left else Cause.PEER_LOST
        effects: list[Effect] = []
        for life in self._lives.placed():
            if left and life.is_prefill(worker) and life.handoff_open and not life.prefill_running:
                life.writer_left = True
            elif worker in life.holders() or (life.is_prefill(worker) and life.prefill_running):
                effects += self._restart(life, worker, cause, f"worker {name} was lost", is_loss=True)
        return effects

    # ---- what nobody says ------------------------------------------------------------------------------------------

    def look(self, books: Mapping[WorkerId, Books]) -> list[Effect]:
        """Find what was lost, by the last books of each worker; to be called several times within a reply timeout.

        A request starts again where a worker's books have been wrong for a whole reply timeout in which it has handled
        what came: it owes an answer, or does not know the request. A worker that is slow, or computes for long, has
        old books and is waited for. What a worker has and nobody needs is cancelled once more.
        """
        effects: list[Effect] = []
        now_s = self._clock.now_s()
        for life in self._lives.placed():
            for peer in life.workers():
                own = books.get(peer.worker)
                fault = life.fault_of(peer, own) if own is not None else None
                if own is None or fault is None:
                    life.sound_at_s[peer.worker] = now_s
                elif own.as_of_s >= life.sound_at_s[peer.worker] + self._reply_timeout_s:
                    detail = f"worker {peer.name} {fault} after {self._reply_timeout_s:g} s"
                    effects += self._restart(life, None, Cause.NO_REPLY, detail, culprit=peer.worker)
                    break
        return effects + self._strays.cancel(books, self._needs)

    def excuse(self) -> None:
        """This process stood still: what it has not heard until now says nothing about workers."""
        for life in self._lives.placed():
            life.sound_at_s.update(dict.fromkeys(life.sound_at_s, self._clock.now_s()))

    def _needs(self, key: HandoffKey) -> bool:
        life = self._lives.get(key.request_id)
        return life is not None and life.generation <= key.generation and life.state is not State.QUEUED

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _begin_local(self, life: Life) -> None:
        self._lives.move(life, Move.START_LOCAL)
        life.is_local, life.stats, life.found_tokens = True, None, life.cached_tokens
        life.sound_at_s.update(dict.fromkeys(life.holders(), self._clock.now_s()))

    def _take_row(self, life: Life, worker: WorkerId, row: TokenRow) -> list[Effect]:
        if row.request_id != life.request.request_id or row.attempt != life.request.attempt:
            return self._ignore(Cause.STALE)
        if row.position < life.next_position:
            return self._ignore(Cause.DUPLICATE)
        if row.position > life.next_position:  # one between was lost, and no worker says it again
            self._ignore(Cause.INCOMPLETE)
            return self._restart(life, None, Cause.INCOMPLETE, f"token {life.next_position} was lost on its way")
        if row.token_id is None and row.finish is None:
            return self._ignore(Cause.INVALID)
        if row.finish not in (None, FinishReason.STOP, FinishReason.LENGTH):
            return self._restart(life, worker, Cause.INTERNAL, f"a worker ended it with {row.finish}")
        self._lives.move(life, Move.TOKEN)
        if life.first_token_at_s is None:
            life.first_token_at_s = self._clock.now_s()
        effects: list[Effect] = []
        if row.token_id is not None:
            life.generated.append(row.token_id)
            life.delivered_in_attempt += 1
            if life.delivered_in_attempt > FROM_PREFILL:
                life.fruitless_attempts, life.is_suspect = 0, False
            effects.append(Deliver(life.request.request_id, row))
        if row.finish is not None:
            return effects + self._finish(life, row.finish, by=worker)
        if len(life.generated) >= life.request.params.max_tokens:
            return effects + self._finish(life, FinishReason.LENGTH, by=None)
        return effects

    def _current(self, worker: WorkerId, key: HandoffKey, decode_only: bool = False) -> Life | None:
        """The request that a message is about, if it is from a worker of the current generation; else it is counted."""
        life = self._lives.get(key.request_id)
        if life is None:
            self._ignore(Cause.UNKNOWN)
            return None
        speaks = life.is_decode(worker) or (life.is_prefill(worker) and not decode_only)
        if key.generation != life.generation or not speaks:
            self._ignore(Cause.STALE)
            return None
        return life

    def _ignore(self, cause: Cause) -> list[Effect]:
        self.ignored[cause] += 1
        return []

    def _refused(self, life: Life, worker: WorkerId, cause: Cause, detail: str) -> list[Effect]:
        """`worker` holds nothing of the request any more and says why."""
        if life.is_prefill(worker) and not life.handoff_open:
            return self._ignore(Cause.STALE)  # the decode worker has all that it needs
        final = _FINAL_CAUSES.get(cause)
        if final is None:
            return self._restart(life, worker, cause, f"{cause}: {detail}")
        failed = AttemptFailed(life.request.request_id, cause, detail)
        return [failed, *self._close(life, final, self._cancels(life, cause, but=worker), detail or str(cause))]

    def _restart(
        self,
        life: Life,
        worker: WorkerId | None,
        cause: Cause,
        detail: str,
        is_loss: bool = False,
        culprit: WorkerId | None = None,
    ) -> list[Effect]:
        """Give the current generation up and queue the request again; `worker` needs no Cancel (None: all do).
        `is_loss`: it is lost. `culprit`: it is to blame, and needs a Cancel."""
        cancels = self._cancels(life, cause, but=worker)
        is_free = cause in _FREE_REFUSALS
        fault = () if is_loss else life.fault(cause, culprit or worker)
        begun_s = life.began_at_s if fault else None
        failed = [] if is_free else [AttemptFailed(life.request.request_id, cause, detail, fault, begun_s)]
        if not is_free:
            life.charge(cause, is_loss=is_loss)
        if life.fruitless_attempts >= MAX_FRUITLESS_ATTEMPTS:
            text = f"given up after {life.fruitless_attempts} attempts that {_GOT_NOWHERE}, the last one: {detail}"
            return [*failed, *self._close(life, Ending.GIVEN_UP, cancels, text)]
        was_started = life.state in _WITH_TOKENS
        self._lives.move(life, Move.REQUEUE)
        life.leave_workers()
        attempt = life.request.attempt + (0 if is_free and not was_started else 1)
        life.request = replace(life.request, attempt=attempt, generated_ids=tuple(life.generated))
        life.delivered_in_attempt = 0
        return [*failed, *cancels, Requeue(life.request.request_id)]

    def _finish(self, life: Life, reason: FinishReason, by: WorkerId | None) -> list[Effect]:
        """The request's own end, seen `by` a worker that has given it up itself."""
        cancels = self._cancels(life, Cause.CANCELLED, but=by)
        return self._close(life, Ending.FINISHED, cancels, "", reason)

    def _end_by_us(
        self, request_id: str, ending: Ending, cause: Cause, detail: str, reason: FinishReason | None = None
    ) -> list[Effect]:
        """Nothing happens where the request has ended already: ends race with each other."""
        life = self._lives.get(request_id)
        if life is None:
            return []
        return self._close(life, ending, self._cancels(life, cause, but=None), detail, reason)

    def _cancels(self, life: Life, cause: Cause, but: WorkerId | None) -> list[Effect]:
        return [Send(worker, Cancel(life.key, cause)) for worker in life.holders() if worker != but]

    def _close(
        self, life: Life, ending: Ending, cancels: Sequence[Effect], detail: str, reason: FinishReason | None = None
    ) -> list[Effect]:
        self._lives.move(life, Move.END)
        return [*cancels, End(life.request.request_id, life.outcome(ending, reason, detail, self._clock.now_s()))]

    def _remaining_s(self, life: Life) -> float:
        return max(0.0, life.deadline_at_s - self._clock.now_s())
