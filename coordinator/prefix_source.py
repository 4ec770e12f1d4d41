"""Where the KV that a decode worker lacks of a prompt comes from: the decision alone, a pure function of what is known
of both workers and of their link. The placer gathers the facts (`coordinator.router`) and carries out what is decided.

    local       the decode worker computes what it lacks
    recompute   a prefill worker computes what it lacks itself, and pushes what the decode worker lacks
    fetch       the same, but it first has what the decode worker has and it lacks pushed to it: less to compute

Estimates are in seconds until the decode worker has the whole prompt:

    local       (lacked by the decode worker x loops + prompts ahead of it there) / the decode worker's rate
    recompute   (lacked by the prefill worker x loops + prompts ahead) / the prefill worker's rate + pushed / link
    fetch       (lacked by both x loops + prompts ahead) / the prefill worker's rate + (fetched + pushed) / link

and HANDOFF_S for each handoff, in either direction. Rates are measured: of prompts by each worker while it computes
some (its load is in it) and for a while after, of the link when it was made.
"""

import math
from dataclasses import dataclass

from loopline.request import PrefixSource

AUTO = "auto"
HANDOFF_S = 0.005
"""What a handoff, and again a fetch, costs in messages and polls whatever its size."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What one worker is to prompts. `token_loops_per_s`: how fast it has computed some; 0: not known.
    `ahead_token_loops`: of prompts that it was given before. `cached_tokens`: of this one, that it has."""

    token_loops_per_s: float
    ahead_token_loops: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """All that the decision looks at. `prefill` None: no prefill worker has room now. `link_bytes_per_s` is between the
    two, either way; 0: not known."""

    known_tokens: int
    loops: int
    token_bytes: int
    decode: Prompts
    prefill: Prompts | None
    link_bytes_per_s: float = 0.0

    @property
    def lacked_tokens(self) -> int:
        """Known tokens that the decode worker does not have."""
        return self.known_tokens - self.decode.cached_tokens

    @property
    def fetchable_tokens(self) -> int:
        """Tokens that the decode worker has and the prefill worker, as far as is known, has not."""
        return 0 if self.prefill is None else max(0, self.decode.cached_tokens - self.prefill.cached_tokens)


@dataclass(frozen=True, kw_only=True)
class SourceRule:
    """How the way of a prompt is chosen. `choice`: a PrefixSource that is forced, or `auto`: the least estimate, in
    which `local` is only thought of where the decode worker lacks fewer than `local_below_tokens`."""

    choice: str = AUTO
    local_below_tokens: int = 0

    @property
    def is_local_only(self) -> bool:
        """Whether decode workers compute all prompts, and need no prefill worker."""
        return self.choice == PrefixSource.LOCAL

    def may_be_local(self, known_tokens: int) -> bool:
        """Whether a decode worker may compute this prompt where no prefill worker has room, whatever it has of it."""
        return self.is_local_only or (self.choice == AUTO and known_tokens < self.local_below_tokens)

    def choose(self, facts: SourceFacts) -> PrefixSource | None:
        """The way for one prompt, or None: it waits for a prefill worker. A fetch without anything to fetch is a
        recompute."""
        if self.choice == PrefixSource.LOCAL:
            return PrefixSource.LOCAL
        may_local = self.choice == AUTO and facts.lacked_tokens < self.local_below_tokens
        if facts.prefill is None:
            return PrefixSource.LOCAL if may_local else None
        may_fetch = self.choice != PrefixSource.RECOMPUTE and facts.fetchable_tokens > 0
        if self.choice != AUTO:
            return PrefixSource.FETCH if may_fetch else PrefixSource.RECOMPUTE
        ways = [PrefixSource.LOCAL] if may_local else []
        ways.append(PrefixSource.RECOMPUTE)
        ways += [PrefixSource.FETCH] if may_fetch else []
        estimates = estimated_s(facts)
        return ways[0] if estimates is None else min(ways, key=lambda way: estimates[way])


def least_fetch_tokens(choice: str, facts: SourceFacts) -> int:
    """How many tokens a prefill worker that is told to fetch must lack of what the decode worker has, so that it does:
    it alone knows. Forced: 1. `auto`: as many as cost more to compute than to move."""
    rate, link = 0.0, facts.link_bytes_per_s
    if facts.prefill is not None:
        rate = facts.prefill.token_loops_per_s or facts.decode.token_loops_per_s
    if choice != AUTO or not rate or not link:
        return 1
    saved_s = facts.loops / rate - facts.token_bytes / link  # a token
    return max(1, math.ceil(HANDOFF_S / saved_s)) if saved_s > 0 else max(1, facts.known_tokens)


def estimated_s(facts: SourceFacts) -> dict[PrefixSource, float] | None:
    """Seconds that each way would take where a prefill worker has room. A worker whose rate is not known is
    taken to be as fast as the other one; None where neither has, or the link's rate is not known."""
    prefill, decode = facts.prefill, facts.decode
    if prefill is None or not facts.link_bytes_per_s:
        return None
    prefill_rate = prefill.token_loops_per_s or decode.token_loops_per_s
    decode_rate = decode.token_loops_per_s or prefill.token_loops_per_s
    if not prefill_rate:
        return None

    def computed_s(num_tokens: int, worker: Prompts, rate: float) -> float:
        return (num_tokens * facts.loops + worker.ahead_token_loops) / rate

    def moved_s(num_tokens: int) -> float:
        return num_tokens * facts.token_bytes / facts.link_bytes_per_s

    lacked_there = facts.known_tokens - prefill.cached_tokens
    lacked_by_both = lacked_there - facts.fetchable_tokens
    pushed_s = HANDOFF_S + moved_s(facts.lacked_tokens)
    fetched_s = HANDOFF_S + moved_s(facts.fetchable_tokens)
    return {
        PrefixSource.LOCAL: computed_s(facts.lacked_tokens, decode, decode_rate),
        PrefixSource.RECOMPUTE: computed_s(lacked_there, prefill, prefill_rate) + pushed_s,
        PrefixSource.FETCH: fetched_s + computed_s(lacked_by_both, prefill, prefill_rate) + pushed_s,
    }
