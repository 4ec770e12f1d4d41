"""What the shared scheduler must know of prefill: a request holds its whole prompt's blocks and stops after one
token.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from loopline.request import Request
from loopline.sched.policy import Demand
from prefill_worker.gate import PushGate


@dataclass(frozen=True)
class PrefillPolicy:
    """The blocks are kept after the first token, until the handoff has drained or was closed. A request whose pushes
    would wait is held back, and one for a peer that has its share of the worker is not let in; `gate` is the one that
    the worker's `HandoffOut` writes."""

    holds_after_first_token: bool = True
    shares_prefixes: bool = True
    gate: PushGate = field(default_factory=PushGate)

    def demand(self, request: Request, num_known_tokens: int) -> Demand:
        return Demand(tokens_now=num_known_tokens, tokens_max=num_known_tokens)

    def may_start(self, request_id: str, running: Collection[str], max_running: int, total_blocks: int) -> bool:
        return self.gate.may_start(request_id, running, max_running, total_blocks)

    def may_compute(self, request_id: str) -> bool:
        return self.gate.may_compute(request_id)
