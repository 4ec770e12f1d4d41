"""What the workers of one snapshot can still take, and who may get a request: the rules that no policy can break.

Room is what a worker said that it has (its arena, its running slots) less the tracker's requests that were given to it,
and less the blocks that its last heartbeat had in quarantine. None of it is a counter that a lost message could leak.
The worker has the last word: it may answer "no room", and is then skipped until its next heartbeat.

No worker has two suspects: of the requests that a worker was lost with, one may be the reason, and would take the
others with it again and again until all of them have had their attempts. Who is avoided is gone past while another
worker that is ready does the same, with room or without; a worker whose links are all avoided counts as avoided.

A request that finds no room holds every worker that would have room for it if it had nothing else to do: nobody behind
it in the queue gets these, so that it is not passed for ever by smaller ones, and all go on with the other workers. One
that nobody here could run, whatever ends, holds nobody.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.effects import Assigned
from coordinator.snapshot import ClusterSnapshot, WorkerView
from loopline.identity import Fingerprint, Role, WorkerId, WorkerState
from loopline.request import Request
from loopline.settings import peer_slots

_MOST_SIZES = 16
"""Sizes that have found no room and are remembered in a round: more would cost more than a look at the workers."""


def has_decode_room(view: WorkerView, request: Request) -> bool:
    """Whether a decode worker has a slot and blocks for one more request, beside all that it was given."""
    if view.sums.num_requests >= view.capacity.max_running:
        return False
    needed = view.sums.most_blocks + view.blocks_to_take(request)
    return needed <= view.usable_blocks and view.fits_alone(request)


@dataclass(eq=False, slots=True)
class WorkerRoom:
    """One worker's books in a round of placing. Policies read them; only `Room` writes."""

    view: WorkerView
    group: int
    name: str
    takes_whole: bool  # it computes prompts itself, and needs no prefill worker
    num_requests: int
    num_awaiting: int
    num_suspects: int
    token_loops: int  # work that was given to it and is left
    prompt_token_loops: int  # of it, that of prompts
    num_blocks: int  # on a prefill worker: of known tokens; on others: what it keeps for them
    usable_blocks: int
    max_running: int
    by_decode: dict[WorkerId, tuple[int, int]]  # on a prefill worker: (requests, blocks)
    is_held: bool = False  # kept for a request that found no room

    @classmethod
    def of(cls, view: WorkerView, group: int, *, takes_whole: bool = False) -> "WorkerRoom":
        sums = view.sums
        return cls(
            view=view,
            group=group,
            name=view.peer.name,
            takes_whole=takes_whole,
            num_requests=sums.num_requests,
            num_awaiting=sums.num_awaiting,
            num_suspects=sums.num_suspects,
            token_loops=sums.token_loops,
            prompt_token_loops=sums.prompt_token_loops,
            num_blocks=sums.most_blocks if view.role.generates else sums.known_blocks,
            usable_blocks=view.usable_blocks,
            max_running=view.capacity.max_running,
            by_decode=dict(sums.by_decode),
        )

    @property
    def worker(self) -> WorkerId:
        return self.view.peer.worker

    @property
    def free_slots(self) -> int:
        return max(0, self.max_running - self.num_requests)

    def add(self, row: Assigned, sign: int) -> None:
        """Take a row up, or with `sign` -1 off again."""
        view = self.view
        blocks = view.blocks_kept_for(row) if view.role.generates else view.blocks_for(row.num_known_tokens)
        self.num_requests += sign
        self.num_awaiting += sign * row.awaits_prefill
        self.num_suspects += sign * row.is_suspect
        self.token_loops += sign * row.token_loops
        self.prompt_token_loops += sign * row.prompt_token_loops
        self.num_blocks += sign * blocks
        if row.decode is not None:
            requests, held = self.by_decode.get(row.decode, (0, 0))
            self.by_decode[row.decode] = (requests + sign, held + sign * blocks)


