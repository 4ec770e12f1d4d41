"""One step's budget in token-loops: tokens x depth, the unit in which a looped model's work is counted; and the share
of a step that prompts may take while others decode.

**The share.** Scheduling loop by loop would let s prompt tokens into each loop's tick. A submission of L fused loops
stands for L such ticks, so it may carry s tokens through all L loops: s x L token-loops. For s = 64: Ouro (L = 4) 64
tokens, 256 token-loops; Huginn (L = 32) 64 tokens, 2,048. How large a share keeps a step within a time is
`loopline.sched.share`'s to say.
"""

from collections import Counter

from loopline.sched.share import RowSteps


class StepBudget:
    """Counts down from `max_token_loops`. Decode rows are charged and never refused; prompt tokens get what is left,
    and a least share of each step, so that they end however many rows decode."""

    def __init__(self, max_token_loops: int, share: int | None = None, limit: "PromptLimit | None" = None) -> None:
        """`share`: prompt tokens that each loop of this step may carry; None: as many as the budget allows. `limit`: on
        all of the step's prompts."""
        self._left = max_token_loops
        self._share_left = share
        self._limit = limit

    def charge_decode(self, token_loops: int, least_left: int = 0) -> None:
        """Count rows that run in any case. `least_left`: token-loops that prompts keep beside them."""
        self._left = max(self._left - token_loops, least_left)

    def charge_prompt(self, num_tokens: int, depth: int) -> None:
        """Count tokens of a chunk."""
        self._left -= num_tokens * depth
        if self._share_left is not None:
            self._share_left -= num_tokens
        if self._limit is not None:
            self._limit.charge(num_tokens, depth)

    def tokens_left(self, depth: int) -> int:
        """Prompt tokens of this depth that still fit."""
        left = self._left // depth
        if self._share_left is not None:
            left = min(left, self._share_left)
        if self._limit is not None:
            left = min(left, self._limit.tokens_left(depth))
        return max(0, left)


class PromptLimit:
    """Token-loops of a step's prompts as they are computed: those of one depth are one pass, which is padded."""

    def __init__(self, token_loops: int, rows: RowSteps) -> None:
        self._token_loops = token_loops
        self._rows = rows
        self._num_tokens: Counter[int] = Counter()  # by depth

    def charge(self, num_tokens: int, depth: int) -> None:
        """Count tokens of a chunk."""
        self._num_tokens[depth] += num_tokens

    def tokens_left(self, depth: int) -> int:
        """Prompt tokens of this depth that still fit."""
        others = sum(self._rows.padded(count) * one for one, count in self._num_tokens.items() if one != depth)
        return self._rows.most(max(0, self._token_loops - others) // depth) - self._num_tokens[depth]


def share_token_loops(share: int, loops: int) -> int:
    """Token-loops that a submission of `loops` fused loops may carry for prompts, at `share` tokens a loop."""
    return share * loops


def chunk_end(first: int, end: int, most_tokens: int, block_size: int) -> int:
    """Where a chunk that starts at `first` ends: at most `most_tokens` further, on a block border where it can be one,
    or at `end`. Returns `first` when no token fits."""
    limit = first + most_tokens
    if limit >= end:
        return end
    on_border = limit - limit % block_size
    return on_border if on_border > first else limit
