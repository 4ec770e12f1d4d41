import asyncio
from collections.abc import Callable, Iterator

import pytest

from coordinator.fleet import Fleet, LauncherStream
from loopline.errors import OperatorError
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker, LauncherReport, Wanted, WorkerCounts

TWO = WorkerCounts(2, 2)
KEPT = (KeptWorker("decode-0", Role.DECODE, False), KeptWorker("decode-1", Role.DECODE, True))


def report(
    launcher: str = "one", wanted: WorkerCounts = TWO, revision: int = 0, *, restarts: bool = True
) -> LauncherReport:
    return LauncherReport(launcher, "127.0.0.1", restarts, wanted, revision, KEPT)


Asked = Callable[[LauncherStream], Wanted | None]


@pytest.fixture
def asked() -> Iterator[Asked]:
    """What a launcher would read now; None: nothing, or the end."""

    async def read(stream: LauncherStream) -> Wanted | None:
        waiting = asyncio.ensure_future(stream.next_wanted())
        await asyncio.sleep(0)  # one round of the event loop
        waiting.cancel()
        (found,) = await asyncio.gather(waiting, return_exceptions=True)
        return found if isinstance(found, Wanted) else None

    with asyncio.Runner() as runner:
        yield lambda stream: runner.run(read(stream))


def test_numbers_are_the_launchers_until_somebody_scales(asked: Asked) -> None:
    fleet = Fleet()
    assert fleet.launcher is None
    stream = fleet.attach(report())
    assert fleet.launcher == report()
    assert asked(stream) is None
    assert fleet.scale(None, 3) == (TWO, WorkerCounts(2, 3))
    assert fleet.scale(0, None) == (WorkerCounts(2, 3), WorkerCounts(0, 3))
    assert asked(stream) == Wanted(WorkerCounts(0, 3), 2)  # the last word alone
    assert fleet.scale(0, 3) == (WorkerCounts(0, 3), WorkerCounts(0, 3))
    assert asked(stream) is None  # it keeps them already


def test_a_report_that_is_older_than_the_last_word_does_not_undo_it() -> None:
    fleet = Fleet()
    stream = fleet.attach(report())
    fleet.scale(None, 5)
    fleet.take(stream, report())
    assert fleet.launcher is not None and fleet.launcher.wanted == WorkerCounts(2, 5)
    fleet.take(stream, report(wanted=WorkerCounts(2, 4), revision=1))  # it took it, and one has ended for good since
    assert fleet.launcher is not None and fleet.launcher.wanted == WorkerCounts(2, 4)


def test_a_launcher_that_comes_back_takes_its_own_place_and_hears_what_it_missed(asked: Asked) -> None:
    fleet = Fleet()
    first = fleet.attach(report())
    fleet.scale(None, 1)
    second = fleet.attach(report())
    assert asked(first) is None
    assert asked(second) == Wanted(WorkerCounts(2, 1), 1)
    fleet.detach(first)
    fleet.take(first, report(wanted=WorkerCounts(9, 9)))
    assert fleet.launcher is not None and fleet.launcher.wanted == WorkerCounts(2, 1)
    fleet.take(second, report(wanted=WorkerCounts(2, 1), revision=1))
    fleet.detach(second)
    assert fleet.launcher is None
    assert asked(fleet.attach(report(wanted=WorkerCounts(2, 1)))) is None


def test_another_launcher_waits_until_the_first_has_gone() -> None:
    fleet = Fleet()
    stream = fleet.attach(report())
    with pytest.raises(OperatorError, match=r"another launcher, for 127\.0\.0\.1, is attached"):
        fleet.attach(report("two"))
    fleet.detach(stream)
    fleet.attach(report("two", WorkerCounts(1, 1)))
    assert fleet.launcher is not None and fleet.launcher.wanted == WorkerCounts(1, 1)


def test_without_a_launcher_nobody_scales() -> None:
    with pytest.raises(OperatorError, match="no launcher is attached"):
        Fleet().scale(1, 1)


@pytest.mark.parametrize(("counts", "words"), [((-1, None), "prefill is -1"), ((None, 1001), "decode is 1001")])
def test_a_number_out_of_range_is_named(counts: tuple[int | None, int | None], words: str) -> None:
    fleet = Fleet()
    fleet.attach(report())
    with pytest.raises(OperatorError, match=f"{words}; allowed: 0 to 1000"):
        fleet.scale(*counts)
    assert fleet.launcher == report()


def test_who_returns_after_a_drain() -> None:
    fleet = Fleet()
    assert not fleet.returns("decode-0")
    stream = fleet.attach(report())
    assert fleet.returns("decode-0") and not fleet.returns("decode-1") and not fleet.returns("by-hand")
    fleet.take(stream, report(restarts=False))
    assert not fleet.returns("decode-0")
