"""A real coordinator process and scripted worker processes under the launcher."""

import asyncio
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.launcher import Launcher
from coordinator.processes import Child, start_child
from coordinator.serving import wait_for_address
from loopline.client import AsyncClient
from loopline.errors import OperatorError, PeerLost
from loopline.identity import Role
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import open_channel
from tests.unit.coordinator.cluster import MODEL, WAIT_S, token_at, until

SCRIPTED = dict.fromkeys(Role, "loopline.bench.scripted_worker")
LAUNCH_S = 30.0


def write_config(
    folder: Path,
    model: Path = MODEL,
    host: str = "127.0.0.1",
    drain_limit_s: float = 2.0,
    restart: str = "always",
) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(
        f"model: {{path: {model}}}\n"
        f"membership: {{lease_s: 1.0, drain_limit_s: {drain_limit_s}}}\n"
        f"launcher: {{host: {host}, restart: {restart}}}\n"
    )
    return path


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def generate(address: str) -> list[int]:
    stub: Any = loopline_pb2_grpc.LooplineStub
    message = loopline_pb2.GenerateRequest(text=b"hello", sampling=loopline_pb2.SamplingParams(max_tokens=5))
    async with open_channel(address) as channel:
        return [token.id async for event in stub(channel).Generate(message) for token in event.chunk.tokens]


async def status(address: str) -> Any:
    stub: Any = loopline_pb2_grpc.LooplineStub
    async with open_channel(address) as channel:
        return await stub(channel).GetStatus(loopline_pb2.GetStatusRequest())


def test_a_cluster_from_start_to_stop(tmp_path: Path) -> None:
    async def main() -> None:
        async with Launcher(
            write_config(tmp_path, host="127.0.0.2"), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED
        ) as launcher:
            await launcher.wait_serving(LAUNCH_S)
            assert {worker.address.split(":")[0] for worker in (await status(launcher.address)).workers} == {
                "127.0.0.2"
            }
            assert await generate(launcher.address) == [token_at(position) for position in range(5, 10)]
            first = launcher.pids
            assert sorted(first) == ["coordinator", "decode-0", "prefill-0"]
            os.kill(first["decode-0"], signal.SIGKILL)
            await until(lambda: launcher.pids.get("decode-0", first["decode-0"]) != first["decode-0"], "a new process")
            assert await generate(launcher.address) == [token_at(position) for position in range(5, 10)]
            os.kill(launcher.pids["prefill-0"], signal.SIGSTOP)  # its lease runs out, and it does not come back
            await until(lambda: launcher.pids.get("prefill-0", first["prefill-0"]) != first["prefill-0"], "replaced")
            last = launcher.pids
            began_s = time.monotonic()
            waiter = asyncio.ensure_future(launcher.wait_stopped())
            await launcher.stop()
            await waiter
            assert time.monotonic() - began_s < WAIT_S
            assert launcher.pids == {} and all(is_gone(pid) for pid in (*first.values(), *last.values()))

    asyncio.run(main())


def test_a_coordinator_that_cannot_start_ends_the_launch_with_its_message(tmp_path: Path) -> None:
    async def main() -> None:
        launcher = Launcher(write_config(tmp_path, tmp_path / "nowhere"), run_dir=tmp_path / "run", port=0)
        with pytest.raises(
            OperatorError, match=r"coordinator ended with exit status 2(.|\n)*config.json: no such file"
        ):
            async with launcher:
                pass
        assert launcher.pids == {}

    asyncio.run(main())


def test_a_worker_that_cannot_start_ends_the_launch_with_its_message(tmp_path: Path) -> None:
    async def main() -> None:
        modules = {Role.PREFILL: SCRIPTED[Role.PREFILL], Role.DECODE: "tests.unit.coordinator.nowhere"}
        async with Launcher(
            write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=modules
        ) as launcher:
            with pytest.raises(OperatorError, match=r"decode-0 ended with exit status 1(.|\n)*nowhere"):
                await launcher.wait_serving(LAUNCH_S)
            pids = launcher.pids
        assert all(is_gone(pid) for pid in pids.values())

    asyncio.run(main())


def test_a_coordinator_that_dies_comes_back_at_its_port_in_a_later_epoch(tmp_path: Path) -> None:
    async def main() -> None:
        async with Launcher(
            write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED
        ) as launcher:
            await launcher.wait_serving(LAUNCH_S)
            address, epoch = launcher.address, (await status(launcher.address)).epoch
            listen_file = tmp_path / "run" / "coordinator.json"
            listening = json.loads(listen_file.read_text())
            assert (listening["address"], listening["epoch"]) == (address, epoch)
            later = epoch + 10**18  # as if the clock had been ahead then by thirty years
            listen_file.write_text(json.dumps({**listening, "epoch": later}))
            os.kill(launcher.pids["coordinator"], signal.SIGKILL)
            async with AsyncClient(address) as client:
                answer = await client.complete("hello", max_tokens=5, deadline_s=LAUNCH_S)
                assert answer.token_ids == tuple(token_at(position) for position in range(5, 10))
                assert (await client.status()).epoch == later + 1
            assert launcher.address == address
            last = launcher.pids
        assert launcher.pids == {} and all(is_gone(pid) for pid in last.values())

    asyncio.run(main())


