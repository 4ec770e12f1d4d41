"""What a client sees of a cluster: the events of an answer, what is served, the workers. Frozen; no gRPC."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from loopline.identity import BlockCounts, BudgetCounts
from loopline.messages import HandoffStats
from loopline.request import FinishReason, Route, Timing, TokenLogprobs, Usage


@dataclass(frozen=True)
class Token:
    """One generated token; `depth` is the number of loops that it ran. `exit_probabilities`, one a loop, say how likely
    the exit gate held it to be the last; empty where they were not asked for."""

    id: int
    depth: int
    logprobs: TokenLogprobs | None = None
    exit_probabilities: tuple[float, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """First event: the request is known to the cluster under this id."""

    request_id: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True)
class Chunk:
    """New tokens, and the whole characters that are certain by now."""

    tokens: tuple[Token, ...]
    text: str


@dataclass(frozen=True)
class Finished:
    """Last event. `text` is what was still held back; `has_text` is false without a tokenizer. `handoff` is None where
    no KV was handed over: the worker that generated the answer has computed the prompt itself."""

    reason: FinishReason
    text: str
    has_text: bool
    usage: Usage
    timing: Timing
    route: Route
    handoff: HandoffStats | None


Event = Accepted | Chunk | Finished


@dataclass(frozen=True)
class Completion:
    """A whole answer. `finished` is None while it runs, and where it ended in an error."""

    accepted: Accepted | None = None
    tokens: tuple[Token, ...] = ()
    text: str | None = ""
    finished: Finished | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.finished is None else self.finished.reason

    @property
    def usage(self) -> Usage | None:
        """Tokens of prompt and answer, and how many of the prompt's were cached; None as `finished`."""
        return None if self.finished is None else self.finished.usage

    @property
    def timing(self) -> Timing | None:
        """Seconds of the request's life; None as `finished`."""
        return None if self.finished is None else self.finished.timing

    @property
    def route(self) -> Route | None:
        """Which workers ran it, and how the prompt's KV came to be there; None as `finished`."""
        return None if self.finished is None else self.finished.route

    def after(self, event: Event) -> "Completion":
        """The answer with one more event in it."""
        if isinstance(event, Accepted):
            return dataclasses.replace(self, accepted=event)
        text = (self.text or "") + event.text
        if isinstance(event, Chunk):
            return dataclasses.replace(self, tokens=self.tokens + event.tokens, text=text)
        return dataclasses.replace(self, text=text if event.has_text else None, finished=event)


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a cluster serves, and what requests are checked against."""

    name: str
    family: str
    dtype: str
    vocab_size: int
    context_tokens: int
    default_loops: int
    max_loops: int
    has_tokenizer: bool
    has_chat_template: bool
    kv_bytes_per_token: int
    arena_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LinkInfo:
    """A prefill worker's link to a decode worker, as its warm-up measured it. `is_slow`: under the configured floor."""

    peer: str
    transport: str
    bytes_per_s: float
    is_slow: bool = False


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """One worker as the coordinator sees it."""

    name: str
    role: str
    state: str
    pid: int
    address: str
    uuid: str
    epoch: int
    running: int
    waiting: int
    blocks: BlockCounts
    handoffs: Mapping[str, int]
    ignored: Mapping[str, int]
    step: int
    heartbeat_age_s: float
    links: tuple[LinkInfo, ...]
    budget: BudgetCounts | None = None
    """Of bytes in flight; a prefill worker's."""
    metrics_address: str = ""
    """HOST:PORT at which it answers scrapes; "": it serves no metrics."""
    waits_for: str = ""
    """Why it takes no request yet; "": it does, or it leaves."""


@dataclass(frozen=True, kw_only=True)
class LaunchedWorker:
    """A worker that a launcher keeps. `leaving`: it was told to leave, and is not started again; `waits_for`: why it
    does not run yet, "": it runs, or nothing is known."""

    name: str
    role: str
    leaving: bool
    waits_for: str = ""


@dataclass(frozen=True, kw_only=True)
class LauncherInfo:
    """Who starts workers, and where: `place` is an address of its machine, or a Ray cluster. `prefill`, `decode` and
    `unified`: how many it is to keep; `restarts`: whether those that end are started again."""

    place: str
    restarts: bool
    prefill: int
    decode: int
    workers: tuple[LaunchedWorker, ...]
    unified: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """The cluster as the coordinator sees it."""

    workers: tuple[WorkerInfo, ...]
    queued: int
    running: int
    serving: bool
    epoch: int
    launcher: LauncherInfo | None = None