class Candidates:
    """Workers that may get one request, in the order of the snapshot. Whether one has room is found out when it is
    looked at, so a policy that looks at two does not pay for a thousand."""

    def __init__(
        self, workers: Sequence[WorkerRoom], is_able: Callable[[WorkerRoom], bool], content: tuple[int, ...]
    ) -> None:
        """`content`: numbers that stand for what the snapshot holds."""
        self._workers = workers
        self._is_able = is_able
        self.content = content

    def __iter__(self) -> Iterator[WorkerRoom]:
        return filter(self._is_able, self._workers)

    @property
    def num_workers(self) -> int:
        """Workers that may be looked at, with room or without."""
        return len(self._workers)

    def at(self, index: int) -> WorkerRoom | None:
        """The worker at an index below `num_workers`; None if it has no room."""
        room = self._workers[index]
        return room if self._is_able(room) else None

    def find(self, worker: WorkerId) -> WorkerRoom | None:
        """This worker, if it has room."""
        return next((room for room in self._workers if room.worker == worker and self._is_able(room)), None)

    def may_be(self, room: WorkerRoom) -> bool:
        """Whether it is one of them."""
        return room in self._workers and self._is_able(room)  # eq=False: compared by identity


@dataclass(eq=False, slots=True)
class _Pairing:
    """The prefill workers that decode workers with the same links can use, and what is left of these."""

    prefill: list[WorkerRoom]
    is_last_resort: bool  # there is no link to one that is ready and not avoided
    most_tokens: int  # of the longest prompt that one of them can hold alone
    ever_tokens: int  # the same, with those that said "no room" just now
    num_free: int = 0  # slots
    slots: int = 0  # that one decode worker can still take of them, if it has none yet
    less: dict[WorkerId, int] = field(default_factory=dict)  # by how much that is less for one that has some


