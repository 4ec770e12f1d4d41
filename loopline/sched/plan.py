"""The frozen records between deciding and computing: a plan says what a step computes, a result what came of it.

A plan is a list of segments, each a set of rows and the loops that they run; every segment of today's plans runs from
loop 0 to its rows' depth. Depth belongs to (row, position). A segment's rows are its decode rows (one position of
each of many requests, as columns) and then its runs (consecutive positions of one request each). Tokens to choose
stand in the same order: all decode rows, then the runs that have a Sampling.

A plan may be made while the step before it still runs. Of a row that goes on from that step the token is not known yet:
its `sources` say which of the tokens that the step chooses it is, and the device, which runs steps in order, has it.
That token may turn out to be a stop id, or NOT_FINITE, which no table may be indexed by: whatever the row gives then is
thrown away.

Shape letters: D decode rows of a segment, S tokens to choose in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from loopline.identity import Cause
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Allocation
from loopline.messages import TokenRow
from loopline.request import FinishReason, Request, SamplingParams, TokenExtras, TokenId

KNOWN = -1
"""In DecodeRows.sources: the row's token is in `token_ids`."""
NOT_FINITE = -1
"""In StepResult.token_ids: the row's logits were not finite, and its request fails."""
_NO_EXTRAS = TokenExtras()


@dataclass(frozen=True)
class TokenHistory:
    """What penalties look at; empty where the request asks for none."""

    prompt_ids: tuple[TokenId, ...] = ()
    generated_ids: tuple[TokenId, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """One token to choose: from the logits of a run's last row."""

    position: int  # of the new token; with the request's seed it keys the generator
    num_generated: int  # tokens of the answer before it
    history: TokenHistory


@dataclass(frozen=True)
class RowRun:
    """Consecutive positions of one request, computed in one step."""

    request_id: str
    allocation: Allocation
    params: SamplingParams
    first_position: int
    token_ids: tuple[TokenId, ...]
    sampling: Sampling | None  # None: the prompt goes on after this chunk
    writes: bool = True  # False: the KV is there already, found in the prefix cache; it is read and not written again

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """One new position of each of D requests, as columns [D] int64. Every row's token is chosen.

    `requests` is the same object from step to step while the same requests decode, so what is derived from their
    parameters can be kept.
    """

    requests: tuple[Request, ...]
    allocations: tuple[Allocation, ...]
    book_rows: IntArray  # the ledger's row of each allocation
    positions: IntArray  # position whose KV is computed
    token_ids: IntArray  # its token; 0 where `sources` says which it will be
    num_generated: IntArray  # tokens of the answer so far, those that are still being chosen included
    histories: tuple[TokenHistory, ...] | None = None  # None: no request asks for penalties
    sources: IntArray | None = None  # index into the tokens of the step before, or -1 where known; None: all are known

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, indices: Sequence[int]) -> "DecodeRows":
        """Some of the rows, in the order of `indices`; new columns."""
        at = np.asarray(indices, np.int64)
        return DecodeRows(
            requests=tuple(self.requests[index] for index in indices),
            allocations=tuple(self.allocations[index] for index in indices),
            book_rows=self.book_rows[at],
            positions=self.positions[at],
            token_ids=self.token_ids[at],
            num_generated=self.num_generated[at],
            histories=None if self.histories is None else tuple(self.histories[index] for index in indices),
            sources=None if self.sources is None else self.sources[at],
        )


@dataclass(frozen=True)
class Segment:
    """Rows that are computed together, through loops [first_loop, last_loop)."""

    first_loop: int
    last_loop: int
    runs: tuple[RowRun, ...]
    decode: DecodeRows | None = None

    @property
    def num_chosen(self) -> int:
        """Tokens to choose."""
        return (0 if self.decode is None else len(self.decode)) + sum(run.sampling is not None for run in self.runs)


