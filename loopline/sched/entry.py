"""A request inside the scheduler, from the queue to its end. Private to `loopline.sched`."""

from dataclasses import dataclass
from enum import Enum

from loopline.kv.digests import BlockDigests
from loopline.kv.ledger import Allocation
from loopline.request import FinishReason, Request
from loopline.sched.plan import TokenHistory


class Phase(Enum):
    """What an entry needs next."""

    WAITING = "waiting"  # blocks
    PREFILL = "prefill"  # positions of its known tokens
    DECODE = "decode"  # one position a step
    HELD = "held"  # nothing: its first token is out, the blocks are being handed off


@dataclass(eq=False)
class Entry:
    """`token_ids` are prompt and answer so far; `num_computed` of their positions have KV, and `num_planned` will when
    the chunks in flight have ended. What it computed is lost with a preemption, what it generated is not."""

    request: Request
    token_ids: list[int]
    digests: BlockDigests | None  # None: nothing of it is shared
    phase: Phase = Phase.WAITING
    allocation: Allocation | None = None
    num_computed: int = 0
    num_planned: int = 0
    num_cached: int = 0  # tokens whose KV was found at admission
    is_counted: bool = False  # among the tokens that were looked for in the prefix cache
    num_passed: int = 0  # younger requests that were admitted before it while it stood first

    @classmethod
    def of(cls, request: Request, digests: BlockDigests | None) -> "Entry":
        known = [*request.prompt_ids, *request.generated_ids]
        if digests is not None:
            digests.extend(known)
        return cls(request, known, digests)

    @property
    def depth(self) -> int:
        return self.request.params.loops

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def wants_history(self) -> bool:
        params = self.request.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    def history(self) -> TokenHistory:
        """What penalties look at."""
        if not self.wants_history:
            return TokenHistory()
        num_prompt = len(self.request.prompt_ids)
        return TokenHistory(tuple(self.token_ids[:num_prompt]), tuple(self.token_ids[num_prompt:]))

    @property
    def num_written(self) -> int:
        """Positions with KV; a decoding entry's last token has none yet."""
        return len(self.token_ids) - 1 if self.phase is Phase.DECODE else self.num_computed

    def take(self, token_id: int) -> FinishReason | None:
        """Take the token after its known ones; says why the answer ends with it, if it does."""
        if token_id in self.request.params.stop_ids:
            return FinishReason.STOP
        self.token_ids.append(token_id)
        return FinishReason.LENGTH if self.num_generated >= self.request.params.max_tokens else None

    def token_loops_left(self) -> int:
        """Work to its most tokens."""
        return max(0, self.request.max_kv_tokens - self.num_written) * self.depth
