"""`RayStarter` on a Ray that is not one (`tests.support.fake_ray`): its supervisors and their processes are real."""

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.processes import OutOfSight
from coordinator.starters import Order
from loopline.config import load_config
from loopline.errors import OperatorError
from loopline.identity import Role
from tests.support.fake_ray import FakeRay, RayError, install
from tests.unit.coordinator.cluster import WAIT_S, until

MODULE = "tests.unit.coordinator.stubborn_process"
NODES = {"a": {"CPU": 2.0}, "b": {"CPU": 2.0}}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay({node: dict(own) for node, own in NODES.items()})
    install(monkeypatch, fake)
    yield fake
    fake.unblocked.set()


@contextlib.asynccontextmanager
async def opened(folder: Path, coordinator: str = "127.0.0.1") -> AsyncIterator[Any]:
    path = folder / "cluster.yaml"
    sections = ("model: {path: somewhere}", "launcher: {kind: ray}", f"coordinator: {{host: {coordinator}}}")
    path.write_text("\n".join(sections), encoding="utf-8")
    starter = importlib.import_module("coordinator.ray_starter").RayStarter(load_config(path), path)
    await starter.open()
    try:
        yield starter
    finally:
        living = [process for process in starter._living if process.is_alive]
        for process in living:
            process.kill()
            await process.reap()
        await starter.close()


def order(folder: Path, name: str, *arguments: str) -> Order:
    role = Role(name.partition("-")[0])
    log_path = folder / f"{name}.log"
    return Order(name, role, uuid.uuid4().hex, MODULE, "127.0.0.1:50051", arguments, log_path)


async def started(starter: Any, folder: Path, *names: str) -> list[Any]:
    starts = [starter.start(order(folder, name), asyncio.Event()) for name in names]
    return list(await asyncio.wait_for(asyncio.gather(*starts), WAIT_S))


def nodes_of(ray: FakeRay) -> list[str | None]:
    return [group.node for group in ray.groups if group.state == "CREATED"]


