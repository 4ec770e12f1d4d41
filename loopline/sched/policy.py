"""Where the roles differ: the one object that a worker hands to the shared scheduler."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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

    @property
    def shares_prefixes(self) -> bool:
        """Whether this role finds and publishes cached prefixes, where the model allows it."""
        ...

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        """KV that must be had before a request with that many known tokens starts."""
        ...


@runtime_checkable
class HoldsBack(Protocol):
    """A policy that has this too is asked before each chunk; of one that has not, every request may be computed."""

    def may_compute(self, request_id: str) -> bool:
        """Whether the next chunk of that request's known tokens may be computed now. A request that may not keeps its
        blocks and its place; others go on. Whoever says no sees to it that the engine is stepped when that changes.
        """
        ...


@runtime_checkable
class SharesRoom(Protocol):
    """A policy that has this too is asked before a request is let in; of one that has not, every request may be."""

    def may_start(self, request_id: str, running: Collection[str], max_running: int, total_blocks: int) -> bool:
        """Whether that request may take a running slot and blocks beside those that are `running`, which hold theirs
        whether they are computed or reserved. One that may not is passed by others, and asked for again when one of
        those has ended: only they may stand in its way."""
        ...


@dataclass(frozen=True)
class UnifiedPolicy:
    """One engine does both: known tokens are held at once, the rest of the answer is promised."""

    holds_after_first_token: bool = False
    shares_prefixes: bool = True

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        return Demand(tokens_now=num_known_tokens, tokens_max=request.max_kv_tokens)
