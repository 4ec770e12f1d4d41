"""A cluster in which everything goes wrong all the time, under many small requests: no other text than the right one,
nothing held at the end, and nothing that grows."""

import asyncio
import logging
import random
import re
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from loopline.client import WorkerInfo
from loopline.engine.local import LocalEngine
from loopline.messages import TokenRow
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS
from tests.support.soak import SETTLE_S, Case, Disturber, Load, Tally, Watch, fault_entries

logger = logging.getLogger(__name__)
TEXT = (MODELS / "train_tiny.py").read_bytes()
RATE = 0.05
NUM_CASES = 64
SAMPLE_EVERY_S = 0.5
GROUPS: dict[str, dict[str, object]] = {
    "kv": {"prefix_cache": True},
    "prefill": {"replicas": 2, "num_blocks": 512, "chunk_tokens": 32},
    "decode": {"replicas": 2, "num_blocks": 512, "max_running": 16},
    "transfer": {"push_timeout_s": 2.0},
    "membership": {"drain_limit_s": 1.0},
}
"""Arenas are large because a push that never ends, or ends in an error, keeps blocks until its target's end."""
LASTING = {"closing", "failed", "quarantined"}
"""States of a handoff whose push never ends or has failed: only a worker's end ends them."""
FAILED_HANDLE = re.compile(r"fault: fail_handle of push")
DROPPED_PUSH = re.compile(r"fault: drop_push of push")
MOST_GROWN_BYTES = 24 << 20
"""A block's bytes kept for each request would be 60 times as much, and 16 KiB for each shows; below that are tombstones
(some hundred bytes a request, bounded) and what allocators keep."""
MOST_GROWN_FDS = 8
"""Beside these: a link to a living peer that is made anew leaves its old connection open below NIXL, on both sides."""
MOST_GROWN_THREADS = 4
"""gRPC's pool takes its time to get to its size."""


@pytest.fixture(scope="module")
def cases(ouro_engine: LocalEngine) -> list[Case]:
    """Prompts of one to three chunks, half of the answers sampled, and what one engine without a cluster answers."""
    generator = random.Random(1)
    requests = []
    for number in range(NUM_CASES):
        start, length = generator.randrange(len(TEXT) - 80), generator.randrange(16, 81)
        params = SamplingParams(
            loops=ouro_engine.spec.default_loops,
            stop_ids=(),
            max_tokens=generator.randrange(4, 13),
            temperature=float(number % 2),
            seed=generator.randrange(2**32),
        )
        prompt = tuple(TEXT[start : start + length])
        requests.append(Request(request_id=f"alone {number}", prompt_ids=prompt, params=params))
    rows = ouro_engine.generate_all(requests)
    return [case_of(request, rows[request.request_id]) for request in requests]


def case_of(request: Request, rows: Sequence[TokenRow]) -> Case:
    expected = tuple(row.token_id for row in rows if row.token_id is not None)
    params = request.params
    return Case(request.prompt_ids, params.max_tokens, params.temperature, params.seed, expected)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_hundred_requests_among_faults(tmp_path: Path, cases: list[Case]) -> None:
    check_round(tmp_path, cases, num_requests=100, disturb_every=40, seed=0)


@pytest.mark.soak
def test_two_thousand_requests_among_faults(tmp_path: Path, cases: list[Case]) -> None:
    check_round(tmp_path, cases, num_requests=2_000, disturb_every=200, seed=1)


def check_round(folder: Path, cases: list[Case], *, num_requests: int, disturb_every: int, seed: int) -> None:
    path = write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **GROUPS)
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    path.write_text(yaml.safe_dump({**raw, "faults": fault_entries(RATE)}), encoding="utf-8")
    with launched(path, folder) as cluster:
        load, watch, disturber = Load(cluster, cases, num_requests, seed), Watch(cluster), Disturber(cluster)
        asyncio.run(run(load, watch, disturber, disturb_every))
        report(load.tally, watch, disturber, cluster)
        check_held(cluster, folder)
        end_decode_workers(cluster)
        cluster.wait_idle(SETTLE_S)
        check_logs(folder)
        num_relinks = len(FAILED_HANDLE.findall(logs_of(folder, "prefill")))
    check_tally(load.tally, num_requests)
    check_growth(watch, num_relinks)


