import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from coordinator.forking import ForkedProcess, ForkServer
from coordinator.orphans import reap_orphans
from coordinator.processes import Child, end_children, start_child
from tests.unit.coordinator.cluster import until

MODULE = "tests.unit.coordinator.stubborn_process"
PR_SET_CHILD_SUBREAPER = 36
OTHERS: set[int] = set()


@pytest.fixture(autouse=True)
def adopts_nobody_afterwards() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@asynccontextmanager
async def opened(folder: Path, *modules: str, **options: float) -> AsyncIterator[ForkServer]:
    server = ForkServer(modules, folder / "forkserver.log", **options)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def started(folder: Path, server: ForkServer, *arguments: str) -> Child:
    log_path = folder / "child.log"
    log_path.unlink(missing_ok=True)
    child = await start_child("child", MODULE, arguments, log_path, server)
    await until(lambda: "started" in log_path.read_text(), "it runs")
    return child


def words_of(pid: int) -> list[str]:
    return " ".join(psutil.Process(pid).cmdline()).split()


def process_of_server() -> psutil.Process:
    found = []
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended
            if "coordinator.forkserver" in child.cmdline():
                found.append(child)
    (process,) = found
    return process


@pytest.fixture(autouse=True)
def _others() -> None:
    """Children that other tests have left to this process are none of ours."""
    OTHERS.clear()
    OTHERS.update(child.pid for child in psutil.Process().children())


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in OTHERS]


def running_children() -> list[int]:
    found = []
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):  # reaped since it was listed
            found += [child.pid] if child.status() != psutil.STATUS_ZOMBIE else []
    return found


def orphan() -> int:
    """The id of a process that this one was given, in the session of one that has ended."""
    words = ["sh", "-c", "sleep 600 >&2 & echo $!"]
    return int(subprocess.run(words, start_new_session=True, stdout=subprocess.PIPE, check=True).stdout)


def end(pid: int) -> None:
    """It is a zombie afterwards."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def own_children() -> list[subprocess.Popen[bytes]]:
    """In this process's session, and in one of their own."""
    return [subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=is_new) for is_new in (False, True)]


def is_forked(child: Child) -> bool:
    return isinstance(child.process, ForkedProcess)


def test_a_forked_process_is_a_child_of_this_one_under_its_own_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as server:
            child = await started(tmp_path, server, "--stubborn")
            assert is_forked(child)
            assert psutil.Process(child.pid).ppid() == os.getpid()
            assert os.getsid(child.pid) == child.pid
            words = words_of(child.pid)
            assert words[1:4] == ["-m", MODULE, "--stubborn"]
            assert sorted(map(int, os.listdir(f"/proc/{child.pid}/fd"))) == [0, 1, 2, int(words[-1])]
            os.close(child.life_fd)  # as the kernel does when the parent dies
            assert await child.process.wait() == 0

    asyncio.run(main())


def test_a_forked_process_is_ended_and_reaped_as_others_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as server:
            willing = await started(tmp_path, server)
            stubborn = await started(tmp_path, server, "--stubborn")
            assert is_forked(willing) and is_forked(stubborn)
            reaped = [asyncio.ensure_future(child.reap()) for child in (willing, stubborn)]
            await end_children([willing, stubborn], 0.3)
            assert await asyncio.gather(*reaped) == [-signal.SIGTERM, -signal.SIGKILL]
            assert not psutil.pid_exists(willing.pid) and not psutil.pid_exists(stubborn.pid)
            willing.kill()  # nobody is meant any more

    asyncio.run(main())


def test_a_forked_process_that_fails_says_so_in_its_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as server:
            child = await start_child("prefill-0", MODULE, ["--fail"], tmp_path / "log", server)
            assert await child.reap() == 1
            assert "the machine has no such thing" in child.describe_end()
            child = await start_child("prefill-0", "tests.no_such_module", [], tmp_path / "log", server)
            assert await child.reap() == 1
            assert "no_such_module" in child.describe_end()

    asyncio.run(main())


