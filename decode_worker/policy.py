"""What the shared scheduler must know of decode: known tokens are held at once, the rest of the answer is promised."""

from dataclasses import dataclass

from loopline.request import Request
from loopline.sched.policy import Demand


@dataclass(frozen=True)
class DecodePolicy:
    """A reservation covers the worst case, so an activated request can always finish."""

    holds_after_first_token: bool = False
    shares_prefixes: bool = True  # a handoff brings what is not cached here

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        return Demand(tokens_now=num_known_tokens, tokens_max=request.max_kv_tokens)
