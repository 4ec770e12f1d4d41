"""The receiving half of the handoff protocol: which blocks of this arena another worker may write. Pure: no I/O and no
clock. A worker's engine thread owns one table and carries out the effects that it returns.

              reserve            bind                commit, pushes missing
    (nothing) -------> RESERVED -------> BOUND ------------------------------> COMMITTED
                        |    |           | | |                                   |   |
     start_local        |    | give up   | | '-- commit, set complete --.  last  |   |
     LOCAL <------------'    |           | |                            |  push  |   |
                             v           | |           give up,         v        |   |
                          CLOSED <-------' |      blocks missing      ACTIVE <---'   |
                             ^    give up, |           |                             |
                             |  all there  '-----------+-> QUARANTINED <-------------'
                             |                                  |          give up
                             '----------------------------------'
                        the last push arrived, or the writer closed cleanly,
                        or its process is proven gone and polling went quiet

ACTIVE, LOCAL and CLOSED have left the table; a tombstone answers what still comes for them. Give up = cancel, a newer
generation, or the writer gone. On give up blocks without a writer and blocks whose push arrived are free at once (each
block is written by at most one push); all others stay with their writer until it cannot write them any more.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvtransfer.handoff import (
    RECEIVE_MOVES,
    Activate,
    AskClose,
    CommitTaken,
    FreeBlocks,
    FreeQuarantined,
    GaveUp,
    Granted,
    Ignored,
    IgnoredCounts,
    PollToQuiescence,
    Quarantine,
    ReceiveEffect,
    ReceiveMove,
    ReceiveState,
    Refused,
    StartLocal,
    Tombstones,
    advance,
)
from loopline.errors import InvariantBroken
from loopline.fetch_messages import PrefixSent
from loopline.identity import Cause, HandoffKey, Peer, WorkerId
from loopline.messages import CloseState, Commit, PushNotice, PushRange

MAX_GONE_WORKERS = 4_096


@dataclass(slots=True)
class _Handoff:
    """One reserved handoff. `landed[i]` is 1 when block `first_block + i` of the request has arrived."""

    key: HandoffKey
    first_block: int
    block_ids: tuple[int, ...]
    landed: bytearray
    state: ReceiveState = ReceiveState.RESERVED
    writer: Peer | None = None
    arrived: dict[int, PushRange] = field(default_factory=dict)
    commit: Commit | PrefixSent | None = None
    writer_gone: bool = False  # its process is proven to be gone
    writer_failed: bool = False  # it said FAILED: only its end frees the blocks

    def move(self, move: ReceiveMove) -> None:
        self.state = advance(RECEIVE_MOVES, self.state, move)

    def inside(self, part: PushRange) -> bool:
        last = self.first_block + len(self.block_ids)
        return part.num_blocks > 0 and self.first_block <= part.first_block <= last - part.num_blocks

    def span(self, part: PushRange) -> slice:
        start = part.first_block - self.first_block
        return slice(start, start + part.num_blocks)

    def land(self, part: PushRange) -> None:
        self.arrived[part.seq] = part
        self.landed[self.span(part)] = bytes([1]) * part.num_blocks

    def split(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Block ids that arrived and block ids that did not."""
        here = tuple(block for block, there in zip(self.block_ids, self.landed, strict=True) if there)
        missing = tuple(block for block, there in zip(self.block_ids, self.landed, strict=True) if not there)
        return here, missing

    def covers(self, parts: tuple[PushRange, ...]) -> bool:
        """Do these pushes carry every reserved block once, each sequence number once?"""
        position = self.first_block
        for part in sorted(parts, key=lambda part: part.first_block):
            if part.first_block != position or part.num_blocks < 1:
                return False
            position += part.num_blocks
        return position == self.first_block + len(self.block_ids) and len({p.seq for p in parts}) == len(parts)