async def run(load: Load, watch: Watch, disturber: Disturber, disturb_every: int) -> None:
    """The load to its end, while workers are disturbed and looked at."""
    running = asyncio.create_task(load.run())
    disturbing: asyncio.Task[None] | None = None
    while not running.done():
        watch.look()
        if disturbing is not None and disturbing.done():
            disturbing.result()
            disturbing = None
        if disturbing is None and load.num_ended >= disturb_every * (1 + disturber.done.total()):
            logger.info("%d requests: %s", load.num_ended, dict(load.tally.ends))
            disturbing = asyncio.create_task(disturber.disturb())
        await asyncio.wait((running,), timeout=SAMPLE_EVERY_S)
    await running
    if disturbing is not None:
        await disturbing


def report(tally: Tally, watch: Watch, disturber: Disturber, cluster: Cluster) -> None:
    logger.info("errors after so many tokens: %s", sorted(tally.cut_after.items()))
    logger.info("requests: %s; wrong: %d; workers: %s", dict(tally.ends), len(tally.wrong), dict(disturber.done))
    for name, grown in watch.growth().items():
        logger.info(
            "%s: %.1f MiB, %d fds, %d threads more", name, grown.rss_bytes / 2**20, grown.num_fds, grown.num_threads
        )
    for worker in cluster.workers().values():
        logger.info("%s: %s %s ignored %s", worker.name, worker.blocks, dict(worker.handoffs), dict(worker.ignored))


def check_tally(tally: Tally, num_requests: int) -> None:
    assert tally.wrong == []
    assert tally.ends["no end"] == 0
    assert tally.ends.total() == num_requests
    assert tally.ends["right"] > num_requests // 4, tally.ends  # of a busy machine; else it is nine in ten


def check_held(cluster: Cluster, folder: Path) -> None:
    """Nothing runs, and blocks are kept for pushes alone that never end or have failed, no more than there were."""
    wait_until(
        lambda: all(is_quiet(worker) for worker in cluster.workers().values()), "all handoffs that can end do", SETTLE_S
    )
    num_lasting = sum(count for worker in cluster.workers().values() for count in worker.handoffs.values())
    log = logs_of(folder, "prefill")
    num_faults = len(FAILED_HANDLE.findall(log)) + len(DROPPED_PUSH.findall(log))
    logger.info("%d handoffs last, of %d pushes that were lost or failed", num_lasting, num_faults)
    assert num_lasting <= 2 * num_faults  # on both sides


def logs_of(folder: Path, role: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (folder / "run").glob(f"{role}-*.log"))


def is_quiet(worker: WorkerInfo) -> bool:
    return not (worker.running or worker.waiting) and set(worker.handoffs) <= LASTING


def end_decode_workers(cluster: Cluster) -> None:
    """What a push that failed keeps on either side, the end of its target frees. Prefill workers live on."""
    for name in ("decode-0", "decode-1"):
        end_worker(cluster, cluster.workers()[name])


def end_worker(cluster: Cluster, worker: WorkerInfo) -> None:
    psutil.Process(worker.pid).terminate()
    wait_until(lambda: is_next_life(cluster, worker), f"{worker.name} is started again", SETTLE_S)


def is_next_life(cluster: Cluster, before: WorkerInfo) -> bool:
    worker = cluster.workers().get(before.name)
    return worker is not None and worker.state == "ready" and worker.uuid != before.uuid


def check_logs(folder: Path) -> None:
    """Nothing failed inside of a process, whatever happened around it."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (folder / "run").glob("*.log")}
    assert {name: text[text.index("Traceback") :][:2000] for name, text in texts.items() if "Traceback" in text} == {}


def check_growth(watch: Watch, num_relinks: int) -> None:
    grown = watch.growth()
    assert grown
    for name, more in grown.items():
        assert more.rss_bytes <= MOST_GROWN_BYTES, (name, more)
        assert more.num_fds <= MOST_GROWN_FDS + num_relinks, (name, more)
        assert more.num_threads <= MOST_GROWN_THREADS, (name, more)
