"""A worker process whose engine thread hangs or fails: it always ends, and says so."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT_S = 90.0


class Broken:
    """A started `broken_worker` whose engine thread runs, and the write end of its life pipe."""

    def __init__(self, mode: str) -> None:
        read_fd, self.life_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.worker.broken_worker", mode, str(read_fd)],
            pass_fds=(read_fd,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        os.close(read_fd)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ticking\n"

    def end(self) -> str:
        """Its log; the exit status is on `process`."""
        try:
            return self.process.communicate(timeout=LIMIT_S)[1]
        finally:
            self.process.kill()

    def signal_twice(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # two of one kind may be delivered as one
            self.process.send_signal(number)

    def close_life_pipe(self) -> None:
        os.close(self.life_fd)


def test_a_failed_engine_thread_ends_the_process_with_a_log() -> None:
    log = (broken := Broken("fail")).end()
    broken.close_life_pipe()
    assert broken.process.returncode == 1
    assert "the engine thread failed" in log and "broken by the test" in log


def test_a_worker_whose_engine_stands_still_ends_by_itself() -> None:
    log = (broken := Broken("stand still")).end()
    broken.close_life_pipe()
    assert broken.process.returncode == 1
    assert "the engine has stood still for" in log


@pytest.mark.parametrize("order", [Broken.signal_twice, Broken.close_life_pipe])
def test_a_hung_engine_thread_cannot_keep_the_process(order: Callable[[Broken], None]) -> None:
    broken = Broken("hang")
    order(broken)
    log = broken.end()
    assert broken.process.returncode == 1
    assert "the engine thread does not stop" in log
    if order is Broken.signal_twice:
        broken.close_life_pipe()


def test_a_worker_whose_blocks_stay_in_quarantine_leaves_to_be_started_again() -> None:
    log = (broken := Broken("quarantine")).end()
    broken.close_life_pipe()
    assert broken.process.returncode == 3
    assert "5 of 8 blocks are in quarantine, and more than 0.5 of them have been for 0.2 s" in log
    assert "draining for at most 10 s" in log and "not drained" not in log
