"""When a worker should change its role: what is seen of the cluster at one moment, and what follows from many of these.

Unified workers have no part in it. Pure: snapshots and moments come in, decisions go out. `coordinator.rebalance_watch`
looks, and asks the launcher.
"""

from collections import deque
from dataclasses import dataclass, replace
from statistics import fmean

from coordinator.room import has_decode_room
from coordinator.snapshot import Backlog, ClusterSnapshot, WorkerView
from loopline.identity import Role, WorkerState
from loopline.launcher_messages import LauncherReport, WorkerCounts
from loopline.request import Request

COOL_DOWN = 4  # times the patience: from one move to the next
_AT_FAULT = 0.75  # part of the looks that must show one side as the bottleneck: short gaps do not matter
_CONTRADICTED = 0.1  # part of them that may show the other one
_SLACK = 0.75  # part of the giving role's workers after the move that may be in use


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The cluster at one moment, as far as it says which role is short of workers."""

    ready: WorkerCounts
    """Workers that are ready."""
    wanted: WorkerCounts | None
    """What the launcher keeps; None: none is attached."""
    is_settled: bool
    """No worker is starting or draining, and the launcher has all that are wanted."""
    num_groups: int
    """Pairing groups."""
    num_waiting: int
    """Requests that no worker computes for: queued, or with a reservation that no prefill worker has room for."""
    has_decode_room: bool
    """The first of them would have room on a decode worker if only requests that generate held any. What is held by
    requests whose prompt is not done is the prefill workers' doing."""
    prefill_busy: int
    """Prefill workers that have a request."""
    decode_held: float
    """Decode workers' worth of slots or blocks, whichever is more, that requests hold which generate."""

    @property
    def bottleneck(self) -> Role | None:
        """Whose lack of room the waiting is due to; None: nobody's, or both's."""
        if not self.num_waiting or not (self.ready.prefill or self.ready.decode):
            return None
        if not self.has_decode_room:
            return Role.DECODE
        is_short = self.prefill_busy >= self.ready.prefill and self.decode_held <= self.ready.decode / 2
        return Role.PREFILL if is_short else None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Means over the samples that a decision hangs on."""

    seconds: float
    at_fault: float  # part of the samples
    num_waiting: float
    prefill_busy: float  # workers
    decode_held: float  # workers' worth of room
    ready: WorkerCounts

    def __str__(self) -> str:
        return (
            f"in {self.at_fault:.0%} of the last {self.seconds:.1f} s; on average {self.num_waiting:.1f} requests"
            f" waited, {self.prefill_busy:.2f} of {self.ready.prefill} prefill workers were busy and the room of"
            f" {self.decode_held:.2f} of {self.ready.decode} decode workers was held by requests that generate"
        )


@dataclass(frozen=True)
class Move:
    """One worker of the other role less, one of `to` more."""

    to: Role
    before: WorkerCounts
    after: WorkerCounts
    evidence: Evidence


@dataclass(frozen=True)
class Hold:
    """A worker should move to `to` and cannot."""

    to: Role
    obstacle: str
    evidence: Evidence


class RebalancePolicy:
    """Moves a worker when one role has been the bottleneck for `patience_s` and the other one can spare it.

    Invariant: the samples it has kept were taken of the same workers, without a gap. One of an unsettled cluster drops
    them all, and so does a move: whatever follows takes the patience again, and no move comes within the cool-down.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.cool_down_s = COOL_DOWN * patience_s
        self._samples: deque[tuple[float, Sample]] = deque()
        self._moved_at_s: float | None = None
        self._held: tuple[Role, str] | None = None
        self._held_at_s = 0.0

    def observe(self, sample: Sample, now_s: float) -> Move | Hold | None:
        """Take a look at `now_s`, later than all before. The same Hold comes once in a cool-down."""
        if not sample.is_settled:
            self._samples.clear()
            return None
        self._keep(sample, now_s)
        if now_s - self._samples[0][0] < self.patience_s:
            return None
        to = self._bottleneck()
        if to is None or not self._can_spare(_other(to)):
            return None
        obstacle = self._obstacle(sample, to, now_s)
        if obstacle:
            return self._hold(Hold(to, obstacle, self._evidence(to)), now_s)
        assert sample.wanted is not None  # else it is an obstacle
        step = 1 if to is Role.DECODE else -1
        after = replace(sample.wanted, prefill=sample.wanted.prefill - step, decode=sample.wanted.decode + step)
        move = Move(to, sample.wanted, after, self._evidence(to))
        self._samples.clear()
        self._moved_at_s = now_s
        return move

    def _keep(self, sample: Sample, now_s: float) -> None:
        """As many samples as reach back by the patience."""
        if self._samples:
            last_s, last = self._samples[-1]
            if now_s - last_s > self.patience_s / 2 or last.ready != sample.ready:
                self._samples.clear()
        self._samples.append((now_s, sample))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= self.patience_s:
            self._samples.popleft()

    def _bottleneck(self) -> Role | None:
        """The role that was it for long, and that the other one hardly ever was."""
        for role in (Role.PREFILL, Role.DECODE):
            if self._part(role) >= _AT_FAULT and self._part(_other(role)) <= _CONTRADICTED:
                return role
        return None

    def _can_spare(self, giver: Role) -> bool:
        """Whether one worker less of it would do; where there is one only, whether it has little to do."""
        in_use = self._evidence(giver).prefill_busy if giver is Role.PREFILL else self._evidence(giver).decode_held
        return in_use <= _SLACK * max(1, self._samples[-1][1].ready.of(giver) - 1)

    def _obstacle(self, sample: Sample, to: Role, now_s: float) -> str:
        """Why it cannot be, "" where nothing is in the way."""
        if sample.wanted is None:
            return "no launcher is attached"
        if sample.num_groups > 1:
            return f"there are {sample.num_groups} pairing groups"
        giver = _other(to)
        if sample.wanted.of(giver) < 2:
            return f"the launcher keeps {sample.wanted.of(giver)} {giver} worker, and one has to stay"
        if self._moved_at_s is not None and now_s - self._moved_at_s < self.cool_down_s:
            return f"the last move was less than {self.cool_down_s:g} s ago"
        return ""

    def _hold(self, hold: Hold, now_s: float) -> Hold | None:
        if self._held == (hold.to, hold.obstacle) and now_s - self._held_at_s < self.cool_down_s:
            return None
        self._held, self._held_at_s = (hold.to, hold.obstacle), now_s
        return hold

    def _part(self, role: Role) -> float:
        return fmean(sample.bottleneck is role for _, sample in self._samples)

    def _evidence(self, to: Role) -> Evidence:
        samples = [sample for _, sample in self._samples]
        return Evidence(
            seconds=self._samples[-1][0] - self._samples[0][0],
            at_fault=self._part(to),
            num_waiting=fmean(sample.num_waiting for sample in samples),
            prefill_busy=fmean(sample.prefill_busy for sample in samples),
            decode_held=fmean(sample.decode_held for sample in samples),
            ready=samples[-1].ready,
        )


