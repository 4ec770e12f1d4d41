"""The shared scheduler: which rows the next step computes, and what its result means.

plan() -> StepPlan -> somebody computes it -> commit(plan, result) -> StepOutcome. Requests come in by `submit` (their
prompt is computed here) or by `reserve`, and then either `activate` (what was not cached of their prompt's KV has
arrived from another worker) or `start_reserved` (it is computed here). Blocks end in
`Ledger.release`, or with the caller who took the allocation out by `remove`. Who waits, who is let in and who must
step back is `loopline.sched.admission`.

**Ahead of the device.** Up to `steps_ahead` further steps may be planned before the oldest is committed, and steps are
committed in order. A plan ahead takes for granted that every row goes on; what turns out otherwise at a commit (a stop
id, a failure, a removal) makes later rows of that request void, and they are passed over. Nobody steps back while a
step is in flight: where a plan would need that, plan() returns None, and with nothing in flight it always can.

    plan 1 | plan 2, commit 1 | plan 3, commit 2 | ...        steps_ahead = 1
"""

from collections import deque
from collections.abc import Sequence

from loopline.errors import InvariantBroken
from loopline.identity import Cause, Fingerprint
from loopline.kv.ledger import Allocation, Ledger
from loopline.messages import TokenRow
from loopline.request import Request, TokenExtras
from loopline.sched.admission import Admission
from loopline.sched.decode_group import DecodeGroup
from loopline.sched.entry import Entry, Phase
from loopline.sched.plan import (
    NOT_FINITE,
    ChunkDone,
    DecodeRows,
    RequestLost,
    RowRun,
    Segment,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenColumns,
    segments_of,
)
from loopline.sched.policy import RolePolicy
from loopline.sched.prefill_group import PrefillGroup
from loopline.sched.reservations import Reservations
from loopline.sched.share import TILES, PromptShare, RowSteps
from loopline.settings import SchedulerSettings

_NOT_FINITE_TEXT = "the model's logits are not finite"


