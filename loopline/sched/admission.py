"""Who waits for blocks, who is let in, and who stands in front again after a preemption. Private to `loopline.sched`.

First come, first served, with one exception: while the first in line does not fit, younger requests that do fit may
pass it, `max_passes` times in all; then nobody does until it is in. A request that can never fit is refused at once.

Growth is promised at admission: `growth_share` of what a request may still grow by. With 1, whatever runs can finish;
below 1 more requests run at once, and when blocks run out the youngest steps back and is computed again.

Of requests with a common prefix one computes it while the others wait for its blocks, whichever way they came; they do
not wait for one that is itself held back. Where the policy shares room among peers, a request for one that has its
share is passed by others.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loopline.identity import Cause, Fingerprint
from loopline.kv.digests import BlockDigests, request_root
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import Request
from loopline.sched.entry import Entry, Phase
from loopline.sched.policy import HoldsBack, RolePolicy, SharesRoom
from loopline.sched.queue import WaitingQueue
from loopline.settings import SchedulerSettings, promised_tokens

_LOOK_AHEAD = 16
"""Most waiting requests that one tick looks at, so that a long queue costs no more than a short one."""


@dataclass
class PrefixCounts:
    """Tokens of prompts that were looked for in the prefix cache since the start, each request's once, and hits."""

    queries: int = 0
    hits: int = 0

    def take(self, entry: Entry) -> None:
        """Blocks were found for an entry, or none; what it has generated is no prompt."""
        if entry.digests is None or entry.is_counted:
            return
        entry.is_counted = True
        num_prompt = len(entry.request.prompt_ids)
        self.queries += num_prompt
        self.hits += min(entry.num_cached, num_prompt)