def test_the_end_of_the_fork_server_is_nobodys_loss(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as server:
            before = await started(tmp_path, server)
            process_of_server().kill()
            after = await started(tmp_path, server)
            assert before.is_alive and not is_forked(after)
        assert before.is_alive and after.is_alive
        await end_children([before, after], 5.0)
        await asyncio.gather(before.reap(), after.reap())

    asyncio.run(main())


def test_code_that_has_changed_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever installs another version and restarts workers gets that version."""
    package = tmp_path / "loaded_by_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("from loaded_by_a_test.code import WORD\nprint(WORD, flush=True)\n")
    code = package / "code.py"
    code.write_text("WORD = 'first'\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def said(server: ForkServer) -> str:
        child = await start_child("child", package.name, [], tmp_path / "log", server)
        assert await child.reap() == 0
        return (tmp_path / "log").read_text().split()[-1]

    async def main() -> None:
        async with opened(tmp_path, package.name) as server:
            assert await said(server) == "first"
            code.write_text("WORD = 'second'\n")
            assert await said(server) == "second"

    asyncio.run(main())


def test_a_module_that_is_no_package_is_loaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, sys\nif __name__ == '__main__':\n    print('runs', flush=True)\n"
    (tmp_path / "module_of_a_test.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def main() -> None:
        async with opened(tmp_path, "module_of_a_test") as server:
            child = await start_child("child", "module_of_a_test", [], tmp_path / "log", server)
            assert isinstance(child.process, ForkedProcess)
            assert await child.reap() == 0
        assert [(tmp_path / name).read_text() for name in ("log", "forkserver.log")] == ["runs\n", ""]

    asyncio.run(main())


def test_what_has_threads_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "threaded_by_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def main() -> None:
        async with opened(tmp_path, package.name) as server:
            child = await started(tmp_path, server)
            assert not is_forked(child)
            child.terminate()
            assert await child.reap() == -signal.SIGTERM

    asyncio.run(main())


async def only_one_runs(folder: Path, server: ForkServer) -> None:
    """After an order was given up: its process must not run beside the one that takes its place."""
    child = await started(folder, server)
    assert not is_forked(child)
    await until(lambda: running_children() == [child.pid], "whatever was forked for it has ended")
    assert (folder / "child.log").read_text() == "started\n"
    child.terminate()
    await child.reap()


def test_an_order_without_an_answer_starts_nothing_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, answer_s=0.1) as server:
            process_of_server().suspend()  # as long as loading may take
            await only_one_runs(tmp_path, server)

    asyncio.run(main())


@pytest.mark.parametrize("turns", [1, 20, 200])
def test_an_order_that_is_cancelled_at_any_moment_starts_nothing(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        async with opened(tmp_path) as server:
            first = await started(tmp_path, server)
            assert is_forked(first)
            first.terminate()
            await first.reap()
            order = asyncio.ensure_future(start_child("child", MODULE, ["--stubborn"], tmp_path / "given_up", server))
            for _ in range(turns):
                await asyncio.sleep(0)
            order.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                child = await order
                child.kill()
                await child.reap()
                return
            await only_one_runs(tmp_path, server)
            assert (tmp_path / "given_up").read_text() == ""

    asyncio.run(main())


@pytest.mark.parametrize("word", [b"", b"g"])
def test_what_is_forked_runs_at_a_word_and_ends_without(tmp_path: Path, word: bytes) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    life_fd, write_fd = os.pipe()
    go_fd, let_go_fd = os.pipe()
    with theirs, (tmp_path / "forkserver.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "coordinator.forkserver", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stderr=log,
        )
    with ours, (tmp_path / "log").open("wb") as log:
        ours.settimeout(30.0)
        order = json.dumps({"module": MODULE, "arguments": ["--fail"]}).encode()
        socket.send_fds(ours, [order], [log.fileno(), life_fd, go_fd])
        pid = json.loads(ours.recv(1 << 16))["pid"]
        server.kill()
        server.wait()
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.write(let_go_fd, word)
        os.close(let_go_fd)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    for fd in (life_fd, write_fd, go_fd):
        os.close(fd)
    assert ("the machine has no such thing" in (tmp_path / "log").read_text()) == bool(word)
    assert ("has given the order up" in (tmp_path / "forkserver.log").read_text()) != bool(word)


def test_a_moment_without_processes_ends_no_forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fork fails: that process goes the plain way, the next one is forked, and no descriptor stays behind."""
    (tmp_path / "short_of_processes.py").write_text(
        "import errno, os\n"
        "fork, failures = os.fork, [OSError(errno.EAGAIN, 'no more processes')]\n"
        "def try_fork():\n"
        "    if failures:\n"
        "        raise failures.pop()\n"
        "    return fork()\n"
        "os.fork = try_fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    async def main() -> None:
        async with opened(tmp_path, "short_of_processes") as server:
            fds_of_server: list[list[str]] = []
            for is_from_there in (False, True):
                child = await started(tmp_path, server)
                assert is_forked(child) == is_from_there
                child.terminate()
                await child.reap()
                fds_of_server.append(sorted(os.listdir(f"/proc/{process_of_server().pid}/fd")))
            assert fds_of_server[0] == fds_of_server[1]

    asyncio.run(main())


def test_an_orphan_is_reaped_and_nobody_elses_child(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, look_s=0.01) as server:
            mine = own_children()
            await until(lambda: all(psutil.Process(one.pid).status() == "zombie" for one in mine), "they have ended")
            forked = await started(tmp_path, server)
            plain = await start_child("child", MODULE, ["--fail"], tmp_path / "log")
            left = orphan()
            assert psutil.Process(left).ppid() == os.getpid()
            os.kill(left, signal.SIGKILL)
            await until(lambda: not psutil.pid_exists(left), "it is reaped")
            forked.terminate()
            assert await forked.reap() == -signal.SIGTERM
            assert await plain.reap() == 1
            assert [one.wait() for one in mine] == [7, 7]

    asyncio.run(main())


def test_what_was_forked_for_a_given_up_order_is_reaped(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, look_s=0.01) as server:
            order = asyncio.ensure_future(start_child("child", MODULE, [], tmp_path / "log", server))
            await until(lambda: len(running_children()) > 1, "it is forked")
            order.cancel()
            await asyncio.wait([order])
            if not order.cancelled():
                child = await order
                child.kill()
                await child.reap()
            num_left = 0 if order.cancelled() else 1  # an order that got through leaves the fork server as it is
            await until(lambda: len(children()) == num_left, "nothing is left of it")

    asyncio.run(main())


def test_of_several_only_what_is_not_kept_is_reaped() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kept, other, living = orphan(), orphan(), orphan()
    end(kept)
    end(other)
    assert reap_orphans({kept}) == [other]
    assert reap_orphans({kept}) == []
    end(living)
    assert sorted(reap_orphans(())) == sorted([kept, living])
    assert reap_orphans(()) == []
