"""What the shared scheduler must know of prefill: a request holds its whole prompt's blocks and stops after one
token.
"""

from dataclasses import dataclass

from loopline.request import Request
from loopline.sched.policy import Demand


@dataclass(frozen=True)
class PrefillPolicy:
    """The blocks are kept after the first token, until the handoff has drained or was closed."""

    holds_after_first_token: bool = True
    shares_prefixes: bool = True

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        return Demand(tokens_now=num_known_tokens, tokens_max=num_known_tokens)