class ReceiveTable:
    """All handoffs whose blocks this worker holds for a writer.

    Invariants: a block is in at most one handoff of the table; a handoff has at most one writer in its life; a handoff
    activates only when the pushes that arrived from its writer, as a set, are the commit's and carry each of its blocks
    exactly once; a quarantined block leaves only by its push, its writer's clean close or its writer's proven end.
    """

    def __init__(self, tombstones: Tombstones | None = None) -> None:
        self._handoffs: dict[HandoffKey, _Handoff] = {}
        self._keys: dict[str, list[HandoffKey]] = {}  # by request, oldest first; all but the last are quarantined
        self._holders: dict[int, HandoffKey] = {}  # by block id
        self._tombstones = tombstones if tombstones is not None else Tombstones()
        self._gone: OrderedDict[str, int] = OrderedDict()  # worker uuid -> highest epoch said to be gone
        self._ignored = IgnoredCounts()

    # ---- queries ---------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(state, number of handoffs), in the order of the states' names; states without a handoff are left out."""
        return tuple(sorted(Counter(handoff.state.value for handoff in self._handoffs.values()).items()))

    def ignored(self) -> tuple[tuple[str, int], ...]:
        """(cause, number of messages ignored or refused for it)."""
        return self._ignored.as_pairs()

    def state(self, key: HandoffKey) -> ReceiveState | None:
        """Where the handoff stands; None when it is not in the table."""
        handoff = self._handoffs.get(key)
        return None if handoff is None else handoff.state

    def writer(self, key: HandoffKey) -> WorkerId | None:
        """Who may write the handoff's blocks; None where nobody may, or it is not in the table."""
        handoff = self._handoffs.get(key)
        return None if handoff is None or handoff.writer is None else handoff.writer.worker

    def holders(self) -> dict[int, HandoffKey]:
        """Every block of the table and the handoff that it is held or quarantined for: a copy, for audits."""
        return dict(self._holders)

    def is_tombstoned(self, key: HandoffKey) -> bool:
        """Has this generation of the request, or a newer one, ended here?"""
        return self._tombstones.cause_for(key) is not None

    def refusal(self, key: HandoffKey) -> Cause | None:
        """Why `reserve` would refuse this key; None if it would not. Ask before taking blocks from the pool."""
        ended = self._tombstones.cause_for(key)
        if ended is not None:
            return ended
        for known in self._keys.get(key.request_id, ()):
            if known.generation >= key.generation:
                return Cause.DUPLICATE if known == key else Cause.STALE
        return None

    def asks(self) -> tuple[AskClose, ...]:
        """Every close that still has no final answer: repeat these after a while."""
        return tuple(
            AskClose(handoff.key, _writer(handoff))
            for handoff in self._handoffs.values()
            if handoff.state is ReceiveState.QUARANTINED and not handoff.writer_gone and not handoff.writer_failed
        )

    # ---- the way to activation -------------------------------------------------------------------------------------

    def reserve(self, key: HandoffKey, first_block: int, block_ids: tuple[int, ...]) -> tuple[ReceiveEffect, ...]:
        """Hold `block_ids` for blocks `first_block`, `first_block + 1`, ... of the request.

        Returns only `Refused` when `refusal(key)` names a cause: the blocks are not held then. Otherwise older
        generations of the request are given up, and the effects are theirs. Raises InvariantBroken for no blocks at
        all, a block twice, or a block that the table holds.
        """
        cause = self.refusal(key)
        if cause is not None:
            return (self._ignored.refuse(key, cause),)
        if not block_ids or len(set(block_ids)) != len(block_ids):
            raise InvariantBroken(f"{key}: {len(block_ids)} blocks with {len(set(block_ids))} different ids")
        taken = [block for block in block_ids if block in self._holders]
        if taken:
            raise InvariantBroken(f"{key}: block {taken[0]} is still held for {self._holders[taken[0]]}")
        effects = self._give_up_through(HandoffKey(key.request_id, key.generation - 1), Cause.STALE)
        self._handoffs[key] = _Handoff(key, first_block, block_ids, bytearray(len(block_ids)))
        self._keys.setdefault(key.request_id, []).append(key)
        self._holders.update(dict.fromkeys(block_ids, key))
        return tuple(effects)

    def bind(self, key: HandoffKey, writer: Peer) -> Granted | Refused:
        """Make `writer` the one writer of the handoff; the same again gets the same answer, another one is refused."""
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is ReceiveState.QUARANTINED:
            return self._ignored.refuse(key, self._tombstones.cause_for(key) or Cause.UNKNOWN)
        if handoff.writer is None:
            if self._gone.get(writer.worker.uuid, -1) >= writer.worker.epoch:
                return self._ignored.refuse(key, Cause.PEER_LOST)
            handoff.move(ReceiveMove.BIND)
            handoff.writer = writer
        elif handoff.writer.worker != writer.worker:
            return self._ignored.refuse(key, Cause.WRONG_WRITER)
        return Granted(key, handoff.writer, handoff.first_block, handoff.block_ids)

    def start_local(self, key: HandoffKey) -> StartLocal | Refused:
        """Let the blocks go to this worker's own prefill. Only while no writer is bound: a block has one writer."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            return self._ignored.refuse(key, self._tombstones.cause_for(key) or Cause.UNKNOWN)
        if handoff.state is not ReceiveState.RESERVED:
            return self._ignored.refuse(key, Cause.WRONG_WRITER)
        handoff.move(ReceiveMove.START_LOCAL)
        self._forget(handoff, Cause.DUPLICATE)
        return StartLocal(key, handoff.block_ids)

    def push_arrived(self, agent_name: str, notice: PushNotice) -> tuple[ReceiveEffect, ...]:
        """A notice came from the agent of that name: its blocks are here, whole."""
        handoff, part = self._handoffs.get(notice.key), notice.range
        if handoff is None:
            return (self._ignored.ignore(self._tombstones.cause_for(notice.key) or Cause.UNKNOWN),)
        cause = self._push_refusal(handoff, agent_name, part)
        if cause is not None:
            return (self._ignored.ignore(cause),)
        handoff.land(part)
        if handoff.state is ReceiveState.QUARANTINED:
            return self._free_arrived(handoff, part)
        if handoff.state is ReceiveState.COMMITTED and handoff.commit is not None and all(handoff.landed):
            return (self._activate(handoff, handoff.commit),)
        return ()

    def landing_blocks(self, agent_name: str, notice: PushNotice) -> tuple[int, ...]:
        """Blocks of this arena that `push_arrived` would count as here; empty for a notice that it would ignore, and
        for a handoff that was given up."""
        handoff = self._handoffs.get(notice.key)
        if handoff is None or handoff.state is ReceiveState.QUARANTINED:
            return ()
        if self._push_refusal(handoff, agent_name, notice.range) is not None:
            return ()
        return handoff.block_ids[handoff.span(notice.range)]

    def push_corrupted(self, notice: PushNotice) -> tuple[ReceiveEffect, ...]:
        """Blocks of this push, one that `landing_blocks` named, hold other bytes than were sent: instead of
        `push_arrived`. The handoff is given up; what writes there is not known, so these blocks are quarantined too,
        and the same notice again does not free them."""
        handoff = self._handoffs[notice.key]
        handoff.arrived[notice.range.seq] = notice.range
        self._ignored.ignore(Cause.CORRUPTED)
        return tuple(self._give_up(handoff, Cause.CORRUPTED))

    def committed(self, commit: Commit | PrefixSent) -> Activate | CommitTaken | Ignored:
        """The writer says which pushes it posted; of a handoff also what the first token is."""
        key = commit.key
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is ReceiveState.QUARANTINED:
            return self._ignored.ignore(self._tombstones.cause_for(key) or Cause.UNKNOWN)
        if handoff.writer is None or handoff.writer.worker != commit.writer:
            return self._ignored.ignore(Cause.WRONG_WRITER)
        if handoff.commit is not None:
            return self._ignored.ignore(Cause.DUPLICATE if handoff.commit == commit else Cause.INVALID)
        if not handoff.covers(commit.pushes) or not set(handoff.arrived.values()) <= set(commit.pushes):
            return self._ignored.ignore(Cause.INCOMPLETE)
        if all(handoff.landed):
            return self._activate(handoff, commit)
        handoff.move(ReceiveMove.COMMIT)
        handoff.commit = commit
        return CommitTaken(key)

    # ---- the ways out ----------------------------------------------------------------------------------------------

    def cancel(self, key: HandoffKey, cause: Cause) -> tuple[ReceiveEffect, ...]:
        """Give up this and every older generation of the request. Unknown ones leave a tombstone, so that a reserve
        which comes later is refused."""
        known = any(known.generation <= key.generation for known in self._keys.get(key.request_id, ()))
        effects = self._give_up_through(key, cause)
        self._tombstones.bury(key, Cause.TOMBSTONED)
        return tuple(effects) if known else (self._ignored.ignore(Cause.UNKNOWN),)

    def writer_closed(self, key: HandoffKey, writer: WorkerId, state: CloseState) -> tuple[ReceiveEffect, ...]:
        """`writer`'s answer to CloseHandoff. A process answers only for itself: one that finds another id in the
        question must refuse it, because CLOSED of a stranger says nothing about what the writer has posted."""
        handoff = self._handoffs.get(key)
        if handoff is None or handoff.state is not ReceiveState.QUARANTINED:
            return (self._ignored.ignore(Cause.UNKNOWN),)
        if _writer(handoff).worker != writer:
            return (self._ignored.ignore(Cause.WRONG_WRITER),)
        if state is CloseState.CLOSED:
            return (self._end_quarantine(handoff),)
        if state is CloseState.FAILED:
            handoff.writer_failed = True
        return ()

    def worker_gone(self, worker: WorkerId, proven: bool) -> tuple[ReceiveEffect, ...]:
        """A worker left, up to this epoch of it. Suspected: its handoffs are given up and it is asked to close them.
        Proven: their blocks are free once its last bytes have been polled in and `quiesced` has said so."""
        effects: list[ReceiveEffect] = []
        self._gone[worker.uuid] = max(worker.epoch, self._gone.get(worker.uuid, -1))
        self._gone.move_to_end(worker.uuid)
        if len(self._gone) > MAX_GONE_WORKERS:
            self._gone.popitem(last=False)
        written = [handoff for handoff in self._handoffs.values() if _writes(worker, handoff)]
        for handoff in written:
            handoff.writer_gone |= proven
            if handoff.state is not ReceiveState.QUARANTINED:
                effects += self._give_up(handoff, Cause.PEER_LOST)
        if proven and any(handoff.state is ReceiveState.QUARANTINED for handoff in written):
            effects.append(PollToQuiescence(worker))
        return tuple(effects)

    def quiesced(self, worker: WorkerId) -> tuple[ReceiveEffect, ...]:
        """After `PollToQuiescence`: the connection is removed and nothing of that worker comes in any more."""
        quiet = [
            handoff
            for handoff in self._handoffs.values()
            if _writes(worker, handoff) and handoff.writer_gone and handoff.state is ReceiveState.QUARANTINED
        ]
        return tuple(self._end_quarantine(handoff) for handoff in quiet)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _push_refusal(self, handoff: _Handoff, agent_name: str, part: PushRange) -> Cause | None:
        if handoff.writer is None or handoff.writer.worker.agent_name != agent_name:
            return Cause.WRONG_WRITER
        if handoff.arrived.get(part.seq) == part:
            return Cause.DUPLICATE
        if part.seq in handoff.arrived or not handoff.inside(part) or any(handoff.landed[handoff.span(part)]):
            return Cause.INVALID
        if handoff.commit is not None and part not in handoff.commit.pushes:
            return Cause.INVALID
        return None

    def _activate(self, handoff: _Handoff, commit: Commit | PrefixSent) -> Activate:
        handoff.move(ReceiveMove.ACTIVATE)
        self._forget(handoff, Cause.DUPLICATE)
        return Activate(handoff.key, commit, handoff.block_ids)

    def _give_up_through(self, key: HandoffKey, cause: Cause) -> list[ReceiveEffect]:
        """Give up every handoff of the request up to this generation that is not quarantined yet."""
        effects: list[ReceiveEffect] = []
        for known in list(self._keys.get(key.request_id, ())):
            handoff = self._handoffs[known]
            if known.generation <= key.generation and handoff.state is not ReceiveState.QUARANTINED:
                effects += self._give_up(handoff, cause)
        return effects

    def _give_up(self, handoff: _Handoff, cause: Cause) -> list[ReceiveEffect]:
        effects: list[ReceiveEffect] = [GaveUp(handoff.key, cause)]
        here, missing = handoff.split() if handoff.writer is not None else (handoff.block_ids, ())
        if not missing:
            handoff.move(ReceiveMove.FREE)
            self._forget(handoff, Cause.TOMBSTONED)
            return [*effects, FreeBlocks(handoff.key, here)]
        handoff.move(ReceiveMove.QUARANTINE)
        self._tombstones.bury(handoff.key, Cause.TOMBSTONED)
        for block in here:
            del self._holders[block]
        if here:
            effects.append(FreeBlocks(handoff.key, here))
        effects.append(Quarantine(handoff.key, missing, _writer(handoff)))
        if not handoff.writer_gone:
            effects.append(AskClose(handoff.key, _writer(handoff)))
        return effects

    def _free_arrived(self, handoff: _Handoff, part: PushRange) -> tuple[ReceiveEffect, ...]:
        """A push of a quarantined handoff arrived: nobody writes its blocks any more."""
        if all(handoff.landed):
            return (self._end_quarantine(handoff),)
        block_ids = handoff.block_ids[handoff.span(part)]
        for block in block_ids:
            del self._holders[block]
        return (FreeQuarantined(handoff.key, block_ids),)

    def _end_quarantine(self, handoff: _Handoff) -> FreeQuarantined:
        left = tuple(block for block in handoff.block_ids if self._holders.get(block) == handoff.key)
        handoff.move(ReceiveMove.FREE)
        self._forget(handoff, Cause.TOMBSTONED)
        return FreeQuarantined(handoff.key, left)

    def _forget(self, handoff: _Handoff, cause: Cause) -> None:
        key = handoff.key
        del self._handoffs[key]
        self._keys[key.request_id].remove(key)
        if not self._keys[key.request_id]:
            del self._keys[key.request_id]
        for block in handoff.block_ids:
            if self._holders.get(block) == key:
                del self._holders[block]
        self._tombstones.bury(key, cause)


def _writer(handoff: _Handoff) -> Peer:
    if handoff.writer is None:
        raise InvariantBroken(f"{handoff.key} is {handoff.state.value} and has no writer")
    return handoff.writer


def _writes(worker: WorkerId, handoff: _Handoff) -> bool:
    """Is the handoff's writer this worker, in this or an earlier epoch of its process?"""
    return (
        handoff.writer is not None
        and handoff.writer.worker.uuid == worker.uuid
        and handoff.writer.worker.epoch <= worker.epoch
    )
