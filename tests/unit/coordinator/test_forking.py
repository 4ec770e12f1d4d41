import asyncio
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from coordinator.forking import ForkedProcess, ForkServer
from coordinator.processes import Child, end_children, start_child
from tests.unit.coordinator.cluster import until

MODULE = "tests.unit.coordinator.stubborn_process"
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def adopts_nobody_afterwards() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@asynccontextmanager
async def opened(folder: Path, *modules: str) -> AsyncIterator[ForkServer]:
    server = ForkServer(modules, folder / "forkserver.log")
    await server.open()
    yield server
    await server.close()


async def started(folder: Path, server: ForkServer, *arguments: str) -> Child:
    log_path = folder / "child.log"
    log_path.unlink(missing_ok=True)
    child = await start_child("child", MODULE, arguments, log_path, server)
    await until(lambda: "started" in log_path.read_text(), "it runs")
    return child


def words_of(pid: int) -> list[str]:
    return " ".join(psutil.Process(pid).cmdline()).split()


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
            (process,) = [child for child in psutil.Process().children() if "coordinator.forkserver" in child.cmdline()]
            process.kill()
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