def test_prefill_workers_are_packed_and_decode_workers_spread_whoever_is_quicker(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            first, *_ = await started(starter, tmp_path, "prefill-0", "prefill-1", "decode-0", "decode-1")
            assert nodes_of(ray)[0] == nodes_of(ray)[1] and Counter(nodes_of(ray)) == {"a": 2, "b": 2}
            assert starter.place == "Ray at 10.0.0.1:6379" and psutil.pid_exists(first.pid)
            await until(lambda: "started" in (tmp_path / "prefill-0.log").read_text(), "its log has come here")
            first.terminate()
            assert await first.reap() == -signal.SIGTERM
            assert "prefill-0 on fake ended with exit status -15" in first.describe_end()

    asyncio.run(main())


def test_on_a_full_cluster_a_worker_that_leaves_makes_room_at_once(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
            leaving, *_ = await started(starter, tmp_path, *names)
            waiting = asyncio.ensure_future(starter.start(order(tmp_path, "decode-2"), asyncio.Event()))
            await until(lambda: len(ray.groups) == len(names) + 1, "it has asked for a place")
            leaving.terminate()
            await leaving.reap()
            assert not waiting.done()
            starter.release("prefill-0")
            assert (await asyncio.wait_for(waiting, WAIT_S)).is_alive
            assert Counter(nodes_of(ray)) == {"a": 2, "b": 2}

    asyncio.run(main())


def test_one_that_waits_for_room_leaves_when_it_is_told_to(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        ray.nodes = {"a": {"CPU": 0.0}}
        async with opened(tmp_path) as starter:
            left = asyncio.Event()
            waiting = asyncio.ensure_future(starter.start(order(tmp_path, "decode-0"), left))
            await until(lambda: len(ray.groups) == 1, "it has asked for a place")
            left.set()
            assert await asyncio.wait_for(waiting, WAIT_S) is None
            starter.release("decode-0")
            await until(lambda: ray.groups[0].state == "REMOVED", "and does not ask any more")

    asyncio.run(main())


def test_what_one_waits_for_is_said_to_whoever_ordered_it(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        ray.nodes = {"a": {"CPU": 0.5}}
        async with opened(tmp_path) as starter:
            monkeypatch.setattr("coordinator.ray_starter._SAY_S", 0.01)
            left, said = asyncio.Event(), list[str]()
            waiting = replace(order(tmp_path, "decode-0"), say=said.append)
            starting = asyncio.ensure_future(starter.start(waiting, left))
            await until(lambda: bool(said), "it says what it waits for")
            assert "no living node has that even when empty: there are a: 0.5 CPU" in said[0]
            left.set()
            assert await asyncio.wait_for(starting, WAIT_S) is None

    asyncio.run(main())


def test_a_start_whose_answer_is_lost_is_out_of_sight_until_it_is_proven(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            ray.faults["start"] = RayError("the head was away")
            unheard = order(tmp_path, "decode-0")
            lost = await starter.start(unheard, asyncio.Event())
            assert isinstance(lost, OutOfSight) and "the head was away" in lost.why
            await until(lambda: "kill" in ray.calls, "its supervisor is killed")
            await asyncio.wait_for(lost.proven(), WAIT_S)
            await until(lambda: not runs(unheard.process), "it does not run any more")
            (again,) = await started(starter, tmp_path, "decode-0")
            assert again.is_alive
            await until(lambda: ray.groups[0].state == "REMOVED", "its place is given back")
            assert ray.groups[0].node != ray.groups[1].node

    asyncio.run(main())


def runs(process: str) -> bool:
    return any(process in (other.info["cmdline"] or []) for other in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("call", ["nodes", "placement_group", "actor", "introduce"])
def test_what_fails_before_there_is_a_process_is_tried_anew(call: str, ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            ray.faults[call] = RayError("the head was away")
            with pytest.raises(OperatorError, match="its supervisor does not come up: the head was away"):
                await starter.start(order(tmp_path, "decode-0"), asyncio.Event())
            assert (await started(starter, tmp_path, "decode-0"))[0].is_alive

    asyncio.run(main())


def test_what_a_supervisor_refuses_was_not_started(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coordinator.ray_starter.this_network", lambda: "another machine's")
                with pytest.raises(OperatorError, match=r"needed: a coordinator.host that all nodes reach"):
                    await starter.start(order(tmp_path, "decode-0"), asyncio.Event())

    asyncio.run(main())


def test_it_ends_with_the_node_of_this_machine_and_not_while_the_head_is_away(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coordinator.ray_starter._LOOK_S", 0.01)
                ray.dead = {"b"}  # another one
                ray.faults["nodes"] = RayError("the head was away")
                watching = asyncio.ensure_future(starter.watch())
                await until(lambda: ray.calls.count("nodes") > 3, "it has looked")
                assert not watching.done()
                ray.dead = {"a"}
                with pytest.raises(OperatorError, match=r"Ray at 10.0.0.1:6379 has given up .* \(10.0.0.1\)"):
                    await asyncio.wait_for(watching, WAIT_S)

    asyncio.run(main())


def test_a_seen_end_does_not_wait_for_ray(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            (process,) = await started(starter, tmp_path, "decode-0")
            ray.unblocked.clear()
            process.terminate()
            assert await asyncio.wait_for(process.reap(), WAIT_S) == -signal.SIGTERM
            ray.unblocked.set()

    asyncio.run(main())


def test_all_that_ray_says_of_a_lost_supervisor_is_told(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            (process,) = await started(starter, tmp_path, "decode-0")
            ray.actors[0].died.set()
            lost = await asyncio.wait_for(process.reap(), WAIT_S)
            assert isinstance(lost, OutOfSight) and lost.why.endswith("ip: 10.0.0.1 killed by OOM")
            assert "nobody saw its end: The actor died" in process.describe_end()
            await asyncio.wait_for(lost.proven(), WAIT_S)  # this machine looks for it itself, and kills it
            await until(lambda: not psutil.pid_exists(process.pid), "it has ended")

    asyncio.run(main())


def test_only_a_worker_out_of_sight_has_another_place_next(ray: FakeRay, tmp_path: Path) -> None:
    """On another node if one has room, else on its own again."""

    async def main() -> None:
        async with opened(tmp_path) as starter:
            for end in ("seen", "lost"):
                (process,) = await started(starter, tmp_path, "decode-0")
                if end == "seen":
                    process.kill()
                else:
                    ray.actors[-1].died.set()
                await asyncio.wait_for(process.reap(), WAIT_S)
            assert len(ray.groups) == 1
            first = ray.groups[0].node
            (process,) = await started(starter, tmp_path, "decode-0")
            await until(lambda: ray.groups[0].state == "REMOVED", "its old place is given back")
            assert len(ray.groups) == 2 and ray.groups[1].node != first
            ray.actors[-1].died.set()
            await process.reap()
            await started(starter, tmp_path, "decode-0")
            assert len(ray.groups) == 3 and ray.groups[2].state == "CREATED"

    asyncio.run(main())


@pytest.mark.parametrize("first", ["its supervisor does not answer on a", "it has no place on a"])
def test_a_silent_node_keeps_no_worker_waiting(
    first: str, ray: FakeRay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coordinator.ray_starter._ANSWER_S", 0.2)
                if "no place" in first:
                    ray.stuck = {"a"}
                else:
                    ray.on_actor = lambda: ray.silent.add("a")
                (process,) = await started(starter, tmp_path, "decode-0")
                assert process.is_alive and nodes_of(ray) == ["b"]
                assert f"decode-0: {first} after 0.2 s; another node is tried if one has room" in caplog.text
                assert "decode-0 is placed on b; left out while another has room: a" in caplog.text
                await until(lambda: ray.groups[0].state == "REMOVED", "its first place is given back")
                (other,) = await started(starter, tmp_path, "decode-1")
                assert other.is_alive and nodes_of(ray) == ["b", "b"]
                ray.on_actor = lambda: None
                waiting = asyncio.ensure_future(starter.start(order(tmp_path, "decode-2"), left := asyncio.Event()))
                await until(lambda: len(ray.groups) == 4, "no other node has room, so it asks for the silent one")
                ray.silent.clear()
                ray.stuck.clear()
                assert (await asyncio.wait_for(waiting, WAIT_S)).is_alive and not left.is_set()
                assert "a" not in starter._suspects  # it has answered

    asyncio.run(main())


def test_a_slow_node_is_not_given_up_for_ever(ray: FakeRay, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ray.nodes = {"a": {"CPU": 1.0}}
        async with opened(tmp_path) as starter:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coordinator.ray_starter._ANSWER_S", 0.1)
                ray.on_actor = lambda: ray.silent.add("a")
                waiting = asyncio.ensure_future(starter.start(order(tmp_path, "decode-0"), asyncio.Event()))
                await until(lambda: "does not answer on a after 0.2 s" in caplog.text, "each time it waits longer")
                ray.on_actor = ray.silent.clear
                ray.silent.clear()
                assert (await asyncio.wait_for(waiting, WAIT_S)).is_alive and nodes_of(ray) == ["a"]

    asyncio.run(main())


def test_a_group_that_ray_gave_up_is_made_anew(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            (process,) = await started(starter, tmp_path, "decode-0")
            process.kill()
            await process.reap()
            ray.groups[0].state = "REMOVED"
            assert (await started(starter, tmp_path, "decode-0"))[0].is_alive
            assert [group.state for group in ray.groups] == ["REMOVED", "CREATED"]

    asyncio.run(main())


def test_no_cluster_to_attach_to_is_said_with_rays_reason(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        ray.faults["init"] = ConnectionError("Could not find any\nrunning Ray instance.")
        with pytest.raises(OperatorError, match=r"launcher.address is auto: .*any running Ray instance.; `ray start"):
            async with opened(tmp_path):
                pass

    asyncio.run(main())


def test_a_signal_is_this_process_s_own_again_once_ray_is_there(ray: FakeRay, tmp_path: Path) -> None:
    """Ray's library puts a handler before it, of which Python does not know."""

    async def main() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, told.set)
        c = ctypes.CDLL(None)
        ray.on_init = lambda: c.signal(signal.SIGTERM, 1)  # SIG_IGN, from below
        try:
            async with opened(tmp_path):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(told.wait(), WAIT_S)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())


def test_an_end_lets_go_of_ray_whatever_was_under_way(ray: FakeRay, tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as starter:
            (process,) = await started(starter, tmp_path, "decode-0")
            process.kill()
            await process.reap()
            await starter.close()
            await starter.close()
            assert ray.calls.count("shutdown") == 1
            with pytest.raises(OperatorError, match="not attached to Ray any more"):
                await starter.start(order(tmp_path, "decode-1"), asyncio.Event())

    asyncio.run(main())


@pytest.mark.parametrize(("host", "expected"), [("0.0.0.0", "10.0.0.1:50051"), ("127.0.0.1", "127.0.0.1:50051")])
def test_a_coordinator_that_listens_everywhere_is_said_to_be_at_this_node(
    host: str, expected: str, ray: FakeRay, tmp_path: Path
) -> None:
    async def main() -> None:
        async with opened(tmp_path, coordinator=host) as starter:
            assert starter.reached_at("127.0.0.1:50051") == expected

    asyncio.run(main())
