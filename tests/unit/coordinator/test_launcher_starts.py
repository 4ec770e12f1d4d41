"""What a launcher makes of starts that fail or are not heard of, and of processes out of sight."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from coordinator.launcher import Launcher
from coordinator.processes import Child, OutOfSight, Process
from coordinator.starters import LocalStarter, Order
from loopline.errors import OperatorError
from loopline.launcher_messages import WorkerCounts
from tests.unit.coordinator.cluster import WAIT_S, token_at, until
from tests.unit.coordinator.test_launcher import LAUNCH_S, SCRIPTED, generate, is_gone, status, write_config


class Blinded:
    """A process whose end nobody sees, until it is proven."""

    def __init__(self, child: Child, proof: asyncio.Event) -> None:
        self._child = child
        self._proof = proof
        self.name, self.pid = child.name, child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    async def reap(self) -> OutOfSight:
        await self._child.reap()
        return OutOfSight("its supervisor is gone", self._proven)

    async def _proven(self) -> None:
        await self._proof.wait()

    async def wait(self) -> None:
        await self._child.wait()

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()

    def describe_end(self) -> str:
        return self._child.describe_end()


class ScriptedStarter(LocalStarter):
    """Starts processes of this machine, or does what the next of `script` says."""

    def __init__(self, config_path: Path) -> None:
        super().__init__(config_path, "127.0.0.1")
        self.script: list[str] = []
        self.always = ""
        self.proof = asyncio.Event()
        self.orders: list[Order] = []
        self.released: list[str] = []
        self.is_lost = asyncio.Event()

    async def start(self, order: Order, left: asyncio.Event) -> Process | OutOfSight | None:
        self.orders.append(order)
        say = self.script.pop(0) if self.script else self.always
        if say == "fails":
            raise OperatorError("no place")
        child = await super().start(order, left)
        assert isinstance(child, Child)
        if say == "is not heard of":
            self.unheard = child
            return OutOfSight("its answer is lost", self._ended)
        return child if say == "is seen" else Blinded(child, self.proof)

    async def _ended(self) -> None:
        await self.unheard.reap()

    async def watch(self) -> None:
        await self.is_lost.wait()
        raise OperatorError("its node is lost")

    def reached_at(self, address: str) -> str:
        return f"there, not at {address}"

    def release(self, name: str) -> None:
        self.released.append(name)

    def processes(self, name: str) -> list[str]:
        return [order.process for order in self.orders if order.name == name]


@contextlib.asynccontextmanager
async def scripted(folder: Path, drain_limit_s: float = 2.0) -> AsyncIterator[tuple[Launcher, ScriptedStarter]]:
    """A cluster that serves."""
    config = write_config(folder, drain_limit_s=drain_limit_s)
    starter = ScriptedStarter(config)
    launcher = Launcher(config, run_dir=folder / "run", port=0, worker_modules=SCRIPTED, starter=starter)
    async with launcher:
        await launcher.wait_serving(LAUNCH_S)
        yield launcher, starter


def test_a_worker_out_of_sight_has_a_successor_at_once_and_is_proven_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with scripted(tmp_path) as (launcher, starter):
            first = launcher.pids["decode-0"]
            os.kill(first, signal.SIGKILL)
            await until(lambda: launcher.pids.get("decode-0", first) != first, "a successor")
            assert await generate(launcher.address) == [token_at(position) for position in range(5, 10)]
            assert launcher.report(0).ended == ()
            starter.proof.set()
            await until(lambda: "is proven to have ended" in caplog.text, "the proof")
            assert launcher.report(0).ended == tuple(starter.processes("decode-0")[:1])
            launcher.want(WorkerCounts(1, 0))
            await until(lambda: starter.released == ["decode-0"], "it has left for good")

    asyncio.run(main())


def test_each_try_to_start_a_worker_is_another_process_to_everybody(tmp_path: Path) -> None:
    """An answer is lost after the process started: its successor is nobody else's, and the first one's end is only told
    once it is proven."""

    async def main() -> None:
        async with scripted(tmp_path) as (launcher, starter):
            starter.script = ["fails", "is not heard of", "fails"]
            first = launcher.pids["decode-0"]
            starter.proof.set()
            os.kill(first, signal.SIGKILL)
            await until(lambda: launcher.pids.get("decode-0", first) != first, "a successor that is heard of")
            processes = starter.processes("decode-0")
            assert len(set(processes)) == len(processes) == 5
            assert processes[2] not in launcher.report(0).ended
            last = launcher.pids["decode-0"]
            starter.unheard.kill()
            await until(lambda: processes[2] in launcher.report(0).ended, "the end of the other one is proven")
            assert launcher.pids["decode-0"] == last

            async def joined() -> bool:
                return processes[4] in {worker.uuid for worker in (await status(launcher.address)).workers}

            async with asyncio.timeout(WAIT_S):
                while not await joined():  # noqa: ASYNC110 - it has no event to wait for
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_launch_whose_starter_is_lost_ends_with_its_reason_and_drains_nothing(tmp_path: Path) -> None:
    """A request that waits for workers has a status before a drain of ten seconds would be over."""

    async def main() -> None:
        async with scripted(tmp_path, drain_limit_s=60.0) as (launcher, starter):
            starter.always = "fails"
            starter.proof.set()
            for pid in (launcher.pids["prefill-0"], launcher.pids["decode-0"]):
                os.kill(pid, signal.SIGKILL)
            waiting = asyncio.ensure_future(generate(launcher.address))
            async with asyncio.timeout(WAIT_S):
                while (await status(launcher.address)).queued == 0:  # noqa: ASYNC110 - it has no event to wait for
                    await asyncio.sleep(0.01)
            starter.is_lost.set()
            with pytest.raises(OperatorError, match="its node is lost"):
                await asyncio.wait_for(launcher.wait_stopped(), WAIT_S)
            coordinator = launcher.pids["coordinator"]
            async with asyncio.timeout(launcher.drain_limit_s - 2):
                await launcher.stop()
            assert launcher.pids == {} and is_gone(coordinator)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await waiting
            assert "shutting down" in str(caught.value.details())

    asyncio.run(main())


def test_a_worker_that_cannot_be_started_leaves_when_it_is_told_to(tmp_path: Path) -> None:
    async def main() -> None:
        async with scripted(tmp_path) as (launcher, starter):
            starter.always = "fails"
            launcher.want(WorkerCounts(1, 2))
            await until(lambda: len(starter.processes("decode-1")) > 1, "it is tried again")
            assert [worker.waits_for for worker in launcher.report(0).workers] == ["", "", "no place"]

            async def said() -> list[str]:
                return [worker.waits_for for worker in (await status(launcher.address)).launcher.workers]

            async with asyncio.timeout(WAIT_S):
                while await said() != ["", "", "no place"]:  # noqa: ASYNC110 - it has no event to wait for
                    await asyncio.sleep(0.01)
            launcher.want(WorkerCounts(1, 1))
            await until(lambda: starter.released == ["decode-1"], "it is not tried any more")
            assert [worker.name for worker in launcher.report(0).workers] == ["prefill-0", "decode-0"]

    asyncio.run(main())


def test_how_a_worker_crashed_is_said_with_its_log_and_one_that_leaves_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "coordinator.launcher"]

    async def main() -> None:
        async with scripted(tmp_path) as (launcher, starter):
            starter.always = "is seen"
            assert launcher.public_address == f"there, not at {launcher.address}"
            launcher.want(WorkerCounts(1, 2))
            await until(lambda: "decode-1" in launcher.pids, "one that is seen")
            first = launcher.pids["decode-1"]
            with (tmp_path / "run" / "decode-1.log").open("a") as log:
                log.write("its last words\n")
            os.kill(first, signal.SIGKILL)
            await until(lambda: launcher.pids.get("decode-1", first) != first, "a successor")
            (said,) = warnings()
            assert (
                said.startswith("worker decode-1 ended with exit status -9; the end of ") and "its last words" in said
            )
            launcher.want(WorkerCounts(1, 1))
            await until(lambda: starter.released == ["decode-1"], "it has left for good")
            assert warnings() == [said]

    caplog.set_level("WARNING")
    asyncio.run(main())


def test_a_worker_that_is_started_after_all_waits_for_nothing_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with scripted(tmp_path) as (launcher, starter):
            starter.script = ["fails"]
            launcher.want(WorkerCounts(1, 2))
            await until(lambda: "decode-1" in launcher.pids, "the second try")
            assert [worker.waits_for for worker in launcher.report(0).workers] == ["", "", ""]

    asyncio.run(main())
