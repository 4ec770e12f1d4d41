"""Clusters that go wrong on purpose: how to start one, what its logs say, and what its answers must be."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from loopline.client import Client
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster, launched, write_config
from tests.support.golden import MODELS

RETURN_S = 60.0
GROUPS: dict[str, dict[str, object]] = {
    "prefill": {"num_blocks": 64, "chunk_tokens": 16},
    "decode": {"num_blocks": 64, "max_running": 8},
}
Case = tuple[tuple[int, ...], int]
"""(prompt, tokens to generate)."""
Fault = dict[str, object]
"""An entry of the `faults` section."""


@contextlib.contextmanager
def faulty(
    folder: Path, *faults: Fault, checkpoint: Path = MODELS / "tiny-ouro", **groups: dict[str, object]
) -> Iterator[Cluster]:
    """A cluster with these faults; `groups` are further sections."""
    sections = {name: {**GROUPS.get(name, {}), **groups.get(name, {})} for name in {**GROUPS, **groups}}
    path = write_config(folder / "cluster.yaml", checkpoint, **sections)
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**raw, "faults": list(faults)}), encoding="utf-8")
    with launched(path, folder) as cluster:
        yield cluster


def answers_alone(engine: LocalEngine, cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """What one engine without a cluster answers."""
    requests = []
    for number, (prompt, count) in enumerate(cases):
        params = SamplingParams(loops=engine.spec.default_loops, stop_ids=(), max_tokens=count)
        requests.append(Request(request_id=str(number), prompt_ids=prompt, params=params))
    rows = engine.generate_all(requests)  # together: a row's tokens do not depend on those beside it
    return [tuple(row.token_id for row in rows[each.request_id] if row.token_id is not None) for each in requests]


def ask(cluster: Cluster, case: Case, deadline_s: float = RETURN_S) -> tuple[int, ...]:
    """The tokens of one answer, over a connection of its own. Raises what the client raises."""
    with Client(cluster.address) as client:
        answer = client.complete(case[0], deadline_s=deadline_s, max_tokens=case[1], ignore_eos=True)
    return answer.token_ids


def has_committed(folder: Path, worker: str, words: str) -> bool:
    """Whether the fault has really happened, by the log of a worker that was launched into `folder`."""
    log = (folder / "run" / f"{worker}.log").read_text(encoding="utf-8")
    return f"fault: {words}\n" in log


def is_ready(cluster: Cluster, name: str, but_pid: int = 0) -> bool:
    """Whether the worker takes work, as a process other than `but_pid`."""
    worker = cluster.workers().get(name)
    return worker is not None and worker.state == "ready" and worker.pid != but_pid


def num_joins(folder: Path, name: str, pid: int) -> int:
    """How often this process has joined, by the log of the coordinator that was launched into `folder`."""
    return len(re.findall(rf"worker {re.escape(name)} joined \(\w+, pid {pid}\)\n", _coordinator_log(folder)))


def num_losses(folder: Path, name: str) -> int:
    """How many lives of a worker of this name were lost, by that log."""
    return len(re.findall(rf"worker {re.escape(name)} is lost: ", _coordinator_log(folder)))


def _coordinator_log(folder: Path) -> str:
    return (folder / "run" / "coordinator.log").read_text(encoding="utf-8")
