"""The supervisor of one worker, without Ray: it is a plain object of which Ray makes an actor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from coordinator.ray_supervisor import Started, Supervisor, Trace, look_for, make_folder
from coordinator.seat import Seat, end_and_look, has_ended, seat_of, this_machine, this_network
from loopline.errors import OperatorError
from tests.unit.coordinator.cluster import WAIT_S, until

MODULE = "tests.unit.coordinator.stubborn_process"
ADDRESS = "127.0.0.1:50051"


async def start(supervisor: Supervisor, *arguments: str, network: str | None = None) -> Started:
    return await supervisor.start("decode-0", MODULE, arguments, "model: {}\n", ADDRESS, network or this_network())


async def whole_log(supervisor: Supervisor) -> str:
    log = b""
    async with asyncio.timeout(WAIT_S):
        while chunk := await supervisor.read_log(len(log)):
            log += chunk
    return log.decode()


def test_it_tells_how_its_worker_ended_and_all_that_it_wrote() -> None:
    async def main() -> None:
        supervisor = Supervisor()
        started = await start(supervisor)
        assert started.seat is not None and not has_ended(started.seat)
        assert started.seat.machine == this_machine()
        first = await supervisor.read_log(0)
        config = Path(first.decode().splitlines()[0])
        assert await asyncio.to_thread(config.read_text) == "model: {}\n"
        waiting = asyncio.ensure_future(supervisor.wait())
        await supervisor.terminate()
        assert await waiting == await supervisor.wait() == -signal.SIGTERM
        assert "started" in await whole_log(supervisor)
        assert not await asyncio.to_thread(config.exists)
        assert has_ended(started.seat)
        await supervisor.kill()  # of one that has ended: nothing

    asyncio.run(main())


def test_one_that_does_not_leave_is_killed() -> None:
    async def main() -> None:
        supervisor = Supervisor()
        await start(supervisor, "--stubborn")
        assert b"started" in await supervisor.read_log(0)
        await supervisor.terminate()
        await supervisor.kill()
        assert await supervisor.wait() == -signal.SIGKILL

    asyncio.run(main())


def test_a_node_that_does_not_reach_the_coordinator_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(OperatorError, match=r"coordinator is at 127.0.0.1:50051.*needed: a coordinator.host that"):
            await start(Supervisor(), network="another machine's")

    asyncio.run(main())


def test_a_process_of_a_supervisor_that_is_gone_is_ended_and_its_end_seen() -> None:
    async def main(seat: Seat) -> None:
        supervisor = Supervisor()
        await supervisor.end_and_look(Trace(seat))
        await until(lambda: has_ended(seat), "it was killed; nobody has reaped it yet")
        assert await supervisor.end_and_look(Trace(seat))

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        seat = seat_of(process.pid)
        assert seat is not None and not has_ended(seat)
        asyncio.run(main(seat))
    finally:
        process.kill()
        process.communicate()
    assert has_ended(seat) and end_and_look(seat)
    assert seat_of(process.pid) is None


def test_another_process_under_the_same_id_is_left_alone() -> None:
    mine = seat_of(os.getpid())
    assert mine is not None
    earlier = Seat(mine.machine, mine.pid, mine.start_ticks - 1)
    assert has_ended(earlier) and end_and_look(earlier)


def test_a_process_that_nobody_heard_of_is_found_by_its_arguments_once_its_supervisor_is_gone() -> None:
    """The supervisor is a process that has started another, and is not heard of any more."""
    argument = uuid.uuid4().hex
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()', '--uuid', sys.argv[1]]); input()"
    command = [sys.executable, "-c", code, argument]
    pipe = subprocess.PIPE

    async def main(trace: Trace) -> None:
        await until(lambda: len(pids_with(argument)) == 3, "all run")
        await until(lambda: look_for(trace), "neither of the two runs any more")
        assert pids_with(argument) == [other.pid]

    supervisor = subprocess.Popen(command, stdin=pipe)
    other = subprocess.Popen([sys.executable, "-c", "input()", argument], stdin=pipe)  # somebody who looks for it
    try:
        seat = seat_of(supervisor.pid)
        assert seat is not None
        asyncio.run(main(Trace(seat, ("--uuid", argument))))
    finally:
        for process in (supervisor, other):
            process.kill()
            process.communicate()


def pids_with(argument: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if argument in (p.info["cmdline"] or [])]


def test_the_next_folder_sweeps_those_of_processes_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = make_folder("decode-0"), make_folder("decode-1")
    mine = json.loads((first / "supervisor.json").read_text())
    (first / "supervisor.json").write_text(json.dumps({**mine, "start_ticks": mine["start_ticks"] - 1}))
    (third := tmp_path / "loopline-of-ray-being-made").mkdir()
    (fourth := tmp_path / "loopline-of-ray-elsewhere").mkdir()
    (fourth / "supervisor.json").write_text(json.dumps({**mine, "machine": "another", "start_ticks": 1}))
    last = make_folder("decode-0")
    assert sorted(tmp_path.iterdir()) == sorted([second, third, fourth, last])
