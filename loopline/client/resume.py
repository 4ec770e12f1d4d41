"""One answer over as many calls as it takes: what to send next, which events the user has seen, when to give up.

Pure: moments (seconds of a monotonic clock) come in, waiting and calling are the clients'. A call that broke because
the coordinator went away is made again with the tokens that were delivered, as `delivered_token_ids`, and the seed of
the first one: the cluster computes them like a prompt and goes on, so the answer is the one that it would have been.
The coordinator's text goes on behind that of the delivered tokens, whatever it held back there.
"""

import dataclasses
from typing import Any

import grpc

from loopline.client.convert import error_of, generate_request
from loopline.client.records import Accepted, Chunk, Event, Finished
from loopline.errors import DeadlineExceeded, Overloaded, RequestRefused, RequestTooLarge, WorkerLost
from loopline.intake import RequestOptions
from loopline.wire.channel import ERROR_KEY

CONTACT_S = 5.0
"""Without a deadline: how long nobody may answer where nobody ever has, so that a wrong address is told soon."""
RETURN_S = 15.0
"""Without a deadline: how long a coordinator that did answer may be away."""
_PAUSE_FIRST_S = 0.1
_PAUSE_MOST_S = 1.0
_LEAST_DEADLINE_S = 0.001
_LEAVING = (None, RequestRefused.__name__)  # names that come with UNAVAILABLE when a coordinator is gone or going


class Answer:
    """State of one answer. Invariant: the user has seen the events of exactly the tokens in `_delivered`."""

    def __init__(
        self,
        options: RequestOptions,
        label: str,
        deadline_s: float | None,
        address: str,
        *,
        priority: int = 0,
        now_s: float,
        resume: bool,
        is_known: bool,
    ) -> None:
        """`deadline_s` counts from `now_s`; `is_known`: somebody has answered at `address` before."""
        self._options = options
        self._label = label
        self._deadline_s = deadline_s
        self._priority = priority
        self._address = address
        self._resume = resume
        self.is_known = is_known
        self.is_finished = False
        self._began_s = now_s
        self._called_s = now_s
        self._broken_s: float | None = None  # since when there has been no progress
        self._pause_s = _PAUSE_FIRST_S
        self._num_calls = 0
        self._accepted: Accepted | None = None
        self._delivered: list[int] = []
        self._first_token_s: float | None = None

    def next_call(self, now_s: float) -> Any:
        """The GenerateRequest of the next call. Raises InvalidRequest for what cannot be sent."""
        self._num_calls += 1
        self._called_s = now_s
        options, deadline_s = self._options, self._deadline_s
        if self._num_calls > 1:
            if deadline_s is not None:
                deadline_s = max(_LEAST_DEADLINE_S, self._began_s + deadline_s - now_s)
            delivered = (*options.delivered_token_ids, *self._delivered)
            seed = options.seed if self._accepted is None else self._accepted.seed
            options = dataclasses.replace(options, delivered_token_ids=delivered, seed=seed)
        return generate_request(options, self._label, deadline_s, self._priority)

    def take(self, event: Event, now_s: float) -> Event | None:
        """The event as the user should see it; None for one that they have seen."""
        self.is_known = True
        if isinstance(event, Accepted):
            if self._accepted is not None:
                return None
            self._accepted = event
        elif isinstance(event, Chunk):
            if event.tokens:
                self._delivered += [token.id for token in event.tokens]
                self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
                self._broken_s, self._pause_s = None, _PAUSE_FIRST_S
        else:
            self.is_finished = True
            return event if self._num_calls == 1 else self._with_whole_timing(event)
        return event

    def pause_s(self, error: Any, now_s: float) -> float:
        """How long to wait before the next call, after this one ended in a grpc.RpcError. Raises the error of
        `loopline.errors` that the user should see where there is to be none."""
        failure = error_of(error, self._address, self._accepted is not None, too_large=RequestTooLarge)
        if not self._is_resumable(error):
            raise failure
        if self._broken_s is None or now_s - self._called_s >= RETURN_S:
            self._broken_s = now_s
        patience_s = RETURN_S if self.is_known else CONTACT_S
        give_up_s = self._broken_s + patience_s if self._deadline_s is None else self._began_s + self._deadline_s
        if now_s < give_up_s:
            hint_s = failure.retry_after_s if isinstance(failure, Overloaded) else None
            pause_s = min(max(self._pause_s, hint_s or 0.0), give_up_s - now_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_MOST_S)
            return pause_s
        if self._accepted is None:
            raise failure
        delivered = f"{len(self._delivered)} tokens were delivered ({error.details()})"
        if self._deadline_s is None:
            raise WorkerLost(f"the coordinator at {self._address} did not come back in {patience_s:g} s; {delivered}")
        raise DeadlineExceeded(f"the deadline passed while the coordinator at {self._address} was away; {delivered}")

    def _is_resumable(self, error: Any) -> bool:
        name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
        self.is_known = self.is_known or name is not None
        if not self._resume:
            return False
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return name in _LEAVING
        return bool(name == Overloaded.__name__ and self._accepted is not None)  # it was let in once

    def _with_whole_timing(self, event: Finished) -> Finished:
        """The last call's, counted from the first call."""
        earlier_s = self._called_s - self._began_s
        timing = event.timing
        ttft_s = earlier_s + timing.ttft_s
        if self._first_token_s is not None:
            ttft_s = min(ttft_s, self._first_token_s - self._began_s)
        whole = dataclasses.replace(timing, ttft_s=ttft_s, total_s=earlier_s + timing.total_s)
        return dataclasses.replace(event, timing=whole)
