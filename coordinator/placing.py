"""Giving requests to workers: each round decides on one snapshot of the cluster, and carries out what it decides.

The dispatcher calls, whenever something changed. What may be and what is preferred is the router's.
"""

from collections.abc import Callable, Iterable

from coordinator.effects import Effect, Ending
from coordinator.prefix_source import SourceRule, least_fetch_tokens
from coordinator.queue import RequestQueue
from coordinator.router import Round, Router
from coordinator.snapshot import ClusterSnapshot
from coordinator.tracker import Tracker
from loopline.clock import Clock
from loopline.errors import RequestTooLarge
from loopline.identity import Fingerprint, Role
from loopline.request import Limits, PrefixSource, Request, check_size

_MOST_PASSED = 256
"""Requests without room that a round goes past: where some fit a few workers only, what a round costs has a bound."""
PROBES = SourceRule(choice=PrefixSource.RECOMPUTE)
"""A probe takes the whole way, where there is a pair and other requests take it."""


class Placer:
    """Moves what waits: from the queue to a decode worker, and from there to a prefill worker; or to a unified worker,
    which needs nobody else."""

    def __init__(
        self,
        clock: Clock,
        tracker: Tracker,
        queue: RequestQueue,
        router: Router,
        carry_out: Callable[[Iterable[Effect]], None],
        sources: SourceRule,
    ) -> None:
        """`carry_out` is called while a round goes on."""
        self._clock = clock
        self._tracker = tracker
        self._queue = queue
        self._router = router
        self._carry_out = carry_out
        self._sources = sources
        self._groups: dict[str, Fingerprint] = {}  # of the decode worker that a request was given to last

    def place(self, awaiting: Iterable[str], snapshot: ClusterSnapshot, limits: Limits, probe_id: str | None) -> None:
        """One round. `awaiting` hold a reservation; the request `probe_id` takes the whole way wherever a pair is
        ready and any request would take it: it is what shows that one works."""
        placing = self._router.begin(snapshot, self._clock.now_s())
        self._bind_prefill_workers(awaiting, placing, probe_id)
        self._reserve_decode_workers(placing, limits, probe_id)

    def ended(self, request_id: str) -> None:
        """Nothing of this request is placed any more."""
        self._groups.pop(request_id, None)
        self._router.ended(request_id)

    def _bind_prefill_workers(self, request_ids: Iterable[str], placing: Round, probe_id: str | None) -> None:
        for request_id in request_ids:
            decode = self._tracker.decode_worker(request_id)
            if decode is None:
                continue
            request, before = self._tracker.request(request_id), self._tracker.assignment(request_id)
            prefill = placing.choose_prefill(request, decode, is_suspect=self._tracker.is_suspect(request_id))
            in_decode = request.num_known_tokens - self._tracker.num_uncached(request_id)
            facts = placing.source_facts(request, decode, in_decode, prefill)
            is_whole_way = request_id == probe_id and placing.has_pair(decode)
            source = (PROBES if is_whole_way else self._sources).choose(facts)
            if source is PrefixSource.LOCAL:
                self._carry_out(self._tracker.start_local(request_id))
            elif source is not None and prefill is not None:
                least = least_fetch_tokens(self._sources.choice, facts) if source is PrefixSource.FETCH else 0
                hinted = facts.prefill.cached_tokens if facts.prefill is not None else 0
                hinted = max(hinted, in_decode) if least else hinted
                self._carry_out(self._tracker.bind(request_id, prefill.peer, hinted, least))
            else:
                continue
            placing.placed(request, before, self._tracker.assignment(request_id))

    def _reserve_decode_workers(self, placing: Round, limits: Limits, probe_id: str | None) -> None:
        """In the queue's order. A request that finds no room keeps the workers that could run it from those behind it;
        one that must stay away from another suspect does not. The round ends when all workers are kept so: where they
        are alike that is with the first, whatever the queue's length."""
        num_passed = 0
        for request_id in self._queue:
            request = self._tracker.request(request_id)
            has_delivered = self._tracker.has_delivered(request_id)
            group = self._groups.get(request_id) if has_delivered or request.generated_ids else None
            if not has_delivered and self._end_if_too_large(request, limits):
                continue
            is_suspect = self._tracker.is_suspect(request_id)
            in_pairs = request_id == probe_id and not self._sources.is_local_only
            decode = placing.choose_decode(request, group, is_suspect=is_suspect, in_pairs=in_pairs)
            if decode is not None:
                self._queue.remove(request_id, self._clock.now_s())
                self._groups[request_id] = decode.group
                takes_whole = decode.role is Role.UNIFIED or self._sources.is_local_only
                self._carry_out(self._tracker.reserve(request_id, decode.peer, takes_whole=takes_whole))
                placing.placed(request, {}, self._tracker.assignment(request_id))
            elif is_suspect and placing.has_suspects:
                continue
            else:
                placing.hold(request, group, in_pairs=in_pairs)
                num_passed += 1
                if placing.is_all_held or num_passed >= _MOST_PASSED:
                    return

    def _end_if_too_large(self, request: Request, limits: Limits) -> bool:
        """Requests that were taken before workers joined meet the arena's size here."""
        try:
            check_size(request, limits)
        except RequestTooLarge as error:
            self._carry_out(self._tracker.give_up(request.request_id, Ending.TOO_LARGE, str(error)))
            return True
        return False