class Scheduler:
    """Invariants: an id is waiting, running or unknown, never two of them; at most `steps_ahead` + 1 plans are not
    committed, oldest first."""

    def __init__(
        self,
        ledger: Ledger,
        settings: SchedulerSettings,
        policy: RolePolicy,
        prefix_group: Fingerprint | None = None,
        prompt_rows: RowSteps = TILES,
    ) -> None:
        """`prefix_group`: of all workers that share prefixes, for the keys of the prefix cache; None: it is off.
        `prompt_rows`: what passes over prompts are padded to."""
        self._ledger = ledger
        self._settings = settings
        self._policy = policy
        group = prefix_group if policy.shares_prefixes else None
        self._admission = Admission(ledger, settings, policy, group)
        self.prefix_counts = self._admission.prefix_counts
        self._running: dict[str, Entry] = {}  # in order of admission
        self.share = PromptShare(settings.max_time_per_token_s, prompt_rows)
        self._prefilling = PrefillGroup(ledger, settings, self.share, policy)
        self._decoding: dict[int, DecodeGroup] = {}  # by depth
        self._num_held = 0
        self.reserved = Reservations(ledger, self._admission)
        self._step = 0
        self._in_flight: deque[StepPlan] = deque()

    # ---- queries

    @property
    def step(self) -> int:
        """The last step that was planned."""
        return self._step

    @property
    def num_in_flight(self) -> int:
        """Steps that were planned and are not committed."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, reserved ones included."""
        return len(self._running) + len(self.reserved)

    @property
    def num_waiting(self) -> int:
        return len(self._admission)

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self._admission.num_preempted

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight, or plan() could give a plan now or after something that runs has ended."""
        return bool(self._in_flight) or bool(len(self._admission)) or len(self._running) > self._num_held

    def find_cached(self, request: Request) -> list[int]:
        """Ids of the cached blocks that this request would share if it came now; nothing is held."""
        entry = self._admission.look(request)
        return [] if entry.digests is None else self._ledger.prefix.match(entry.digests.digests)

    def token_loops(self) -> int:
        """Work that is queued, reserved and running, counted to each request's most tokens."""
        running = sum(entry.token_loops_left() for entry in self._running.values() if entry.phase is not Phase.HELD)
        return running + self.reserved.token_loops + self._admission.token_loops

    # ---- intake

    def submit(self, request: Request) -> Cause | None:
        """Queue a request whose prompt is computed here. A cause means it was refused and nothing is held."""
        if request.request_id in self._running or request.request_id in self._admission:
            return Cause.DUPLICATE
        return self._admission.submit(request)

    def reserve(self, request: Request) -> Allocation | Cause:
        """Hold blocks now for a request whose prompt's KV will arrive or be computed here, or say why not. Cached
        blocks are shared: `ledger.written_tokens` says how much of the prompt is there already."""
        return self.reserved.hold(request, is_full=self.num_running >= self._settings.max_running)

    def unreserve(self, allocation: Allocation) -> None:
        """Forget a reservation; its blocks are the caller's to release or quarantine."""
        self.reserved.take(allocation)

    def activate(self, allocation: Allocation, first: TokenRow) -> TokenRow:
        """Run a reserved request whose known tokens' KV is all there: `first` is the token sampled after them.

        The KV counts as written to the request's depth from here on, and whole blocks of it can be found. Returns
        `first`, to be sent on like any row.
        """
        if first.token_id is None or first.finish is not None:
            raise InvariantBroken(f"request {first.request_id} ended with its first token and cannot be activated")
        entry = self.reserved.take(allocation, self.reserved.find(allocation).request.num_known_tokens)
        entry.token_ids.append(first.token_id)
        self._running[entry.request.request_id] = entry
        self._start_decoding(entry)
        self._publish(entry)
        return first

    def start_reserved(self, allocation: Allocation, num_arrived: int = 0) -> None:
        """Run a reserved request whose known tokens are computed here, but for those that are cached and for the first
        `num_arrived`, whose KV has come from another worker: it counts as written, and as found. Where another request
        computes the same prefix it waits for that, in the queue and without these blocks: they are not its any more."""
        entry = self.reserved.take(allocation, num_arrived)
        entry.num_cached = max(entry.num_cached, num_arrived)
        self._publish(entry)
        if not self._admission.may_compute(entry):
            self._ledger.release(allocation)
            self._admission.put_back(entry, in_front=False)
            return
        entry.phase = Phase.PREFILL
        self._running[entry.request.request_id] = entry
        self._prefilling.add(entry)

    def remove(self, request_id: str) -> Allocation | None:
        """Take a request out whatever its phase. Its allocation is the caller's to release; None if it held nothing."""
        self._admission.remove(request_id)
        entry = self._running.get(request_id)
        if entry is None:
            return None
        self._stop(entry)
        return entry.allocation

    # ---- plan

    def plan(self) -> StepPlan | None:
        """What the next step computes. None: nothing can be computed now; while a step is in flight, not before its
        commit. Raises InvariantBroken if as many steps are in flight as may be.
        """
        if len(self._in_flight) > self._settings.steps_ahead:
            raise InvariantBroken(
                f"step {self._in_flight[0].step} was planned and not committed; "
                f"{self._settings.steps_ahead} steps may be planned ahead"
            )
        decode = self._rows_ahead(self._in_flight[-1]) if self._in_flight else self._rows_now()
        if decode is None:
            return None
        runs = self._prefilling.next_runs({depth: len(rows) for depth, rows in decode.items()})
        if not decode and not runs:
            return None
        self._step += 1
        for depth, rows in decode.items():
            self._decoding[depth].begin(rows, self._step)
        self._prefilling.begin(runs, self._step)
        plan = StepPlan(self._step, segments_of(decode, runs))
        self._in_flight.append(plan)
        return plan

    def _rows_now(self) -> dict[int, DecodeRows]:
        """Decode rows by depth, with nothing in flight; each has a block for its position."""
        self._admit()
        self._make_room()
        return {depth: group.next_rows(None) for depth, group in sorted(self._decoding.items()) if len(group)}

    def _rows_ahead(self, previous: StepPlan) -> dict[int, DecodeRows] | None:
        """The same after a step that is in flight; None if there must be a commit first."""
        groups = [(depth, group) for depth, group in sorted(self._decoding.items()) if len(group)]
        if any(group.waits_for_tokens() for _, group in groups):
            return None
        decode = {}
        for depth, group in groups:
            rows = group.next_rows(previous)
            if not all(self._grow(entry, num_tokens) for entry, num_tokens in group.without_room(rows)):
                return None
            if len(rows):
                decode[depth] = rows
        self._admit()
        return decode

    def _admit(self) -> None:
        if not len(self._admission):
            return
        for entry in self._admission.admit(self.num_running, [*self._running, *self.reserved.request_ids]):
            self._running[entry.request.request_id] = entry
            self._prefilling.add(entry)

    def _make_room(self) -> None:
        """A block for every decode row's next position; where there is none, the youngest requests step back."""
        for group in list(self._decoding.values()):
            if not len(group):
                continue
            for entry, num_tokens in group.without_room(group.next_rows(None)):
                while entry.phase is Phase.DECODE and not self._grow(entry, num_tokens):
                    self._preempt_youngest()

    def _grow(self, entry: Entry, num_tokens: int) -> bool:
        if entry.allocation is None:
            raise InvariantBroken(f"request {entry.request.request_id} runs without blocks")
        return self._ledger.grow(entry.allocation, num_tokens)

    def _preempt_youngest(self) -> None:
        """Its blocks are released, and what it generated is kept; it waits in front to be computed again."""
        for entry in reversed(self._running.values()):
            if entry.phase is not Phase.HELD and entry.allocation is not None:
                self._stop(entry)
                self._ledger.release(entry.allocation)
                self._admission.put_back(entry)
                self._admission.num_preempted += 1
                return
        raise InvariantBroken("no block is free and nothing that runs can step back")

    # ---- commit

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take the result of the oldest step in flight. Requests that have left meanwhile are passed over."""
        self._take_in_flight(plan)
        columns: list[TokenColumns] = []
        chunks: list[ChunkDone] = []
        lost: list[RequestLost] = []
        at = 0
        for segment in plan.segments:
            if segment.decode is not None:
                end = at + len(segment.decode)
                extras = {i - at: one for i, one in result.extras.items() if at <= i < end}
                decoded = self._commit_decode(segment, result.token_ids[at:end], extras, lost)
                if decoded.requests:
                    columns.append(decoded)
                at = end
            for run in segment.runs:
                chosen = None
                if run.sampling is not None:
                    chosen = (result.token_ids[at], result.extras.get(at))
                    at += 1
                self._commit_run(run, chosen, columns, chunks, lost)
        self._ledger.step_done(plan.step)
        return StepOutcome(plan.step, tuple(columns), tuple(chunks), tuple(lost))

    def abandon(self, plan: StepPlan, detail: str) -> StepOutcome:
        """The oldest step in flight could not be computed: every request in it is given up, and nothing else.

        Their rows in later steps are void; those steps are committed like any.
        """
        self._take_in_flight(plan)
        entries = [self._entry_of(request_id, allocation) for request_id, allocation in plan.holders]
        lost = tuple(self._lose(entry, detail) for entry in entries if entry is not None)
        self._ledger.step_done(plan.step)
        return StepOutcome(plan.step, (), (), lost)

    def _take_in_flight(self, plan: StepPlan) -> None:
        if not self._in_flight or self._in_flight[0] is not plan:
            raise InvariantBroken(f"step {plan.step} is not the oldest in flight")
        self._in_flight.popleft()

    def _entry_of(self, request_id: str, allocation: Allocation) -> Entry | None:
        """The entry that had these blocks in some step, if it still runs; one that came again has others."""
        entry = self._running.get(request_id)
        return entry if entry is not None and entry.allocation is allocation else None

    def _commit_decode(
        self, segment: Segment, tokens: Sequence[int], extras: dict[int, TokenExtras], lost: list[RequestLost]
    ) -> TokenColumns:
        group = self._decoding[segment.last_loop]
        if segment.decode is None:
            raise InvariantBroken("a segment without decode rows has none to commit")
        columns, ended, failed = group.commit(segment.decode, tokens, extras)
        for entry in group.whole_blocks(self._ledger.block_size):
            self._publish(entry)
        for entry in ended:
            self._publish(entry)
            self._finish(entry)
        lost += [self._lose(entry, _NOT_FINITE_TEXT) for entry in failed]
        return columns

    def _commit_run(
        self,
        run: RowRun,
        chosen: tuple[int, TokenExtras | None] | None,
        columns: list[TokenColumns],
        chunks: list[ChunkDone],
        lost: list[RequestLost],
    ) -> None:
        entry = self._entry_of(run.request_id, run.allocation)
        if entry is None:
            return
        self._prefilling.commit(entry, run)
        self._publish(entry)
        is_last = chosen is not None
        chunks.append(ChunkDone(run.request_id, run.allocation, entry.num_computed, entry.num_cached, is_last))
        if chosen is None:
            return
        token_id, extras = chosen
        if token_id == NOT_FINITE:
            lost.append(self._lose(entry, _NOT_FINITE_TEXT))
            return
        columns.append(self._first_token(entry, token_id, extras))

    def _first_token(self, entry: Entry, token_id: int, extras: TokenExtras | None) -> TokenColumns:
        position, finish = len(entry.token_ids), entry.take(token_id)
        if self._policy.holds_after_first_token:
            self._prefilling.discard(entry)
            entry.phase = Phase.HELD
            self._num_held += 1
        elif finish is not None:
            self._finish(entry)
        else:
            self._prefilling.discard(entry)
            self._start_decoding(entry)
        return TokenColumns(
            entry.depth,
            (entry.request,),
            (position,),
            (token_id,),
            {0: finish} if finish is not None else {},
            {0: extras} if extras is not None else {},
        )

    # ---- ways in and out of running

    def _start_decoding(self, entry: Entry) -> None:
        entry.phase = Phase.DECODE
        if entry.depth not in self._decoding:
            self._decoding[entry.depth] = DecodeGroup(entry.depth, self._ledger)
        self._decoding[entry.depth].add(entry)

    def _stop(self, entry: Entry) -> None:
        """Take an entry out of running; its blocks are the caller's."""
        del self._running[entry.request.request_id]
        if entry.phase is Phase.PREFILL:
            self._prefilling.discard(entry)
        elif entry.phase is Phase.DECODE:
            self._decoding[entry.depth].discard(entry)
        elif entry.phase is Phase.HELD:
            self._num_held -= 1
        self._admission.computed(entry)
        entry.phase = Phase.WAITING

    def _finish(self, entry: Entry) -> None:
        if entry.allocation is None:
            raise InvariantBroken(f"request {entry.request.request_id} ended without blocks")
        self._stop(entry)
        self._ledger.release(entry.allocation)

    def _lose(self, entry: Entry, detail: str) -> RequestLost:
        if entry.allocation is None:
            raise InvariantBroken(f"request {entry.request.request_id} ran without blocks")
        self._stop(entry)
        return RequestLost(entry.request.request_id, entry.allocation, Cause.INTERNAL, detail)

    def _publish(self, entry: Entry) -> None:
        """Let others find the blocks that this entry has filled."""
        if entry.digests is None or entry.allocation is None:
            return
        entry.digests.extend(entry.token_ids)
        self._ledger.publish(entry.allocation, entry.digests.digests, entry.depth)
        self._admission.published(entry)
