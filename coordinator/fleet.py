"""The coordinator's side of launchers: which one is attached, what it keeps, what it is asked to keep. No I/O.

The wanted numbers are the launcher's own, from its YAML, until somebody scales; a coordinator that starts anew learns
them from it again.
"""

import asyncio
import logging
from dataclasses import replace

from loopline.config_sections import MOST_WORKERS
from loopline.errors import OperatorError
from loopline.identity import Role
from loopline.launcher_messages import LauncherReport, Wanted, WorkerCounts

_LOG = logging.getLogger(__name__)


class LauncherStream:
    """What is wanted of one launcher. Only the last word counts, so nothing queues here."""

    def __init__(self) -> None:
        self._wanted: Wanted | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def send(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next_wanted(self) -> Wanted | None:
        """The next word, or None at the end."""
        while not self._closed:
            if self._wanted is not None:
                wanted, self._wanted = self._wanted, None
                return wanted
            self._changed.clear()
            await self._changed.wait()
        return None


class Fleet:
    """Invariant: at most one launcher is attached; its report is the truth about numbers unless it answers a word that
    is not the last."""

    def __init__(self) -> None:
        self._report: LauncherReport | None = None  # of the last launcher, attached or not
        self._stream: LauncherStream | None = None  # of the attached one
        self._revision = 0
        self._wanted = WorkerCounts(0, 0)

    @property
    def launcher(self) -> LauncherReport | None:
        """The attached launcher, with what is wanted of it now."""
        if self._report is None or self._stream is None:
            return None
        return replace(self._report, wanted=self._wanted)

    def attach(self, report: LauncherReport) -> LauncherStream:
        """Take a launcher's stream in; an earlier one of the same launcher ends. What was asked of that and not taken
        is asked again. Raises OperatorError while another launcher is attached."""
        before = self._report if self._report is not None and self._report.launcher == report.launcher else None
        if self._stream is not None:
            if before is None:
                assert self._report is not None  # it came with the stream
                raise OperatorError(f"another launcher, for {self._report.place}, is attached to this coordinator")
            self._stream.close()
        unanswered = self._wanted if before is not None and before.revision != self._revision else None
        self._stream = stream = LauncherStream()
        self._report, self._revision, self._wanted = report, 0, report.wanted
        _LOG.info("a launcher keeps %s workers", report.wanted)
        if unanswered is not None:
            self._ask(stream, unanswered)
        return stream

    def take(self, stream: LauncherStream, report: LauncherReport) -> None:
        """A later report. Of a stream that was replaced it is ignored."""
        if stream is not self._stream:
            return
        self._report = report
        if report.revision == self._revision:
            self._wanted = report.wanted

    def detach(self, stream: LauncherStream) -> None:
        """The stream is over."""
        if stream is self._stream:
            _LOG.info("the launcher is gone")
            self._stream = None

    def scale(
        self, prefill: int | None, decode: int | None, unified: int | None = None
    ) -> tuple[WorkerCounts, WorkerCounts]:
        """Ask for so many workers, None: as many as now. Before and after. Raises OperatorError without a launcher."""
        asked = {Role.PREFILL: prefill, Role.DECODE: decode, Role.UNIFIED: unified}
        for name, count in asked.items():
            if count is not None and not 0 <= count <= MOST_WORKERS:
                raise OperatorError(f"{name} is {count}; allowed: 0 to {MOST_WORKERS}")
        if self._stream is None:
            raise OperatorError(
                "no launcher is attached to this coordinator, so nobody can start workers; by hand: `loopline worker`"
            )
        before = self._wanted
        after = replace(before, **{role.value: count for role, count in asked.items() if count is not None})
        if after != before:
            self._ask(self._stream, after)
        return before, after

    def returns(self, name: str) -> bool:
        """Whether a worker of that name is started again when it leaves."""
        launcher = self.launcher
        return (
            launcher is not None
            and launcher.restarts
            and any(worker.name == name and not worker.leaving for worker in launcher.workers)
        )

    def _ask(self, stream: LauncherStream, wanted: WorkerCounts) -> None:
        self._revision += 1
        self._wanted = wanted
        stream.send(Wanted(wanted, self._revision))
