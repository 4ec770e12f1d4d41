"""What reaches a worker's engine thread besides the coordinator's messages and the transfer thread's events."""

from collections.abc import Callable
from dataclasses import dataclass

from loopline.fetch_messages import FetchPrefix, PrefixSent
from loopline.identity import Cause, HandoffKey, WorkerId
from loopline.messages import CloseHandoff, CloseState, Commit, CommitAnswer, HandoffClosed


@dataclass(frozen=True)
class CoordinatorLost:
    """The stream to the coordinator broke: every request of that epoch is given up."""


@dataclass(frozen=True)
class BeginDrain:
    """Take nothing new from now on."""


@dataclass(frozen=True)
class CommitReceived:
    """A prefill worker's commit; `answer` may be called from any thread, once."""

    commit: Commit
    answer: Callable[[CommitAnswer], None]


@dataclass(frozen=True)
class CommitAnswered:
    """A decode worker took a commit (`cause` None), or says why not."""

    key: HandoffKey
    cause: Cause | None
    target: str


@dataclass(frozen=True)
class CommitUndelivered:
    """No answer to a commit could be had; whether it arrived is not known."""

    key: HandoffKey
    detail: str


@dataclass(frozen=True)
class FetchAsked:
    """A prefill worker's FetchPrefix; `answer` may be called from any thread, once."""

    fetch: FetchPrefix
    answer: Callable[[PrefixSent], None]


@dataclass(frozen=True)
class PrefixAnswered:
    """The answer to our FetchPrefix, or in its place why there is none."""

    sent: PrefixSent


@dataclass(frozen=True)
class CloseAsked:
    """A peer's CloseHandoff, of what this worker writes; `answer` may be called from any thread, once."""

    close: CloseHandoff
    answer: Callable[[HandoffClosed], None]


@dataclass(frozen=True)
class WriterClosed:
    """A writer's final answer to our CloseHandoff."""

    key: HandoffKey
    writer: WorkerId
    state: CloseState
