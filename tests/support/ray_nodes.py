"""A Ray cluster of several nodes on this machine, each a raylet of its own with its own resources.

`python -m tests.support.ray_nodes JSON` starts one node for each mapping in the list, says in a line of JSON where the
cluster is and which processes the raylets are, and ends it all when its standard input ends. A program of its own, so
that no test's process has Ray in it; `ray_nodes` is its other end.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from tests.support.cluster import ROOT

UP_S = 420.0
DOWN_S = 120.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}
"""A busy machine takes longer than Ray expects, and has no use for workers that wait for tasks."""


@dataclass(frozen=True)
class RayNodes:
    """A running cluster: where its head is, and its raylets' process ids in the order of the nodes."""

    address: str
    raylets: tuple[int, ...]


@contextlib.contextmanager
def ray_nodes(nodes: Sequence[dict[str, Any]]) -> Iterator[RayNodes]:
    """The first one is the head. Each is what `ray.cluster_utils.Cluster.add_node` takes."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **_QUIET, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.ray_nodes", json.dumps(list(nodes))]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("{")), "")
        assert line, "Ray's nodes do not start"
        up = json.loads(line)
        yield RayNodes(up["address"], tuple(up["raylets"]))
    finally:
        process.stdin.close()
        process.stdout.close()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """It ends its raylets by itself; those of one that does not are killed with it."""
    try:
        process.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        raise


def main() -> None:
    from ray.cluster_utils import Cluster  # no import of a test's process

    cluster: Any = None
    raylets = []
    end_s = time.monotonic() + UP_S
    for arguments in json.loads(sys.argv[1]):
        if cluster is None:
            cluster = _until(end_s, lambda: Cluster(initialize_head=True, head_node_args=_arguments(arguments)))  # noqa: B023
            node = cluster.head_node
        else:
            node = _until(end_s, lambda: cluster.add_node(**_arguments(arguments)))  # noqa: B023
        raylets.append(node.all_processes["raylet"][0].process.pid)
    sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()


def _until(end_s: float, start: Callable[[], Any]) -> Any:
    """A raylet gives its helpers 15 s to come up, which a busy machine may need more of: then it is started again."""
    while True:
        try:
            return start()
        except Exception:
            if time.monotonic() > end_s:
                raise


def _arguments(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "include_dashboard": False, "include_log_monitor": False}


if __name__ == "__main__":
    main()
