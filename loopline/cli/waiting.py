"""Waiting for workers to come and go, for the commands that change them."""

import time
from collections import Counter
from collections.abc import Callable

from loopline.client import ClusterStatus
from loopline.client.operator import Operator
from loopline.client.records import LauncherInfo
from loopline.errors import CoordinatorUnreachable, DeadlineExceeded
from loopline.identity import Role, WorkerState
from loopline.launcher_messages import WorkerCounts

POLL_S = 0.1


def wait_for(operator: Operator, is_so: Callable[[ClusterStatus], bool], what: str, timeout_s: float) -> ClusterStatus:
    """The first status that is so. DeadlineExceeded says `what` was waited for. A coordinator that does not answer for
    a while is waited for, too."""
    end_s = time.monotonic() + timeout_s
    waits: list[str] = []
    while True:
        try:
            status = operator.status()
            if is_so(status):
                return status
            waits = waits_of(status)
        except CoordinatorUnreachable:
            if time.monotonic() >= end_s:
                raise
        if time.monotonic() >= end_s:
            hint = "; ".join([*waits, "`loopline status` shows how far it is"])
            raise DeadlineExceeded(f"not within {timeout_s:g} s: {what}; {hint}")
        time.sleep(POLL_S)


def is_settled(status: ClusterStatus) -> bool:
    """Every worker that the launcher is to keep is as ready as it can be, and those that it was to drain are gone."""
    launcher = status.launcher
    if launcher is None:
        return False
    living = {worker.name: worker for worker in status.workers if worker.state != WorkerState.LOST}
    enough = _as_ready_as_can_be(status)
    kept = Counter(worker.role for worker in launcher.workers)
    return WorkerCounts.by_role(lambda role: kept[role]) == wanted_of(launcher) and all(
        not worker.leaving and worker.name in living and living[worker.name].state in enough
        for worker in launcher.workers
    )


def waits_of(status: ClusterStatus) -> list[str]:
    """Of each worker that does not run yet, or takes no request yet, why."""
    joined = [f"{worker.name} waits for {worker.waits_for}" for worker in status.workers if worker.waits_for]
    launched = status.launcher.workers if status.launcher is not None else ()
    return joined + [f"{worker.name} waits: {worker.waits_for}" for worker in launched if worker.waits_for]


def wanted_of(launcher: LauncherInfo) -> WorkerCounts:
    """How many workers it is to keep."""
    return WorkerCounts.by_role(lambda role: getattr(launcher, role))


def has_successor(status: ClusterStatus, name: str, uuid: str) -> bool:
    """A worker of that name, not the life with that uuid, is as ready as it can be."""
    enough = _as_ready_as_can_be(status)
    return any(worker.name == name and worker.uuid != uuid and worker.state in enough for worker in status.workers)


def has_gone(status: ClusterStatus, uuid: str) -> bool:
    """The life with that uuid is no longer among the workers."""
    return all(worker.uuid != uuid or worker.state == WorkerState.LOST for worker in status.workers)


def _as_ready_as_can_be(status: ClusterStatus) -> set[WorkerState]:
    """Ready; or joined, where the other role has no worker to be paired with."""
    roles = {worker.role for worker in status.workers if worker.state != WorkerState.LOST}
    may_pair = roles >= {Role.PREFILL, Role.DECODE}
    return {WorkerState.READY} if may_pair else {WorkerState.READY, WorkerState.STARTING}
