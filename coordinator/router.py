"""Which workers run a request: what may be comes from `coordinator.room`, what is preferred from a policy.

`Router` keeps what a policy is told besides the snapshot (prefix caches, sessions) and who is avoided. A `Round`
decides on one snapshot, and takes up what was given since. One event loop, no I/O: the dispatcher calls, and sends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from coordinator.avoidance import Avoidance
from coordinator.effects import Assigned, AttemptFailed, Send
from coordinator.policies import Hints, Policy
from coordinator.prefix_source import Prompts, SourceFacts
from coordinator.prefixes import PrefixTable, RequestPrefixes
from coordinator.room import Candidates, Room, WorkerRoom
from coordinator.sessions import Sessions
from coordinator.snapshot import ClusterSnapshot, WorkerView
from loopline.errors import InvariantBroken
from loopline.identity import Fingerprint, Role, WorkerId
from loopline.messages import PrefixReport, Register, ReportPrefixes
from loopline.request import Request

_LOG = logging.getLogger(__name__)


class Router:
    """One for a coordinator's life."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.avoidance = Avoidance()
        self.prefixes = PrefixTable()
        self.requests = RequestPrefixes()
        self.sessions = Sessions()

    def joined(self, register: Register, now_s: float) -> list[Send]:
        """A worker is in; what to ask it."""
        if not self.policy.needs_prefixes:
            return []
        worker = register.peer.worker
        self.prefixes.joined(worker, register.capacity.total_blocks, now_s)
        return [Send(worker, ReportPrefixes())]

    def lost(self, worker: WorkerId) -> None:
        self.prefixes.lost(worker)
        self.avoidance.worker_gone(worker)

    def reported(self, worker: WorkerId, report: PrefixReport, now_s: float) -> list[Send]:
        """What a worker says of its prefix cache; after a gap it is asked for all of it."""
        return [Send(worker, ReportPrefixes())] if self.prefixes.take(worker, report, now_s) else []

    def failed(self, failed: AttemptFailed, now_s: float, name: Callable[[WorkerId], str]) -> None:
        """Go past whoever is to blame, for a while. `name`: of a worker, for the log."""
        hold_s = self.avoidance.failed(failed.fault, now_s, failed.begun_s) if failed.fault else None
        if hold_s is not None:
            names = " -> ".join(name(worker) for worker in failed.fault)
            what = "link" if len(failed.fault) > 1 else "worker"
            _LOG.warning("%s %s is avoided for %g s: %s", what, names, hold_s, failed.detail)

    def ended(self, request_id: str) -> None:
        """Nothing of this request is placed any more."""
        self.requests.ended(request_id)

    def begin(self, snapshot: ClusterSnapshot, now_s: float) -> "Round":
        """Decide on this snapshot, without those who are avoided now."""
        return Round(self, replace(snapshot, avoided=self.avoidance.avoided(now_s)))


