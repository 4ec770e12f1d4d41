"""Where the roles differ: the one object that a worker hands to the shared scheduler."""

from dataclasses import dataclass
from typing import Protocol

from loopline.request import Request


@dataclass(frozen=True)
class Demand:
    """KV that a request asks for: tokens held at once, and tokens that it may grow to."""

    tokens_now: int
    tokens_max: int


class RolePolicy(Protocol):
    """What the scheduler must know of its worker's role."""

    @property
    def holds_after_first_token(self) -> bool:
        """True: a request stops after its first token and keeps its blocks until they are released."""
        ...

    def demand(self, request: Request) -> Demand:
        """KV that must be had before the request starts."""
        ...


@dataclass(frozen=True)
class UnifiedPolicy:
    """One engine does both: a request starts once its worst case is held or promised, so it can always finish."""

    holds_after_first_token: bool = False

    def demand(self, request: Request) -> Demand:
        return Demand(tokens_now=request.num_known_tokens, tokens_max=request.max_kv_tokens)