def test_a_launch_can_be_stopped_while_its_coordinator_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with Launcher(
            write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED
        ) as launcher:
            await launcher.wait_serving(LAUNCH_S)
            first = launcher.pids["coordinator"]
            os.kill(first, signal.SIGKILL)
            await until(lambda: launcher.pids.get("coordinator") != first, "it is reaped")
        assert launcher.pids == {}

    asyncio.run(main())


def test_with_restart_never_the_coordinators_end_ends_the_launch(tmp_path: Path) -> None:
    async def main() -> None:
        config = write_config(tmp_path, restart="never")
        async with Launcher(config, run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED) as launcher:
            await launcher.wait_serving(LAUNCH_S)
            os.kill(launcher.pids["coordinator"], signal.SIGKILL)
            with pytest.raises(PeerLost, match="coordinator ended with exit status -9"):
                await launcher.wait_stopped()

    asyncio.run(main())


def test_the_coordinators_end_ends_a_launch_that_has_not_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with Launcher(
            write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED
        ) as launcher:
            os.kill(launcher.pids["coordinator"], signal.SIGKILL)
            with pytest.raises(PeerLost, match="coordinator ended with exit status -9"):
                await launcher.wait_stopped()

    asyncio.run(main())


def test_at_the_drain_limit_a_client_gets_a_status_and_no_broken_connection(tmp_path: Path) -> None:
    async def main() -> None:
        modules = dict.fromkeys(Role, "tests.unit.coordinator.stubborn_process")  # they never join: requests wait
        config = write_config(tmp_path, drain_limit_s=0.5)
        async with Launcher(config, run_dir=tmp_path / "run", port=0, worker_modules=modules) as launcher:
            waiting = asyncio.ensure_future(generate(launcher.address))
            async with asyncio.timeout(WAIT_S):
                while (await status(launcher.address)).queued == 0:  # noqa: ASYNC110 - it has no event to wait for
                    await asyncio.sleep(0.01)
            await launcher.stop()
            with pytest.raises(grpc.aio.AioRpcError, match="shutting down; 0 tokens were delivered") as caught:
                await waiting
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_a_launch_drains_no_longer_than_whoever_stops_it_would_wait(tmp_path: Path) -> None:
    assert Launcher(write_config(tmp_path, drain_limit_s=40.0), run_dir=tmp_path).drain_limit_s == 10.0
    assert Launcher(write_config(tmp_path, drain_limit_s=4.0), run_dir=tmp_path).drain_limit_s == 4.0


def test_an_end_is_reported_until_it_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Launcher(
            write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED
        ) as launcher:
            await launcher.wait_serving(LAUNCH_S)
            first = launcher.pids
            os.kill(first["coordinator"], signal.SIGSTOP)  # does not answer
            os.kill(first["decode-0"], signal.SIGKILL)
            await until(lambda: "decode-0" not in launcher.pids, "reaped")
            await until(lambda: "cannot be reported yet" in caplog.text, "the first report has failed")
            assert "decode-0" not in launcher.pids
            os.kill(first["coordinator"], signal.SIGCONT)
            await until(lambda: "decode-0" in launcher.pids, "reported, and started again")

    asyncio.run(main())


def test_a_moment_without_processes_ends_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine refuses to start is asked for again; before anything has served it is the operator's to mend."""
    refusals = [OSError(errno.EAGAIN, "no more processes")] * 3

    async def start(*arguments: Any) -> Child:
        if refusals:
            raise refusals.pop()
        return await start_child(*arguments)

    async def main() -> None:
        launcher = Launcher(write_config(tmp_path), run_dir=tmp_path / "run", port=0, worker_modules=SCRIPTED)
        async with launcher:
            await launcher.wait_serving(LAUNCH_S)
            for module in ("coordinator.launcher", "coordinator.starters"):
                monkeypatch.setattr(f"{module}.start_child", start)
            first = launcher.pids["decode-0"]
            os.kill(first, signal.SIGKILL)
            await until(lambda: launcher.pids.get("decode-0", first) != first, "a new process")
            assert not refusals
            assert await generate(launcher.address) == [token_at(position) for position in range(5, 10)]
        refusals.append(OSError(errno.EAGAIN, "no more processes"))
        with pytest.raises(OperatorError, match=r"coordinator cannot be started: .*no more processes"):
            async with Launcher(write_config(tmp_path), run_dir=tmp_path / "again", port=0):
                pass

    asyncio.run(main())


def test_a_coordinator_that_does_not_listen_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"coordinator does not listen after 0.05 s: no .*coordinator.json"):
        asyncio.run(wait_for_address(tmp_path / "coordinator.json", 0.05))
