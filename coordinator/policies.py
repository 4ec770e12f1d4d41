"""Which of the workers with room gets a request: the policies that `routing.policy` names.

A policy prefers, and nothing else: it sees workers that may get the request, and whatever it says the rules of
`coordinator.room` hold. Each is a pure function of the request, the candidates and the hints, so the same moment gives
the same answer. None waits for a worker without room: what is first in line goes to any that has some.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from coordinator.room import Candidates, WorkerRoom
from loopline.identity import WorkerId
from loopline.request import Request

_DRAW_BYTES = 8
_DRAWS = 8  # places that are drawn until two of them have room


@dataclass(frozen=True)
class Hints:
    """What is known besides the snapshot; nothing of it need be true any more."""

    cached_tokens: Callable[[WorkerRoom], int]
    """Tokens from the first on that the worker most likely has in its prefix cache."""
    session_worker: WorkerId | None
    """Of this role: who had the last request with the same session."""


class Policy(Protocol):
    """None: it prefers nobody. Candidates are never empty of places, but none of them may have room."""

    needs_prefixes: bool
    """Whether workers have to say what their prefix caches hold."""

    def choose_decode(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None: ...

    def choose_prefill(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None: ...


class LeastWork:
    """The fewest token-loops that were given and are left."""

    needs_prefixes = False

    def choose_decode(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return _least_work(candidates)

    def choose_prefill(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return _least_work(candidates)


class PowerOfTwo:
    """The one with less work of two that are drawn (Mitzenmacher 2001), keyed by request and snapshot."""

    needs_prefixes = False

    def choose_decode(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(request, candidates, "decode")

    def choose_prefill(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(request, candidates, "prefill")

    def _choose(self, request: Request, candidates: Candidates, role: str) -> WorkerRoom | None:
        key = f"{role} {request.request_id} {request.attempt} {candidates.content}"
        draws = blake2b(key.encode(), digest_size=_DRAWS * _DRAW_BYTES).digest()
        drawn: list[WorkerRoom] = []
        for first in range(0, len(draws), _DRAW_BYTES):
            index = int.from_bytes(draws[first : first + _DRAW_BYTES]) % candidates.num_workers
            room = candidates.at(index)
            if room is not None and room not in drawn:
                drawn.append(room)
            if len(drawn) == 2:
                break
        return _least_work(drawn or candidates)


class PrefixAware:
    """The fewest token-loops until the request's prompt is done there: those of its tokens that the worker has not
    cached, and the worker's other work times a weight."""

    needs_prefixes = True

    def __init__(self, load_weight: float = 1.0) -> None:
        self._load_weight = load_weight

    def choose_decode(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(request, candidates, hints)

    def choose_prefill(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(request, candidates, hints)

    def _choose(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        loops, known = request.params.loops, request.num_known_tokens

        def score(room: WorkerRoom) -> tuple[float, int, str]:
            own = max(1, known - hints.cached_tokens(room)) * loops  # the last token is computed in any case
            return (own + self._load_weight * room.token_loops, room.num_requests, room.name)

        return min(candidates, key=score, default=None)


class SessionAffinity:
    """The worker of the session's last turn; the least work where it has no room, or there is no session."""

    needs_prefixes = False

    def choose_decode(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(candidates, hints)

    def choose_prefill(self, request: Request, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        return self._choose(candidates, hints)

    def _choose(self, candidates: Candidates, hints: Hints) -> WorkerRoom | None:
        last = None if hints.session_worker is None else candidates.find(hints.session_worker)
        return last or _least_work(candidates)


def make_policy(name: str, load_weight: float = 1.0) -> Policy:
    """The policy that `routing.policy` names. Raises KeyError for a name that the configuration does not allow."""
    if name == "prefix_aware":
        return PrefixAware(load_weight)
    plain: dict[str, type[LeastWork] | type[PowerOfTwo] | type[SessionAffinity]] = {
        "least_work": LeastWork,
        "power_of_two": PowerOfTwo,
        "session_affinity": SessionAffinity,
    }
    return plain[name]()


def _least_work(candidates: Iterable[WorkerRoom]) -> WorkerRoom | None:
    """The fewest token-loops; ties go to the fewest requests, then to the name."""
    return min(candidates, key=lambda room: (room.token_loops, room.num_requests, room.name), default=None)
