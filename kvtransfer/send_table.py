"""The sending half of the handoff protocol: what may still be posted, and what a writer may truthfully say about a
handoff. Pure: no I/O, no clock. The transfer thread of a worker that pushes owns one table and carries out its effects.

              open          commit                  every handle DONE
    (nothing) ----> OPEN -----------> COMMITTED ----------------------> DRAINED
                      |                   |
                      | close, or a push could not be posted, failed or took too long
                      v                   v
                      '----> CLOSING <----'
                                |  every handle is terminal
                                +------> CLOSED   all of them DONE
                                '------> FAILED   one ended in an error

All three have left the table; a tombstone answers what still comes for them. FAILED is remembered by key as well,
because the answer to a close must stay FAILED: only the proven end of this process frees the target's blocks. A close
of a handoff that was never opened leaves a tombstone too, so that a start which comes later is refused.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvtransfer.handoff import (
    MAX_TOMBSTONES,
    SEND_MOVES,
    Closed,
    Drained,
    IgnoredCounts,
    Opened,
    SendEffect,
    SendMove,
    SendState,
    Tombstones,
    advance,
)
from loopline.errors import IllegalTransition
from loopline.identity import Cause, HandoffKey, WorkerId
from loopline.messages import CloseState, PushRange


@dataclass(slots=True)
class _Handoff:
    """One handoff that this worker writes. `in_flight` is a subset of the sequence numbers in `posted`."""

    key: HandoffKey
    target: WorkerId
    state: SendState = SendState.OPEN
    posted: dict[int, PushRange] = field(default_factory=dict)
    in_flight: dict[int, None] = field(default_factory=dict)
    any_failed: bool = False

    def move(self, move: SendMove) -> None:
        self.state = advance(SEND_MOVES, self.state, move)


class SendTable:
    """All handoffs that this worker writes.

    Invariants: a sequence number of a handoff is posted at most once; nothing is posted after close; DRAINED and CLOSED
    are said only when every posted handle is DONE; FAILED only when every one is terminal.
    """

    def __init__(self, tombstones: Tombstones | None = None) -> None:
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._keys: dict[str, list[HandoffKey]] = {}  # by request, oldest first
        self._failed: OrderedDict[HandoffKey, None] = OrderedDict()
        self._tombstones = tombstones if tombstones is not None else Tombstones()
        self._ignored = IgnoredCounts()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(state, number of handoffs), in the order of the states' names; states without a handoff are left out."""
        return tuple(sorted(Counter(handoff.state.value for handoff in self._handoffs.values()).items()))

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """(cause, number of messages ignored or refused for it)."""
        return self._ignored.as_pairs()

    def state(self, key: HandoffKey) -> SendState | None:
        """Where the handoff stands; None when it is not known, drained or closed."""
        if key in self._failed:
            return SendState.FAILED
        handoff = self._handoffs.get(key)
        return None if handoff is None else handoff.state

    def is_tombstoned(self, key: HandoffKey) -> bool:
        """Has this generation of the request, or a newer one, ended here?"""
        return self._tombstones.cause_for(key) is not None

    def may_post(self, key: HandoffKey, seq: int) -> bool:
        """May push `seq` of this handoff be posted now?"""
        handoff = self._handoffs.get(key)
        return handoff is not None and handoff.state is SendState.OPEN and seq not in handoff.posted

    def close_state(self, key: HandoffKey) -> CloseState:
        """The truthful answer to CloseHandoff once `close` was called. Without it, CLOSED may not last."""
        if key in self._failed:
            return CloseState.FAILED
        return CloseState.PENDING if key in self._handoffs else CloseState.CLOSED

    def pushes(self, key: HandoffKey) -> tuple[PushRange, ...]:
        """Every push that was posted, in the order of posting; empty for an unknown handoff."""
        handoff = self._handoffs.get(key)
        return () if handoff is None else tuple(handoff.posted.values())

    def keys_to(self, target: WorkerId) -> tuple[HandoffKey, ...]:
        """Handoffs to this worker's process, in any epoch of it, that are not terminal; oldest first."""
        return tuple(handoff.key for handoff in self._handoffs.values() if handoff.target.uuid == target.uuid)

    # ---- moves -----------------------------------------------------------------------------------------------------

    def open(self, key: HandoffKey, target: WorkerId) -> tuple[SendEffect, ...]:
        """Start a handoff. `Refused` when this generation or a newer one is known; older ones are closed."""
        cause = self._tombstones.cause_for(key)
        for known in self._keys.get(key.request_id, ()):
            if known.generation >= key.generation:
                cause = Cause.DUPLICATE if known == key else Cause.STALE
        if cause is not None:
            return (self._ignored.refuse(key, cause),)
        effects = self._close_through(HandoffKey(key.request_id, key.generation - 1))
        self._handoffs[key] = _Handoff(key, target)
        self._keys.setdefault(key.request_id, []).append(key)
        return (*effects, Opened(key))

    def posted(self, key: HandoffKey, part: PushRange) -> None:
        """A push is about to be posted. Raises IllegalTransition unless `may_post`."""
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is not SendState.OPEN:
            state = "unknown" if handoff is None else handoff.state.value
            raise IllegalTransition(f"{key} is {state}: nothing may be posted")
        if part.seq in handoff.posted:
            raise IllegalTransition(f"{key}: push {part.seq} was posted before")
        handoff.posted[part.seq] = part
        handoff.in_flight[part.seq] = None

    def push_done(self, key: HandoffKey, seq: int) -> tuple[SendEffect, ...]:
        """The handle of push `seq` is DONE. Raises IllegalTransition when it is not in flight."""
        return self._terminal(key, seq, failed=False)

    def push_failed(self, key: HandoffKey, seq: int) -> tuple[SendEffect, ...]:
        """The handle of push `seq` ended in an error: the handoff is closed, and its end will be FAILED. Raises
        IllegalTransition when the push is not in flight."""
        return self._terminal(key, seq, failed=True)

    def commit(self, key: HandoffKey) -> tuple[SendEffect, ...]:
        """No more pushes follow. Ignored when the handoff was closed first."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            return (self._ignored.ignore(self._tombstones.cause_for(key) or Cause.UNKNOWN),)
        if handoff.state is not SendState.OPEN:
            late = Cause.DUPLICATE if handoff.state is SendState.COMMITTED else Cause.TOMBSTONED
            return (self._ignored.ignore(late),)
        handoff.move(SendMove.COMMIT)
        return self._settle(handoff)

    def close(self, key: HandoffKey) -> tuple[SendEffect, ...]:
        """Post nothing more for this or an older generation. `Closed` comes now or with the last handle; once more when
        asked again. An unknown handoff is CLOSED, and a later `open` of it is refused."""
        effects = self._close_through(key)
        self._tombstones.bury(key, Cause.TOMBSTONED)
        state = self.close_state(key)
        if state is not CloseState.PENDING and not any(_closes(key, effect) for effect in effects):
            effects = (*effects, Closed(key, state))
        return effects

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _terminal(self, key: HandoffKey, seq: int, failed: bool) -> tuple[SendEffect, ...]:
        handoff = self._handoffs.get(key)
        if handoff is None or seq not in handoff.in_flight:
            raise IllegalTransition(f"{key}: push {seq} is not in flight")
        del handoff.in_flight[seq]
        if failed:
            handoff.any_failed = True
            if handoff.state is not SendState.CLOSING:
                handoff.move(SendMove.CLOSE)
        return self._settle(handoff)

    def _settle(self, handoff: _Handoff) -> tuple[SendEffect, ...]:
        """Leave COMMITTED or CLOSING once no handle is in flight."""
        if handoff.in_flight or handoff.state is SendState.OPEN:
            return ()
        if handoff.state is SendState.COMMITTED:
            handoff.move(SendMove.DRAIN)
            self._forget(handoff, Cause.DUPLICATE)
            return (Drained(handoff.key),)
        handoff.move(SendMove.END_FAILED if handoff.any_failed else SendMove.END_CLEAN)
        self._forget(handoff, Cause.TOMBSTONED)
        if not handoff.any_failed:
            return (Closed(handoff.key, CloseState.CLOSED),)
        self._failed[handoff.key] = None
        if len(self._failed) > MAX_TOMBSTONES:
            self._failed.popitem(last=False)
        return (Closed(handoff.key, CloseState.FAILED),)

    def _close_through(self, key: HandoffKey) -> tuple[SendEffect, ...]:
        effects: tuple[SendEffect, ...] = ()
        for known in list(self._keys.get(key.request_id, ())):
            handoff = self._handoffs[known]
            if known.generation <= key.generation and handoff.state in (SendState.OPEN, SendState.COMMITTED):
                handoff.move(SendMove.CLOSE)
                effects += self._settle(handoff)
        return effects

    def _forget(self, handoff: _Handoff, cause: Cause) -> None:
        key = handoff.key
        del self._handoffs[key]
        self._keys[key.request_id].remove(key)
        if not self._keys[key.request_id]:
            del self._keys[key.request_id]
        self._tombstones.bury(key, cause)


def _closes(key: HandoffKey, effect: SendEffect) -> bool:
    return isinstance(effect, Closed) and effect.key == key
