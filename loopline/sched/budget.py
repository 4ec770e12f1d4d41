"""One step's budget in token-loops: tokens x depth, the unit in which a looped model's work is counted."""


class StepBudget:
    """Counts down from `max_token_loops`. Decode rows are charged and never refused; prompt tokens get what is left."""

    def __init__(self, max_token_loops: int) -> None:
        self._left = max_token_loops

    def charge(self, num_tokens: int, depth: int) -> None:
        """Count tokens that run in any case."""
        self._left -= num_tokens * depth

    def tokens_left(self, depth: int) -> int:
        """Tokens of this depth that still fit."""
        return max(0, self._left // depth)


def chunk_end(first: int, end: int, most_tokens: int, block_size: int) -> int:
    """Where a chunk that starts at `first` ends: at most `most_tokens` further, on a block border or at `end`.

    Returns `first` when not even the rest of the current block fits.
    """
    limit = first + most_tokens
    if limit >= end:
        return end
    return max(first, limit - limit % block_size)