def segments_of(decode: Mapping[int, DecodeRows], runs: Sequence[RowRun]) -> tuple[Segment, ...]:
    """A segment of each depth, shallowest first, of decode rows by depth and runs."""
    depths = sorted({*decode, *(run.params.loops for run in runs)})
    return tuple(
        Segment(0, depth, tuple(run for run in runs if run.params.loops == depth), decode.get(depth))
        for depth in depths
    )


@dataclass(frozen=True)
class StepPlan:
    """One step; steps count from 1."""

    step: int
    segments: tuple[Segment, ...]

    @property
    def runs(self) -> tuple[RowRun, ...]:
        return tuple(run for segment in self.segments for run in segment.runs)

    @property
    def num_decode_rows(self) -> int:
        return sum(len(segment.decode) for segment in self.segments if segment.decode is not None)

    @property
    def holders(self) -> list[tuple[str, Allocation]]:
        """Id of every request with a row in this step, and the blocks that the row is in."""
        decode = [segment.decode for segment in self.segments if segment.decode is not None]
        return [
            (one.request_id, allocation)
            for rows in decode
            for one, allocation in zip(rows.requests, rows.allocations, strict=True)
        ] + [(run.request_id, run.allocation) for run in self.runs]

    @property
    def request_ids(self) -> list[str]:
        """Every request with a row in this step."""
        decode = [segment.decode for segment in self.segments if segment.decode is not None]
        return [one.request_id for rows in decode for one in rows.requests] + [run.request_id for run in self.runs]

    def decode_at(self, depth: int) -> tuple[int, DecodeRows] | None:
        """The decode rows of that depth, and where their tokens begin among all that this step chooses."""
        start = 0
        for segment in self.segments:
            if segment.last_loop == depth and segment.decode is not None:
                return start, segment.decode
            start += segment.num_chosen
        return None


@dataclass(frozen=True, eq=False)
class StepResult:
    """What came of a plan: a token for each row that asks for one, in the plan's order; NOT_FINITE where it failed."""

    step: int
    token_ids: Sequence[int]  # [S]
    extras: Mapping[int, TokenExtras] = field(default_factory=dict)  # by index, where any are asked for


@dataclass(frozen=True)
class ChunkDone:
    """A chunk of a prompt was computed: positions [0, num_computed) of the request are written now."""

    request_id: str
    allocation: Allocation
    num_computed: int
    num_cached: int  # of these, those whose KV was found and not computed
    is_last: bool


@dataclass(frozen=True)
class RequestLost:
    """One request that this engine gave up; its blocks are the caller's to release."""

    request_id: str
    allocation: Allocation
    cause: Cause
    detail: str


@dataclass(frozen=True, eq=False)
class TokenColumns:
    """New tokens of one segment, as columns; `rows` makes them into messages for whoever sends them."""

    depth: int
    requests: Sequence[Request]
    positions: Sequence[int]
    token_ids: Sequence[int]
    finish: Mapping[int, FinishReason]  # by index, of those that ended
    extras: Mapping[int, TokenExtras]

    def rows(self) -> list[TokenRow]:
        """A row each; a stop id is not part of the answer, so its row has no token."""
        rows = []
        for index, (request, position, token_id) in enumerate(
            zip(self.requests, self.positions, self.token_ids, strict=True)
        ):
            finish = self.finish.get(index)
            is_stop = finish is FinishReason.STOP
            extras = _NO_EXTRAS if is_stop else self.extras.get(index, _NO_EXTRAS)
            rows.append(
                TokenRow(
                    request.request_id,
                    request.attempt,
                    position,
                    None if is_stop else token_id,
                    self.depth,
                    finish,
                    extras.logprobs,
                    extras.exit_probabilities,
                )
            )
        return rows


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What the world may learn of a committed step."""

    step: int
    tokens: tuple[TokenColumns, ...]
    chunks: tuple[ChunkDone, ...] = ()
    lost: tuple[RequestLost, ...] = ()

    @cached_property
    def rows(self) -> tuple[TokenRow, ...]:
        """Every new token as a message."""
        return tuple(row for columns in self.tokens for row in columns.rows())
