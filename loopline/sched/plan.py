"""The frozen records between deciding and computing: a plan says what a step computes, a result what came of it.

A plan is a list of segments, each a set of rows and the loops that they run; every segment of today's plans runs from
loop 0 to its rows' depth. Depth belongs to (row, position).
"""

from dataclasses import dataclass

from loopline.identity import Cause
from loopline.kv.ledger import Allocation
from loopline.messages import TokenRow
from loopline.request import SamplingParams, TokenId, TokenLogprobs


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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Segment:
    """Runs that are computed together, through loops [first_loop, last_loop)."""

    first_loop: int
    last_loop: int
    runs: tuple[RowRun, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step; steps count from 1."""

    step: int
    segments: tuple[Segment, ...]

    @property
    def runs(self) -> tuple[RowRun, ...]:
        return tuple(run for segment in self.segments for run in segment.runs)


@dataclass(frozen=True)
class SampledToken:
    """What one Sampling gave. `token_id` None: the logits were not finite, and the request fails."""

    request_id: str
    token_id: TokenId | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepResult:
    """What came of a plan: one SampledToken per Sampling in it, in the plan's order."""

    step: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True)
class ChunkDone:
    """A chunk of a prompt was computed: positions [0, num_computed) of the request are written now."""

    request_id: str
    allocation: Allocation
    num_computed: int
    is_last: bool


@dataclass(frozen=True)
class RequestLost:
    """One request that this engine gave up; its blocks are the caller's to release."""

    request_id: str
    allocation: Allocation
    cause: Cause
    detail: str


@dataclass(frozen=True)
class StepOutcome:
    """What the world may learn of a committed step."""

    step: int
    rows: tuple[TokenRow, ...]
    chunks: tuple[ChunkDone, ...] = ()
    lost: tuple[RequestLost, ...] = ()