class Room:
    """The books of one round: made of a snapshot, written on with every request that is given. A decision looks at
    sums, never at requests."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot
        self._groups: dict[Fingerprint, int] = {}
        self._group_ids: dict[int, int] = {}  # by the identity of a fingerprint that the snapshot keeps alive
        generating = [view for role in Role if role.generates for view in snapshot.with_role(role)]
        all_whole = snapshot.sources.is_local_only
        self._decode = [  # unified ones, too
            WorkerRoom.of(view, self._group(view.group), takes_whole=all_whole or view.role is Role.UNIFIED)
            for view in generating
        ]
        prefill = [WorkerRoom.of(view, self._group(view.group)) for view in snapshot.with_role(Role.PREFILL)]
        self._prefill = {room.worker: room for room in prefill}
        self._by_worker = {room.worker: room for room in (*self._decode, *prefill)}
        self._pairings: dict[object, _Pairing] = {}
        self._pairing_of: dict[WorkerId, _Pairing] = {}
        self._with_bad_link = {decode for _, decode in snapshot.avoided.links}
        self._takers: dict[tuple[int | None, bool], list[WorkerRoom]] = {}
        self._claimed: dict[int, int] | None = None  # prefill slots by group; None: to be counted
        self._homeless: list[tuple[int, int]] = []  # (known, most) tokens of requests that found no room anywhere
        self._num_given = sum(room.num_requests for room in self._by_worker.values())
        self._token_loops = sum(room.token_loops for room in self._by_worker.values())

    def find(self, worker: WorkerId) -> WorkerRoom | None:
        return self._by_worker.get(worker)

    @property
    def has_suspects(self) -> bool:
        """Whether a worker has been given a suspect."""
        return any(room.num_suspects for room in self._by_worker.values())

    @property
    def is_all_held(self) -> bool:
        """Whether each worker that takes work is kept for some request."""
        return all(room.is_held for room in self._decode_takers(None, self._snapshot.sources.may_be_local(0)))

    def is_hopeless(self, request: Request) -> bool:
        """Whether a request no larger than this one has found no room anywhere, and holds what this one would hold."""
        known, most = request.num_known_tokens, request.max_kv_tokens
        return any(known >= other_known and most >= other_most for other_known, other_most in self._homeless)

    def hold(self, request: Request, group: Fingerprint | None, *, in_pairs: bool = False) -> None:
        """The request has found no room: keep for it whoever could run it. The arguments are those of `for_decode`."""
        if self.is_hopeless(request):
            return
        for room in self._takers_for(request, group, in_pairs):
            room.is_held = room.is_held or self._could_run(room, request)
        if group is None and not in_pairs:
            self._homeless = [*self._homeless[1 - _MOST_SIZES :], (request.num_known_tokens, request.max_kv_tokens)]

    def for_decode(
        self, request: Request, group: Fingerprint | None, is_suspect: bool, *, in_pairs: bool = False
    ) -> Candidates:
        """Workers that may be asked for blocks: decode workers whose prefill workers have slots that nobody claims, and
        those that may compute the prompt themselves. `group`: only workers that compute the same. `in_pairs`: only
        those of pairs while one is ready."""
        claimed = self._count_claims()
        num_known_tokens = request.num_known_tokens
        may_be_local = self._snapshot.sources.may_be_local(num_known_tokens)

        def is_able(room: WorkerRoom) -> bool:
            if room.is_held or room.num_requests >= room.max_running or (is_suspect and room.num_suspects):
                return False
            if room.num_blocks + room.view.blocks_to_take(request) > room.usable_blocks:
                return False
            if not room.view.fits_alone(request):
                return False
            if room.takes_whole or may_be_local:
                return True
            pairing = self._pairing(room)
            if num_known_tokens > pairing.most_tokens:
                return False
            return claimed[room.group] < pairing.num_free and room.num_awaiting < self._slots(room, pairing)

        return Candidates(self._takers_for(request, group, in_pairs), is_able, self._content())

    def for_prefill(self, request: Request, decode: WorkerRoom, is_suspect: bool) -> Candidates:
        """Prefill workers that may be bound for a request that holds a reservation on `decode`."""
        num_known_tokens, worker = request.num_known_tokens, decode.worker

        def is_able(room: WorkerRoom) -> bool:
            if self._slots_for(worker, room) <= 0 or (is_suspect and room.num_suspects):
                return False
            return self._has_prefill_blocks(worker, room, room.view.blocks_for(num_known_tokens))

        return Candidates(self._pairing(decode).prefill, is_able, self._content())

    def given(self, before: Mapping[WorkerId, Assigned], after: Mapping[WorkerId, Assigned]) -> None:
        """A request's rows have changed: those of `before` are in the books, those of `after` are now."""
        for rows, sign in ((before, -1), (after, 1)):
            for worker, row in rows.items():
                room = self._by_worker.get(worker)
                if room is not None:
                    self._write(room, row, sign)

    # ---- inside

    def _write(self, room: WorkerRoom, row: Assigned, sign: int) -> None:
        self._num_given += sign
        self._token_loops += sign * row.token_loops
        if room.view.role is Role.PREFILL:
            room.add(row, sign)
            self._claimed = None
            return
        before = self._claim(room) if self._claimed is not None else 0
        room.add(row, sign)
        if self._claimed is not None:
            self._claimed[room.group] += self._claim(room) - before

    def _content(self) -> tuple[int, ...]:
        return len(self._by_worker), self._num_given, self._token_loops

    def _group(self, fingerprint: Fingerprint) -> int:
        """A number for a group: hashing a whole fingerprint is dear, and most workers share one object."""
        number = self._group_ids.get(id(fingerprint))
        if number is None:
            number = self._groups.setdefault(fingerprint, len(self._groups))
            self._group_ids[id(fingerprint)] = number
        return number

    def has_pair(self, decode: WorkerRoom) -> bool:
        """Whether a prefill worker that is ready can be bound for its requests."""
        return decode.view.role is Role.DECODE and bool(self._pairing(decode).prefill)

    def _takers_for(self, request: Request, group: Fingerprint | None, in_pairs: bool) -> list[WorkerRoom]:
        may_be_local = self._snapshot.sources.may_be_local(request.num_known_tokens)
        takers = self._decode_takers(None if group is None else self._group(group), may_be_local)
        return [room for room in takers if self.has_pair(room)] or takers if in_pairs else takers

    def _could_run(self, room: WorkerRoom, request: Request) -> bool:
        """Whether it would have room for the request, with nothing else to do."""
        if not room.view.fits_alone(request):
            return False
        known = request.num_known_tokens
        is_alone = room.takes_whole or self._snapshot.sources.may_be_local(known)
        return is_alone or known <= self._pairing(room).ever_tokens

    def _decode_takers(self, group: int | None, with_unpaired: bool) -> list[WorkerRoom]:
        """Decode workers that take work; those that are avoided only where no other one is ready. `with_unpaired`:
        those without a prefill worker, too."""
        key = group, with_unpaired
        if key not in self._takers:
            states = (WorkerState.READY, *([WorkerState.STARTING] if with_unpaired else []))
            ready = [
                room for room in self._decode if room.view.state in states and (group is None or room.group == group)
            ]
            good = [room for room in ready if not self._is_avoided(room)]
            self._takers[key] = [room for room in good or ready if not room.view.refused]
        return self._takers[key]

    def _is_avoided(self, room: WorkerRoom) -> bool:
        if room.worker in self._snapshot.avoided.workers:
            return True
        return not room.takes_whole and self._pairing(room).is_last_resort

    def _pairing(self, decode: WorkerRoom) -> _Pairing:
        """Of a decode worker; made once for all that have the same links, as most have."""
        worker = decode.worker
        pairing = self._pairing_of.get(worker)
        if pairing is None:
            key = worker if worker in self._with_bad_link else (id(decode.view.ready_pairs), decode.group)
            pairing = self._pairings.get(key)
            if pairing is None:
                pairing = self._pairings[key] = self._pair(decode)
            self._pairing_of[worker] = pairing
        return pairing

    def _pair(self, decode: WorkerRoom) -> _Pairing:
        avoided, worker = self._snapshot.avoided, decode.worker
        found = (self._prefill.get(other) for other in decode.view.ready_pairs)
        ready = [
            room
            for room in found
            if room is not None and room.group == decode.group and room.view.state is WorkerState.READY
        ]
        good = [
            room for room in ready if room.worker not in avoided.workers and (room.worker, worker) not in avoided.links
        ]
        prefill = [room for room in good or ready if not room.view.refused]
        return _Pairing(prefill, not good, _most_tokens(prefill), _most_tokens(good or ready))

    def _count_claims(self) -> dict[int, int]:
        """Slots of prefill workers that requests with a reservation will take next, by group. A decode worker whose
        share is used up leaves the rest to others, however many of its requests wait."""
        if self._claimed is None:
            for room in self._decode:
                self._pairing(room)
            for pairing in self._pairings.values():
                self._count_slots(pairing)
            self._claimed = dict.fromkeys(range(len(self._groups)), 0)
            for room in self._decode:
                if room.num_awaiting:
                    self._claimed[room.group] += self._claim(room)
        return self._claimed

    def _count_slots(self, pairing: _Pairing) -> None:
        pairing.num_free = sum(room.free_slots for room in pairing.prefill)
        pairing.slots = 0
        pairing.less = {}
        for room in pairing.prefill:
            most = self._most_slots(room)
            pairing.slots += most
            for decode in room.by_decode:
                less = most - self._slots_for(decode, room)
                pairing.less[decode] = pairing.less.get(decode, 0) + less

    def _claim(self, decode: WorkerRoom) -> int:
        return min(decode.num_awaiting, self._slots(decode, self._pairing(decode)))

    def _slots(self, decode: WorkerRoom, pairing: _Pairing) -> int:
        """Requests that the prefill workers paired with `decode` can still take for it."""
        return pairing.slots - pairing.less.get(decode.worker, 0)

    def _most_slots(self, prefill: WorkerRoom) -> int:
        """What a decode worker that it has nothing of can still have of it: one of several has a share."""
        if len(prefill.view.ready_pairs) < 2:
            return prefill.free_slots
        return min(prefill.free_slots, peer_slots(prefill.max_running, self._snapshot.peer_share))

    def _slots_for(self, decode: WorkerId, prefill: WorkerRoom) -> int:
        """Requests that this prefill worker can still take for `decode`."""
        free = prefill.free_slots
        if len(prefill.view.ready_pairs) < 2:
            return free
        given, _ = prefill.by_decode.get(decode, (0, 0))
        return max(0, min(free, peer_slots(prefill.max_running, self._snapshot.peer_share) - given))

    def _has_prefill_blocks(self, decode: WorkerId, prefill: WorkerRoom, needed: int) -> bool:
        """Whether a prompt fits beside all that the worker was given; one of several decode workers has a share, and
        one request of it always fits, as the worker's own gate has it."""
        if prefill.num_blocks + needed > prefill.usable_blocks:
            return False
        requests, held = prefill.by_decode.get(decode, (0, 0))
        if not requests or len(prefill.view.ready_pairs) < 2:
            return True
        return held + needed <= self._snapshot.peer_share * prefill.usable_blocks


def _most_tokens(prefill: Sequence[WorkerRoom]) -> int:
    return max((room.usable_blocks * room.view.capacity.block_size for room in prefill), default=0)
