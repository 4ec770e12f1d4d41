"""The straightforward way to do what the scheduler and the ledger do once or keep: the other side of each comparison.

Each function gives what its counterpart gives, so `loopline.bench.arms` can check that both sides agree. Nothing here
is used to serve.

Shape letters: S rows to choose from, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopline.kv.digests import BlockDigests
from loopline.kv.ledger import Allocation, Ledger
from loopline.sched.plan import StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from loopline.engine.sampler import Sampler


def hash_again(root: bytes, block_size: int, token_ids: Sequence[int]) -> list[bytes]:
    """Digests of a request's whole blocks, from its tokens, as if it had never been tried before."""
    digests = BlockDigests(root, block_size)
    digests.extend(token_ids)
    return list(digests.digests)


def count_free(num_holders: Sequence[int]) -> int:
    """Free blocks, by looking at the holder count of every block."""
    return sum(1 for count in num_holders if not count)


def begin_each(
    ledger: Ledger, allocations: Sequence[Allocation], positions: Sequence[int], depth: int, step: int
) -> None:
    """One call of the ledger per row before the step."""
    for allocation, position in zip(allocations, positions, strict=True):
        ledger.begin_run(allocation, position, 1, depth, step)


def mark_each(ledger: Ledger, allocations: Sequence[Allocation], positions: Sequence[int], depth: int) -> None:
    """One call of the ledger per row after the step."""
    for allocation, position in zip(allocations, positions, strict=True):
        ledger.mark_written(allocation, position, 1, depth)


def write_each_token(ledger: Ledger, allocation: Allocation, first: int, count: int, depth: int, step: int) -> None:
    """Two calls of the ledger per token of a chunk."""
    for position in range(first, first + count):
        ledger.begin_run(allocation, position, 1, depth, step)
        ledger.mark_written(allocation, position, 1, depth)


@dataclass(frozen=True)
class Running:
    """What a running request holds now and may grow to, in tokens."""

    num_tokens: int
    max_tokens: int


def growth_of(running: Sequence[Running], block_size: int) -> int:
    """Blocks that running requests may still grow by, summed anew."""
    total = 0
    for one in running:
        total += -(-one.max_tokens // block_size) - -(-one.num_tokens // block_size)
    return total


def argmax_each(logits: "Tensor") -> list[int]:
    """The likeliest token of each row of `logits` [S, V], asked for row by row."""
    return [int(row.argmax()) for row in logits]


def sample_each(samplers: Sequence["Sampler"], logits: "Tensor", plans: Sequence[StepPlan]) -> list[int]:
    """One call of a sampler per row of `logits` [S, V]; each row has its own, so that its parameters are kept, too."""
    token_ids: list[int] = []
    for row, (sampler, plan) in enumerate(zip(samplers, plans, strict=True)):
        token_ids += sampler.sample(logits[row : row + 1], plan).token_ids
    return token_ids
