"""`launcher.kind: ray` on a real Ray cluster of three nodes: workers run where they were asked for, a lost node or
supervisor loses no request, another number of workers comes to the right node, also where there is no room to spare,
and a worker started by hand joins."""

import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from loopline.client import WorkerInfo
from tests.support.cluster import LOOPLINE, ROOT, Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS
from tests.support.load import ConstantLoad, ask
from tests.support.ray_nodes import RayNodes, ray_nodes

TEXT = (MODELS / "train_tiny.py").read_bytes()
CASES = [(tuple(TEXT[41 * n : 41 * n + 30 + 17 * n]), 24 + 4 * n) for n in range(4)]
CLIENTS = 4  # more than there are decode workers of the launcher: one that joins gets work
LONG_S = 300.0
NODES = [
    {"num_cpus": 3, "resources": {"prefill_node": 3}},
    {"num_cpus": 3, "labels": {"pool": "decode"}},
    {"num_cpus": 3, "labels": {"pool": "decode"}},
]
HEAD, FIRST, SECOND = range(3)
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install .[ray]"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head for prefill workers, and two nodes for decode workers."""
    with ray_nodes(NODES) as running:
        yield running


BY_LABEL: dict[str, object] = {"decode_labels": {"pool": "decode"}}
BY_RESOURCE: dict[str, object] = {"decode_resources": {"prefill_node": 1}}


def by_ray(address: str, folder: Path, where: dict[str, object], /, **groups: dict[str, object]) -> Path:
    """Prefill workers where there is `prefill_node`, decode workers as said."""
    own: dict[str, object] = {"kind": "ray", "address": address, "prefill_resources": {"prefill_node": 1}}
    launcher = {**own, **where}
    sections: dict[str, dict[str, object]] = {
        "launcher": launcher,
        "prefill": {"replicas": 2, "num_blocks": 64, "chunk_tokens": 16},
        "decode": {"replicas": 2, "num_blocks": 192, "max_running": 16},
    }
    return write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **{**sections, **groups})


def node_of(pid: int, nodes: RayNodes) -> int:
    """Which raylet a worker's supervisor is a child of."""
    parents = [parent.pid for parent in psutil.Process(pid).parents()]
    return next(index for index, raylet in enumerate(nodes.raylets) if raylet in parents)


def places(cluster: Cluster, nodes: RayNodes) -> dict[str, int]:
    """The node of each worker that is ready and that the launcher started."""
    ready = [worker for worker in cluster.workers().values() if worker.state == "ready"]
    return {worker.name: node_of(worker.pid, nodes) for worker in ready if "-by-hand" not in worker.name}


def scale(cluster: Cluster, *arguments: str) -> None:
    command = [LOOPLINE, "scale", *arguments, "--address", cluster.address]
    subprocess.run(command, check=True, timeout=LONG_S, capture_output=True, cwd=ROOT)


def said_by_the_launch(folder: Path) -> str:
    """Without the breaks of its lines, which are those of a terminal."""
    return " ".join((folder / "launch.log").read_text(encoding="utf-8").split())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_full_node_changes_roles_and_a_lost_supervisor_is_replaced(nodes: RayNodes, tmp_path: Path) -> None:
    """All workers are of the node that has room for three."""
    decode: dict[str, object] = {"replicas": 1, "num_blocks": 64}
    config = by_ray(nodes.address, tmp_path, BY_RESOURCE, decode=decode)
    with launched(config, tmp_path, ready_s=LONG_S) as cluster:
        expected = ask(cluster.client, CASES[0]).token_ids
        scale(cluster, "--prefill", "1", "--decode", "2")
        names = ["prefill-0", "decode-0", "decode-1"]
        assert places(cluster, nodes) == dict.fromkeys(names, HEAD)
        before = cluster.workers()["decode-0"]
        supervisor = psutil.Process(before.pid).parent()
        command = psutil.Process(before.pid).cmdline()
        folder = Path(command[command.index("--config") + 1]).parent
        assert supervisor is not None and folder.is_dir()
        supervisor.kill()
        wait_until(lambda: is_gone(before.pid), "the worker does not outlive its supervisor", LONG_S)
        wait_until(lambda: has_successor(cluster, before) and cluster.is_whole(names), "it is replaced", LONG_S)
        wait_until(lambda: "is proven to have ended" in said_by_the_launch(tmp_path), "its end is proven", LONG_S)
        assert "nobody saw its end: The actor died" in (said := said_by_the_launch(tmp_path)) and " ip: " in said
        assert not folder.exists()  # the next supervisor of this machine has swept it
        assert ask(cluster.client, CASES[0]).token_ids == expected
        cluster.wait_idle()


