"""What the tracker and the registry ask for, as frozen records; the dispatcher carries them out. No I/O here."""

from dataclasses import dataclass
from enum import StrEnum

from loopline.identity import Cause, WorkerId
from loopline.messages import CoordinatorMessage, HandoffStats, TokenRow
from loopline.request import FinishReason, Route, Timing, Usage


@dataclass(frozen=True)
class Send:
    """A message for one worker's stream."""

    worker: WorkerId
    message: CoordinatorMessage


@dataclass(frozen=True)
class Deliver:
    """A new token for the client; rows of one request come in the order of their positions."""

    request_id: str
    row: TokenRow


class Ending(StrEnum):
    """How a request left; `coordinator.render` has the status of each but FINISHED."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNREAD = "unread"  # its client did not take the tokens
    GIVEN_UP = "given_up"  # workers were lost, or failed it, again and again
    LEAVING = "leaving"  # the coordinator is
    TOO_LARGE = "too_large"
    INVALID = "invalid"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a request and what it took. `reason`: of one that FINISHED; None otherwise."""

    ending: Ending
    reason: FinishReason | None
    detail: str
    usage: Usage
    timing: Timing
    route: Route
    stats: HandoffStats | None


@dataclass(frozen=True)
class End:
    """The request is over; nothing more will be delivered."""

    request_id: str
    outcome: Outcome


@dataclass(frozen=True)
class AttemptFailed:
    """A worker could not go on with the request, or was lost with it; what follows says what becomes of it."""

    request_id: str
    cause: Cause
    detail: str
    fault: tuple[WorkerId, ...] = ()  # most likely of this worker, or of the link between these (prefill, decode)
    begun_s: float | None = None  # when these were given the request, where there is a fault


@dataclass(frozen=True)
class Requeue:
    """The request waits for workers again, at its old place among requests that were let in."""

    request_id: str


@dataclass(frozen=True)
class Freed:
    """A request is in nobody's way any more: what found no room may find it now."""


Effect = Send | Deliver | AttemptFailed | End | Requeue | Freed


@dataclass(frozen=True)
class Assigned:
    """One request on one worker, as far as the coordinator decided it."""

    request_id: str
    num_known_tokens: int
    max_kv_tokens: int
    token_loops: int  # work that is left for this worker
    awaits_prefill: bool  # reserved on a decode worker, and no prefill worker chosen yet
    decode: WorkerId | None = None  # on a prefill worker: whom it is prefilled for
    is_suspect: bool = False  # a worker was lost with it, and none has got on with it since
    prompt_token_loops: int = 0  # of `token_loops`, what the prompt costs
    num_started_tokens: int = 0  # known when the attempt began: growth is promised from there