class Round:
    """Decisions on one snapshot, each a function of it, of the request, and of what was placed before."""

    def __init__(self, router: Router, snapshot: ClusterSnapshot) -> None:
        self._router = router
        self._room = Room(snapshot)

    @property
    def has_suspects(self) -> bool:
        """Whether a worker has been given a suspect."""
        return self._room.has_suspects

    @property
    def is_all_held(self) -> bool:
        """Whether each worker that could be asked for blocks is kept for a request that found no room."""
        return self._room.is_all_held

    def hold(self, request: Request, group: Fingerprint | None = None, *, in_pairs: bool = False) -> None:
        """`choose_decode` found no room: nobody else gets the workers that could run this request."""
        self._room.hold(request, group, in_pairs=in_pairs)

    def choose_decode(
        self,
        request: Request,
        group: Fingerprint | None = None,
        *,
        is_suspect: bool = False,
        in_pairs: bool = False,
    ) -> WorkerView | None:
        """The decode or unified worker to ask for blocks, or None: no room now. `group`: only workers that compute the
        same. `in_pairs`: only those of pairs while one is ready."""
        if self._room.is_hopeless(request):
            return None
        candidates = self._room.for_decode(request, group, is_suspect, in_pairs=in_pairs)
        if not candidates.num_workers:
            return None
        hints = self._hints(request, Role.DECODE)
        return _checked(self._router.policy.choose_decode(request, candidates, hints), candidates)

    def has_pair(self, decode: WorkerId) -> bool:
        """Whether a prefill worker that is ready can be bound for requests on this decode worker."""
        room = self._room.find(decode)
        return room is not None and self._room.has_pair(room)

    def choose_prefill(self, request: Request, decode: WorkerId, *, is_suspect: bool = False) -> WorkerView | None:
        """The prefill worker to bind for a request that holds a reservation on `decode`, or None: no room now."""
        holder = self._room.find(decode)
        if holder is None:
            return None
        candidates = self._room.for_prefill(request, holder, is_suspect)
        if not candidates.num_workers:
            return None
        hints = self._hints(request, Role.PREFILL)
        return _checked(self._router.policy.choose_prefill(request, candidates, hints), candidates)

    def cached_tokens(self, request: Request, view: WorkerView) -> int:
        """Tokens of the request that a worker most likely has cached; 0 under a policy that does not ask."""
        if not self._router.policy.needs_prefixes:
            return 0
        size = view.capacity.block_size
        digests = self._router.requests.digests(request, view.group, size)
        return size * self._router.prefixes.num_cached(view.peer.worker, digests)

    def source_facts(
        self, request: Request, decode: WorkerId, in_decode_tokens: int, prefill: WorkerView | None
    ) -> SourceFacts:
        """What says where a prompt's KV should come from. `decode` holds its reservation, and has that many tokens of
        it; `prefill`: the worker that would compute it, None where none has room."""
        loops, known = request.params.loops, request.num_known_tokens
        room = self._room.find(decode)
        capacity = None if room is None else room.view.capacity
        links = () if prefill is None else prefill.links
        return SourceFacts(
            known_tokens=known,
            loops=loops,
            token_bytes=0 if capacity is None else capacity.token_bytes,
            decode=_prompts(room, in_decode_tokens),
            prefill=None
            if prefill is None
            else _prompts(self._room.find(prefill.worker), min(known - 1, self.cached_tokens(request, prefill))),
            link_bytes_per_s=next((link.bytes_per_s for link in links if link.decode == decode), 0.0),
        )

    def placed(self, request: Request, before: Mapping[WorkerId, Assigned], after: Mapping[WorkerId, Assigned]) -> None:
        """A request was given to a worker: its rows were those of `before`, and are those of `after`."""
        self._room.given(before, after)
        for worker in after:
            room = self._room.find(worker)
            if room is not None:
                role = Role.DECODE if room.view.role.generates else Role.PREFILL
                self._router.sessions.placed(request.session, role, worker)

    def _hints(self, request: Request, role: Role) -> Hints:
        chains: dict[int, Sequence[bytes]] = {}
        router = self._router

        def cached_tokens(room: WorkerRoom) -> int:
            size = room.view.capacity.block_size
            digests = chains.get(room.group)
            if digests is None:
                chains[room.group] = digests = router.requests.digests(request, room.view.group, size)
            return size * router.prefixes.num_cached(room.worker, digests)

        return Hints(cached_tokens, router.sessions.last(request.session, role))


def _prompts(room: WorkerRoom | None, cached_tokens: int) -> Prompts:
    """A worker that is lost is taken to be one of which nothing is known."""
    load = None if room is None else room.view.load
    return Prompts(
        token_loops_per_s=0.0 if load is None else load.prompt_token_loops_per_s,
        ahead_token_loops=0 if room is None else room.prompt_token_loops,
        cached_tokens=cached_tokens,
    )


def _checked(chosen: WorkerRoom | None, candidates: Candidates) -> WorkerView | None:
    """A policy that names nobody starves nobody, and one that names a worker without room is a bug."""
    if chosen is None:
        chosen = next(iter(candidates), None)
        return None if chosen is None else chosen.view
    if not candidates.may_be(chosen):
        raise InvariantBroken(f"the policy chose worker {chosen.name}, which may not get the request")
    return chosen.view
