"""However a launch ends, no process of it stays: also a worker that is stopped, or still loading."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import LOOPLINE, READY_S, wait_until, write_config
from tests.support.golden import MODELS


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def decode_workers(launch: psutil.Process) -> list[psutil.Process]:
    """Those that are loading torch. What is stopped in its first milliseconds, before it has asked the kernel to die
    with its launcher, stays until it is let go on."""
    found = []
    for child in launch.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_loading = any("libtorch" in area.path for area in child.memory_maps())
            if is_loading and "decode_worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_a_killed_launch_takes_a_stopped_worker_with_it(moment: str, tmp_path: Path) -> None:
    config = write_config(tmp_path / "cluster.yaml", MODELS / "tiny-ouro")
    ready = tmp_path / "ready.json"
    command = [str(LOOPLINE), "launch", str(config), "--port", "0", "--ready-file", str(ready)]
    launch = subprocess.Popen([*command, "--run-dir", str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        me = psutil.Process(launch.pid)
        wait_until(lambda: decode_workers(me), "a decode worker has started", READY_S)
        if moment == "serving":
            wait_until(ready.is_file, "the cluster serves", READY_S)
        children = me.children(recursive=True)
        for worker in decode_workers(me):
            os.kill(worker.pid, signal.SIGSTOP)
    finally:
        launch.kill()
        launch.wait()
    wait_until(lambda: all(map(is_gone, children)), "no process is left", READY_S)
