import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from coordinator.processes import Child, end_children, start_child
from tests.unit.coordinator.cluster import WAIT_S, until

MODULE = "tests.unit.coordinator.stubborn_process"


async def started(folder: Path, *arguments: str) -> Child:
    log_path = folder / "child.log"
    log_path.unlink(missing_ok=True)
    child = await start_child("child", MODULE, arguments, log_path)
    await until(lambda: "started" in log_path.read_text(), "it runs")
    return child


def test_a_child_leaves_when_its_parent_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        child = await started(tmp_path, "--stubborn")
        assert os.getsid(child.pid) == child.pid  # not in the terminal's session
        os.close(child.life_fd)  # as the kernel does when the parent dies
        assert await child.process.wait() == 0

    asyncio.run(main())


def test_a_child_that_does_not_leave_is_killed_at_the_limit(tmp_path: Path) -> None:
    async def main() -> None:
        willing, stubborn = await started(tmp_path), await started(tmp_path, "--stubborn")
        reaped = [asyncio.ensure_future(child.reap()) for child in (willing, stubborn)]
        await end_children([willing, stubborn], 0.3)
        assert not willing.is_alive and not stubborn.is_alive
        assert await asyncio.gather(*reaped) == [-signal.SIGTERM, -signal.SIGKILL]
        await end_children([willing, stubborn], 0.3)

    asyncio.run(main())


def test_an_end_is_described_with_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        child = await start_child("prefill-0", MODULE, ["--fail"], tmp_path / "log")
        assert await child.reap() == 1
        assert "prefill-0 ended with exit status 1" in child.describe_end()
        assert "the machine has no such thing" in child.describe_end()
        with (tmp_path / "log").open("a") as log:
            log.writelines(f"line {number}\n" for number in range(100_000))
        assert child.describe_end().splitlines()[1:] == [f"  line {number}" for number in range(99_980, 100_000)]

    asyncio.run(main())


def test_a_log_whose_folder_was_cleaned_away_hinders_no_start_and_no_end(tmp_path: Path) -> None:
    async def main() -> None:
        child = await start_child("prefill-0", MODULE, ["--fail"], tmp_path / "gone" / "log")
        assert await child.reap() == 1
        assert "the machine has no such thing" in child.describe_end()
        shutil.rmtree(tmp_path / "gone")
        assert "prefill-0 ended with exit status 1; its log cannot be read: " in child.describe_end()

    asyncio.run(main())


def test_a_child_whose_parent_was_gone_before_it_began_runs_nothing() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    command = [sys.executable, "-m", "coordinator.child", MODULE, "--life-fd", str(read_fd)]
    ended = subprocess.run(command, pass_fds=(read_fd,), capture_output=True, text=True, timeout=WAIT_S)
    os.close(read_fd)
    assert ended.returncode == 1 and "nothing is run" in ended.stderr and ended.stdout == ""
