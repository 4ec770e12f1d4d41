"""One step's budget in token-loops: tokens x depth, the unit in which a looped model's work is counted; and the share
of a step that prompts may take while others decode.

**The share.** Scheduling loop by loop would let s prompt tokens into each loop's tick. A submission of L fused loops
stands for L such ticks, so it may carry s tokens through all L loops: s x L token-loops. For s = 64: Ouro (L = 4) 64
tokens, 256 token-loops; Huginn (L = 32) 64 tokens, 2,048.
"""

from dataclasses import dataclass


class StepBudget:
    """Counts down from `max_token_loops`. Decode rows are charged and never refused; prompt tokens get what is left."""

    def __init__(self, max_token_loops: int, share: int | None = None) -> None:
        """`share`: prompt tokens that each loop of this step may carry; None: as many as the budget allows."""
        self._left = max_token_loops
        self._share_left = share

    def charge_decode(self, token_loops: int) -> None:
        """Count rows that run in any case."""
        self._left -= token_loops

    def charge_prompt(self, num_tokens: int, depth: int) -> None:
        """Count tokens of a chunk."""
        self._left -= num_tokens * depth
        if self._share_left is not None:
            self._share_left -= num_tokens

    def tokens_left(self, depth: int) -> int:
        """Prompt tokens of this depth that still fit."""
        left = max(0, self._left // depth)
        return left if self._share_left is None else max(0, min(left, self._share_left))


def share_token_loops(share: int, loops: int) -> int:
    """Token-loops that a submission of `loops` fused loops may carry for prompts, at `share` tokens a loop."""
    return share * loops


@dataclass(frozen=True)
class StepCost:
    """What steps were measured to take: the decode rows alone, and each token-loop of prompt on top, in seconds."""

    decode_s: float
    prompt_token_loop_s: float


def share_within(cost: StepCost, bound_s: float, loops: int) -> int:
    """The largest share with which a step stays within `bound_s`; at least 1, so that prompts always progress."""
    spare_s = bound_s - cost.decode_s
    if spare_s <= 0 or cost.prompt_token_loop_s <= 0:
        return 1
    return max(1, int(spare_s / (cost.prompt_token_loop_s * loops)))


class StepMeter:
    """Running averages of step cost, from which the share is derived. Fed by whoever times steps."""

    _WEIGHT = 0.2  # of a new measurement

    def __init__(self) -> None:
        self._decode_s = 0.0
        self._prompt_token_loop_s = 0.0

    @property
    def cost(self) -> StepCost:
        return StepCost(self._decode_s, self._prompt_token_loop_s)

    def observe(self, has_decode: bool, prompt_token_loops: int, seconds: float) -> None:
        """One step took `seconds`."""
        if not prompt_token_loops:
            self._decode_s = self._mix(self._decode_s, seconds)
        else:
            base_s = self._decode_s if has_decode else 0.0
            each_s = max(0.0, seconds - base_s) / prompt_token_loops
            self._prompt_token_loop_s = self._mix(self._prompt_token_loop_s, each_s)

    def _mix(self, old: float, new: float) -> float:
        return new if not old else old + self._WEIGHT * (new - old)


def chunk_end(first: int, end: int, most_tokens: int, block_size: int) -> int:
    """Where a chunk that starts at `first` ends: at most `most_tokens` further, on a block border where it can be one,
    or at `end`. Returns `first` when no token fits."""
    limit = first + most_tokens
    if limit >= end:
        return end
    on_border = limit - limit % block_size
    return on_border if on_border > first else limit