def test_three_nodes_from_start_to_stop(nodes: RayNodes, tmp_path: Path) -> None:
    config = by_ray(nodes.address, tmp_path, BY_LABEL)
    with launched(config, tmp_path, ready_s=LONG_S) as cluster:
        first = cluster.workers()
        assert places(cluster, nodes) == {"prefill-0": HEAD, "prefill-1": HEAD} | {
            name: node_of(first[name].pid, nodes) for name in ("decode-0", "decode-1")
        }
        assert {node_of(first[name].pid, nodes) for name in ("decode-0", "decode-1")} == {FIRST, SECOND}
        launcher = cluster.client.status().launcher
        assert launcher is not None and launcher.place == f"Ray at {nodes.address}"
        log = (tmp_path / "run" / "decode-0.log").read_text(encoding="utf-8")
        assert log.startswith("--- decode-0 on ") and f"pid {first['decode-0'].pid}\n" in log
        with ThreadPoolExecutor(len(CASES)) as pool:
            expected = [answer.token_ids for answer in pool.map(lambda case: ask(cluster.client, case), CASES)]
        with ConstantLoad(cluster, CASES, expected, CLIENTS, LONG_S) as load:
            load.wait_answers(1)
            join_by_hand(cluster, config, tmp_path, load)
            lose_a_node(cluster, nodes, load)
            scale(cluster, "--decode", "3", "--prefill", "1")
            assert places(cluster, nodes) == {"prefill-0": HEAD, **{f"decode-{n}": FIRST for n in range(3)}}
            load.wait_answers(CLIENTS)
        cluster.wait_idle()
        last = cluster.workers()
        log = said_by_the_launch(tmp_path)
        assert "is out of sight" in log and "is proven to have ended" in log
    wait_until(lambda: all(is_gone(worker.pid) for worker in (*first.values(), *last.values())), "all have ended")


def join_by_hand(cluster: Cluster, config: Path, folder: Path, load: ConstantLoad) -> None:
    """A decode worker of no launcher's joins, serves and leaves."""
    name = "decode-by-hand"
    command = [LOOPLINE, "worker", "--role", "decode", "--coordinator", cluster.address, "--config", config]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--name", name], stdout=log, stderr=log, cwd=ROOT)
    try:
        workers = cluster.workers
        wait_until(lambda: name in workers() and workers()[name].step > 0, "it joins and gets work", LONG_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait()
    load.wait_answers(CLIENTS)


def has_successor(cluster: Cluster, before: WorkerInfo) -> bool:
    worker = cluster.workers().get(before.name)
    return worker is not None and worker.state == "ready" and worker.uuid != before.uuid


def lose_a_node(cluster: Cluster, nodes: RayNodes, load: ConstantLoad) -> None:
    """A raylet is killed: its worker ends with it, and has a successor, another process, on the node that is left."""
    before = cluster.workers()
    victim = next(name for name, node in places(cluster, nodes).items() if node == SECOND)
    os.kill(nodes.raylets[SECOND], signal.SIGKILL)
    wait_until(lambda: is_gone(before[victim].pid), "the worker does not outlive its node", LONG_S)
    wait_until(lambda: has_successor(cluster, before[victim]), "it is started on the other node", LONG_S)
    assert places(cluster, nodes)[victim] == FIRST
    load.wait_answers(CLIENTS)


def test_a_launch_can_start_a_ray_cluster_of_its_own(tmp_path: Path) -> None:
    """And leaves nothing of it behind, which `launched` looks for."""
    one: dict[str, object] = {"replicas": 1, "num_blocks": 64}
    with launched(by_ray("local", tmp_path, BY_RESOURCE, prefill=one, decode=one), tmp_path, ready_s=LONG_S) as cluster:
        assert ask(cluster.client, CASES[0]).token_ids
        victim = cluster.workers()["decode-0"]
        os.kill(victim.pid, signal.SIGKILL)  # its supervisor reaps it: no question remains
        wait_until(
            lambda: cluster.workers().get("decode-0", victim).uuid != victim.uuid and cluster.is_whole(["decode-0"]),
            "a successor",
            LONG_S,
        )
        assert ask(cluster.client, CASES[0]).token_ids
        cluster.wait_idle()
        log = said_by_the_launch(tmp_path)
        assert re.search("worker decode-0 on .* ended with exit status -9; the end of .* engine ready", log)
        assert "out of sight" not in log
