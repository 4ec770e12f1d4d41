"""The straightforward ways to do what the scheduler, the ledger and the sampler do once, keep or do for all rows; and
each as a race against ours.

Both sides of a race give the same, and `loopline.bench.host`, which runs them, checks that. Nothing here serves.

Shape letters: S rows to choose from, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from loopline.errors import InvariantBroken
from loopline.kv.digests import BlockDigests, prefix_root
from loopline.kv.ledger import Allocation, Ledger
from loopline.request import Request, SamplingParams
from loopline.sched.plan import DecodeRows, Segment, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from loopline.engine.sampler import Sampler


BLOCK_SIZE, LOOPS = 16, 4
_CANDIDATES = 16  # waiting requests that one tick looks at
_NEEDS = 33  # tokens of a waiting request
_HELD_TOKENS, _MOST_TOKENS = 160, 480  # of a running one


class Arm(StrEnum):
    """What is compared: the naive side, and ours."""

    REHASH = "rehash every attempt / digests kept"
    FREE = "scan for free blocks / count kept"
    ROWS = "ledger calls per row / columns"
    GROWTH = "growth summed per candidate / promise kept"
    CHUNK = "ledger calls per token / per chunk"
    ARGMAX = "argmax per row / batched"
    SAMPLER = "sampler per row / batched"


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


# ---- both sides of each comparison


@dataclass(frozen=True)
class Race:
    """Two ways to the same: `naive` and `ours` give equal values when they are called equally often."""

    arm: Arm
    size: str
    naive: Callable[[], object]
    ours: Callable[[], object]
    ours_calls: int = 1  # calls of ours that are timed as one, where one is too short to time


def rehash(num_tokens: int) -> Race:
    """One attempt to let a request in that does not fit."""
    ledger = Ledger(-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE)
    ledger.reserve(num_tokens, num_tokens)
    root, token_ids = prefix_root("bench"), list(range(num_tokens))
    kept = BlockDigests(root, BLOCK_SIZE)
    kept.extend(token_ids)

    def naive() -> object:
        return ledger.reserve(num_tokens, num_tokens, hash_again(root, BLOCK_SIZE, token_ids), LOOPS)

    def ours() -> object:
        return ledger.reserve(num_tokens, num_tokens, list(kept.digests), LOOPS)

    return Race(Arm.REHASH, f"{num_tokens:,} tokens", naive, ours)


def free_count(num_blocks: int) -> Race:
    num_held = num_blocks // 2 if num_blocks < 1000 else 500
    ledger = Ledger(num_blocks, BLOCK_SIZE)
    ledger.reserve(num_held * BLOCK_SIZE, 0)
    num_holders = [1] * num_held + [0] * (num_blocks - num_held)
    return Race(
        Arm.FREE, f"{num_blocks:,} blocks", lambda: count_free(num_holders), lambda: ledger.num_free_blocks, 100
    )


def promise(num_running: int) -> Race:
    """One tick's look at waiting requests that do not fit beside what the running ones may grow to."""
    running = [Running(_HELD_TOKENS, _MOST_TOKENS)] * num_running
    ledger = Ledger(num_running * _MOST_TOKENS // BLOCK_SIZE, BLOCK_SIZE)
    for one in running:
        ledger.reserve(one.num_tokens, one.max_tokens)

    def naive() -> object:
        growths = []
        for _ in range(_CANDIDATES):
            growths.append(growth_of(running, BLOCK_SIZE))
            ledger.reserve(_NEEDS, _NEEDS)
        return growths

    def ours() -> object:
        growths = []
        for _ in range(_CANDIDATES):
            growths.append(ledger.num_promised_blocks)
            ledger.reserve(_NEEDS, _NEEDS)
        return growths

    return Race(Arm.GROWTH, f"{num_running} running", naive, ours)


def rows(num_rows: int, num_calls: int) -> Race:
    """The books of one decode step, for as many steps as there are calls."""
    one, other = _Writes(num_rows, num_calls), _Writes(num_rows, num_calls)
    return Race(Arm.ROWS, f"{num_rows} decoding", one.each, other.columns)


def chunk(num_tokens: int) -> Race:
    """The books of one chunk of a prompt."""
    one, other = _Chunks(num_tokens), _Chunks(num_tokens)
    return Race(Arm.CHUNK, f"{num_tokens:,} tokens", one.each, other.whole)


class _Writes:
    """Requests of which each call writes the next position, in whichever way."""

    def __init__(self, num_rows: int, num_calls: int) -> None:
        most = num_calls + 1  # and one to see that both sides agree
        self._ledger = Ledger(num_rows * -(-most // BLOCK_SIZE), BLOCK_SIZE)
        self._allocations = [_reserved(self._ledger, most) for _ in range(num_rows)]
        self._rows = np.array([self._ledger.row_of(one) for one in self._allocations], np.int64)
        self._positions = np.zeros(num_rows, np.int64)
        self._step = 0

    def each(self) -> int:
        positions = [self._step] * len(self._allocations)
        self._step += 1
        begin_each(self._ledger, self._allocations, positions, LOOPS, self._step)
        mark_each(self._ledger, self._allocations, positions, LOOPS)
        return self._ledger.written_tokens(self._allocations[-1], LOOPS)

    def columns(self) -> int:
        self._step += 1
        self._ledger.begin_rows(self._rows, self._positions, LOOPS, self._step)
        self._ledger.mark_rows(self._rows, self._positions, LOOPS)
        self._positions = self._positions + 1
        return self._ledger.written_tokens(self._allocations[-1], LOOPS)


class _Chunks:
    """A prompt of which each call writes the next chunk, in whichever way; a new one once it is written."""

    _CHUNKS = 64

    def __init__(self, num_tokens: int) -> None:
        self._count = num_tokens
        self._ledger = Ledger(-(-self._CHUNKS * num_tokens // BLOCK_SIZE), BLOCK_SIZE)
        self._allocation = _reserved(self._ledger, self._CHUNKS * num_tokens)
        self._step = 0

    def each(self) -> int:
        first = self._next()
        write_each_token(self._ledger, self._allocation, first, self._count, LOOPS, self._step)
        return self._ledger.written_tokens(self._allocation, LOOPS)

    def whole(self) -> int:
        first = self._next()
        self._ledger.begin_run(self._allocation, first, self._count, LOOPS, self._step)
        self._ledger.mark_written(self._allocation, first, self._count, LOOPS)
        return self._ledger.written_tokens(self._allocation, LOOPS)

    def _next(self) -> int:
        index = self._step % self._CHUNKS
        if self._step and not index:
            self._ledger.release(self._allocation)
            self._ledger.step_done(self._step)
            self._allocation = _reserved(self._ledger, self._CHUNKS * self._count)
        self._step += 1
        return index * self._count


def _reserved(ledger: Ledger, num_tokens: int) -> Allocation:
    allocation = ledger.reserve(num_tokens, num_tokens)
    if allocation is None:
        raise InvariantBroken(f"{ledger.total_blocks} blocks have no room for {num_tokens} tokens")
    return allocation


def argmax(num_rows: int, vocab_size: int) -> Race:
    import torch

    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0))
    return Race(
        Arm.ARGMAX,
        f"{num_rows} rows x {vocab_size:,}",
        lambda: argmax_each(logits),
        lambda: logits.argmax(dim=1).tolist(),
    )


def sampled(num_rows: int, vocab_size: int) -> Race:
    import torch

    from loopline.engine.sampler import Sampler

    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
    )
    chosen = [replace(kinds[row % len(kinds)], seed=row, loops=LOOPS) for row in range(num_rows)]
    requests = [Request(request_id=f"row{row}", prompt_ids=(0,), params=one) for row, one in enumerate(chosen)]
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0))
    sampler, samplers = Sampler(vocab_size, "cpu"), [Sampler(vocab_size, "cpu") for _ in requests]
    plan, plans = _decode_plan(requests), [_decode_plan([one]) for one in requests]
    return Race(
        Arm.SAMPLER,
        f"{num_rows} rows x {vocab_size:,}",
        lambda: sample_each(samplers, logits, plans),
        lambda: list(sampler.sample(logits, plan).token_ids),
    )


def _decode_plan(requests: Sequence[Request]) -> StepPlan:
    column = np.zeros(len(requests), np.int64)
    rows = DecodeRows(tuple(requests), (), column, column, column, column + 1)
    return StepPlan(1, (Segment(0, LOOPS, (), rows),))