def take_sample(snapshot: ClusterSnapshot, backlog: Backlog, launcher: LauncherReport | None) -> Sample:
    """What one look at the coordinator's state says. `launcher`: the attached one, with what is wanted of it now."""
    prefill, decode = snapshot.with_role(Role.PREFILL), snapshot.with_role(Role.DECODE)
    at_prefill = {row.request_id for view in prefill for row in view.assigned}
    generating = [_generating(view, at_prefill) for view in decode]
    return Sample(
        ready=WorkerCounts.by_role(
            lambda role: sum(view.state is WorkerState.READY for view in snapshot.with_role(role))
        ),
        wanted=None if launcher is None else launcher.wanted,
        is_settled=_is_settled([view for role in Role for view in snapshot.with_role(role)], launcher),
        num_groups=len({view.group for view in (*prefill, *decode)}),
        num_waiting=backlog.num_queued + backlog.num_reserved,
        has_decode_room=backlog.num_reserved > 0 or _has_room(backlog.first, generating),
        prefill_busy=sum(bool(view.assigned) for view in prefill),
        decode_held=sum(_part_held(view) for view in generating),
    )


def _generating(view: WorkerView, at_prefill: set[str]) -> WorkerView:
    """A decode worker with those requests alone whose prompts are done."""
    rows = (row for row in view.assigned if not row.awaits_prefill and row.request_id not in at_prefill)
    return replace(view, assigned=tuple(rows))


def _has_room(request: Request | None, decode: list[WorkerView]) -> bool:
    return request is not None and any(view.takes_work and has_decode_room(view, request) for view in decode)


def _part_held(view: WorkerView) -> float:
    slots = len(view.assigned) / view.capacity.max_running
    return min(1.0, max(slots, view.sums.most_blocks / max(1, view.usable_blocks)))


def _is_settled(living: list[WorkerView], launcher: LauncherReport | None) -> bool:
    if any(view.state is not WorkerState.READY for view in living):
        return False
    if launcher is None:
        return True
    staying = [worker for worker in launcher.workers if not worker.leaving]
    counts = WorkerCounts.by_role(lambda role: sum(worker.role is role for worker in staying))
    is_whole = len(staying) == len(launcher.workers) and counts == launcher.wanted
    return is_whole and {worker.name for worker in staying} <= {view.peer.name for view in living}


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
