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

    def demand(self, request: Request) -> Demand:
        return Demand(tokens_now=request.num_known_tokens, tokens_max=request.num_known_tokens)