class Admission:
    """Invariants: a tick looks at a bounded number of requests, and at none while nothing has changed since the last
    one; digests of a request that waits here are computed once, however often it is tried."""

    def __init__(
        self, ledger: Ledger, settings: SchedulerSettings, policy: RolePolicy, prefix_group: Fingerprint | None
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._policy = policy
        self._holds_back = policy if isinstance(policy, HoldsBack) else None
        self._shares_room = policy if isinstance(policy, SharesRoom) else None
        self._prefix_group = prefix_group
        self._waiting = WaitingQueue(settings.max_waiting)
        self._computing: dict[bytes, Entry] = {}  # digest of a block that is being computed -> who does it
        self._claims: dict[Entry, deque[tuple[int, bytes]]] = {}  # the same by who does it, with indices of blocks
        self._news = 0  # counts what may let a waiting request in
        self._stuck_at: tuple[int, ...] | None = None
        self._looked_at: Entry | None = None  # neither waiting nor running
        self._waited_for: list[Entry] = []  # who computed a prefix that others wait for, at the last look
        self.num_preempted = 0
        self.prefix_counts = PrefixCounts()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def token_loops(self) -> int:
        """Work that waits."""
        return self._waiting.token_loops

    # ---- the queue

    def submit(self, request: Request) -> Cause | None:
        """Queue a request; a cause means it was refused."""
        if self.never_fits(request):
            return Cause.TOO_LARGE
        self._news += 1
        return None if self._waiting.push(self.entry_of(request)) else Cause.NO_ROOM

    def entry_of(self, request: Request) -> Entry:
        """A new entry, with the digests of its whole blocks where prefixes are shared; the one of `look`, if that was
        the last request that was looked at."""
        looked, self._looked_at = self._looked_at, None
        return looked if looked is not None and looked.request is request else Entry.of(request, self._digests(request))

    def look(self, request: Request) -> Entry:
        """The entry of a request that may come next: its prompt is hashed now and not again then."""
        self._looked_at = self.entry_of(request)
        return self._looked_at

    def put_back(self, entry: Entry, in_front: bool = True) -> None:
        """An entry whose blocks were taken from it waits in front of all others, or behind them."""
        entry.phase, entry.allocation = Phase.WAITING, None
        entry.num_computed = entry.num_planned = entry.num_cached = 0
        self._news += 1
        self._waiting.put_back(entry, in_front)

    def remove(self, request_id: str) -> None:
        """Forget a waiting request, if there is one of that id."""
        if self._waiting.remove(request_id) is not None:
            self._news += 1

    def never_fits(self, request: Request) -> bool:
        """Whether the whole arena would be too small."""
        demand = self._policy.demand(request, request.num_known_tokens)
        return self._ledger.blocks_for(demand.tokens_max) > self._ledger.total_blocks

    def room_changed(self) -> None:
        """A request that waits may be let in now, though no count of blocks or of running requests says so."""
        self._news += 1

    # ---- letting in

    def admit(self, num_running: int, running: Collection[str] = ()) -> list[Entry]:
        """Entries that run from now on, with their blocks; `num_running` do already, and `running` are their ids, those
        of reserved ones included."""
        admitted: list[Entry] = []
        if not len(self._waiting) or num_running >= self._settings.max_running:
            return admitted
        state = (self._news, num_running, self._ledger.num_free_blocks, self._ledger.num_promised_blocks)
        if state == self._stuck_at and not any(self._is_held(entry) for entry in self._waited_for):
            return admitted
        self._waited_for.clear()
        blocked: Entry | None = None
        for entry in self._waiting.first(_LOOK_AHEAD):
            if num_running + len(admitted) >= self._settings.max_running:
                break
            if self._waits_for_prefix(entry) or not self._may_start(entry, running, admitted):
                continue
            if blocked is not None and blocked.num_passed >= self._settings.max_passes:
                break
            if not self._let_in(entry):
                blocked = blocked or entry
                continue
            admitted.append(entry)
            if blocked is not None:
                blocked.num_passed += 1
        if not admitted:
            self._stuck_at = state
        return admitted

    def reserve(self, request: Request) -> Entry | None:
        """An entry that holds blocks and does not wait; None if there is no room. Cached blocks are shared, but never
        the one with the last known token: the token that follows it has to be computed, here or elsewhere."""
        entry = self.entry_of(request)
        num_known = len(entry.token_ids)
        digests = entry.digests.digests if entry.digests is not None else []
        allocation = self._hold(request, num_known, digests[: (num_known - 1) // self._ledger.block_size])
        if allocation is None:
            self._looked_at = entry  # to be queued, perhaps
            return None
        entry.allocation = allocation
        entry.num_cached = self._ledger.written_tokens(allocation, entry.depth)
        entry.num_computed = entry.num_planned = entry.num_cached
        self.prefix_counts.take(entry)
        return entry

    def _hold(self, request: Request, num_known_tokens: int, digests: Sequence[bytes]) -> Allocation | None:
        """Blocks for a request's known tokens, and a promise for its growth; None if there is no room."""
        demand = self._policy.demand(request, num_known_tokens)
        most = promised_tokens(demand.tokens_now, demand.tokens_max, self._settings.growth_share)
        return self._ledger.reserve(demand.tokens_now, most, digests, request.params.loops)

    def _may_start(self, entry: Entry, running: Collection[str], admitted: Sequence[Entry]) -> bool:
        if self._shares_room is None:
            return True
        beside = [*running, *(other.request.request_id for other in admitted)]
        most, blocks = self._settings.max_running, self._ledger.total_blocks
        return self._shares_room.may_start(entry.request.request_id, beside, most, blocks)

    def _let_in(self, entry: Entry) -> bool:
        digests = list(entry.digests.digests) if entry.digests is not None else []
        num_known = len(entry.token_ids)
        allocation = self._hold(entry.request, num_known, digests)
        if allocation is None:
            return False
        self._waiting.remove(entry.request.request_id)
        entry.allocation, entry.phase = allocation, Phase.PREFILL
        entry.num_cached = self._ledger.written_tokens(allocation, entry.depth)
        # All of it cached: the last token is computed again, because its logits are what comes next.
        entry.num_computed = entry.num_planned = min(entry.num_cached, num_known - 1)
        self.prefix_counts.take(entry)
        self._claim(entry)
        return True

    # ---- common prefixes

    def may_compute(self, entry: Entry) -> bool:
        """Whether an entry that `reserve` gave blocks is to compute what it lacks in them: from now on others wait for
        it. False: another computes its prefix, or has done so since; it is to be put back, and finds it then."""
        if entry.digests is not None:
            num_hits = len(self._ledger.prefix.match(entry.digests.digests))
            num_shared = min(num_hits, (len(entry.token_ids) - 1) // self._ledger.block_size)
            if num_shared * self._ledger.block_size > entry.num_cached or self._waits_for_prefix(entry):
                return False
        self._claim(entry)
        return True

    def _claim(self, entry: Entry) -> None:
        """It computes what it lacks, as far as nobody does."""
        if entry.digests is None:
            return
        first = entry.num_cached // self._ledger.block_size
        claims: deque[tuple[int, bytes]] = deque()
        for index, digest in enumerate(entry.digests.digests[first:], start=first):
            if (other := self._computing.get(digest)) is None or self._is_held(other):
                self._computing[digest] = entry
                claims.append((index, digest))
        if claims:
            self._claims[entry] = claims

    def published(self, entry: Entry) -> None:
        """Blocks of this entry can be found now: who waited for them may go on."""
        self._forget_claims(entry, entry.num_computed // self._ledger.block_size)

    def computed(self, entry: Entry) -> None:
        """This entry computes nothing any more, whatever it has done."""
        self._forget_claims(entry, None)

    def _forget_claims(self, entry: Entry, end: int | None) -> None:
        """Of its blocks before `end`; None: of all. A row that decodes has none, and costs nothing."""
        claims = self._claims.get(entry)
        if claims is None:
            return
        while claims and (end is None or claims[0][0] < end):
            _, digest = claims.popleft()
            if self._computing.get(digest) is entry:
                del self._computing[digest]
                self._news += 1
        if not claims:
            del self._claims[entry]

    def _waits_for_prefix(self, entry: Entry) -> bool:
        """Is the first block that this entry lacks being computed by another that may compute?"""
        if entry.digests is None or not self._computing:
            return False
        digests = entry.digests.digests
        num_hits = len(self._ledger.prefix.match(digests))
        other = self._computing.get(digests[num_hits]) if num_hits < len(digests) else None
        if other is None or self._is_held(other):
            return False
        self._waited_for.append(other)
        return True

    def _is_held(self, entry: Entry) -> bool:
        return self._holds_back is not None and not self._holds_back.may_compute(entry.request.request_id)

    def _digests(self, request: Request) -> BlockDigests | None:
        root = None if self._prefix_group is None else request_root(self._prefix_group, request.params)
        return None if root is None else BlockDigests(root, self._ledger.block_size)
