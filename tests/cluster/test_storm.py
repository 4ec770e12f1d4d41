"""Many long answers at once, on two workers of each kind that are killed and stopped in turn: each answer is the one of
an undisturbed run, each loss is acted on in time, and nothing is held at the end."""

import asyncio
import logging
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from loopline.client import AsyncClient
from loopline.engine.local import LocalEngine
from loopline.request import Request, SamplingParams
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.faulty import is_ready
from tests.support.golden import MODELS
from tests.support.soak import Case
from tests.support.storm import SETTLE_S, Losses, Streams, Striker, Tally

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.alone
TEXT = (MODELS / "train_tiny.py").read_bytes()
NUM_STREAMS = 32
NUM_CASES = 8
STRIKE_EVERY_S = 8.0
LEASE_S = 3.0
SEEN_WITHIN_S = 2 * (LEASE_S + 1.0)
"""A loss is acted on within the lease and a second where the machine is quiet; this one may be anything but."""
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
GROUPS: dict[str, dict[str, object]] = {
    "kv": {"prefix_cache": True},
    "prefill": {"replicas": 2, "num_blocks": 160, "max_running": 4, "chunk_tokens": 256},
    "decode": {"replicas": 2, "num_blocks": 192, "max_running": 16},
    "membership": {"lease_s": LEASE_S},
}
"""The shape of configs/local-cpu-2p2d.yaml."""


def cases_of(engine: LocalEngine, max_tokens: int, loops: int) -> list[Case]:
    """Greedy and sampled answers in turn, and what one engine without a cluster answers."""
    generator = random.Random(5)
    requests = []
    for number in range(NUM_CASES):
        start, length = generator.randrange(len(TEXT) - 100), generator.randrange(20, 100)
        params = SamplingParams(
            loops=loops,
            stop_ids=(),
            max_tokens=max_tokens,
            temperature=0.8 * (number % 2),
            seed=generator.randrange(2**32),
        )
        requests.append(Request(request_id=str(number), prompt_ids=tuple(TEXT[start : start + length]), params=params))
    rows = engine.generate_all(requests)
    return [
        Case(
            request.prompt_ids,
            max_tokens,
            request.params.temperature,
            request.params.seed,
            tuple(row.token_id for row in rows[request.request_id] if row.token_id is not None),
            loops,
        )
        for request in requests
    ]


@pytest.mark.timeout(400)
def test_a_storm_costs_no_token(tmp_path: Path, ouro_engine: LocalEngine) -> None:
    """Each kind of worker is killed and stopped."""
    check_storm(tmp_path, cases_of(ouro_engine, max_tokens=100, loops=1), num_blows=4, every_s=5.0)


@pytest.mark.soak
def test_a_minute_of_storm_costs_no_token(tmp_path: Path, ouro_engine: LocalEngine) -> None:
    """Answers of one loop, which end soon afterwards."""
    check_storm(tmp_path, cases_of(ouro_engine, max_tokens=300, loops=1), num_blows=7)


@pytest.mark.soak
def test_three_minutes_of_storm_cost_no_token(tmp_path: Path, ouro_engine: LocalEngine) -> None:
    """Answers of all loops."""
    check_storm(tmp_path, cases_of(ouro_engine, max_tokens=300, loops=ouro_engine.spec.default_loops), num_blows=22)


@dataclass(frozen=True)
class Outcome:
    """Of one storm."""

    tally: Tally
    losses: Losses


def check_storm(folder: Path, cases: list[Case], num_blows: int, every_s: float = STRIKE_EVERY_S) -> None:
    config = write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", **GROUPS)
    with launched(config, folder) as cluster:
        outcome = asyncio.run(storm(cluster, cases, num_blows, every_s))
        report(outcome, folder)
        wait_until(lambda: all(is_ready(cluster, name) for name in NAMES), "four ready workers", SETTLE_S)
        cluster.wait_idle(SETTLE_S)
    assert outcome.tally.wrong == []
    assert outcome.tally.whole >= NUM_STREAMS
    assert outcome.tally.recovered > 0
    assert outcome.losses.done.total() == num_blows
    assert outcome.losses.most_s <= SEEN_WITHIN_S
    logs = {path.name: path.read_text(encoding="utf-8") for path in (folder / "run").glob("*.log")}
    assert [name for name, text in logs.items() if "Traceback" in text] == []


async def storm(cluster: Cluster, cases: list[Case], num_blows: int, every_s: float) -> Outcome:
    """Streams from before the first blow until some time after the last one, and all to their ends."""
    async with AsyncClient(cluster.address) as client:
        streams, striker = Streams(client, cases), Striker(client)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(streams.run(NUM_STREAMS))
            await striker.strike(num_blows, every_s)
            streams.end()
    return Outcome(streams.tally, striker.losses)


def report(outcome: Outcome, folder: Path) -> None:
    tally, losses = outcome.tally, outcome.losses
    log = (folder / "run" / "coordinator.log").read_text(encoding="utf-8")
    logger.info(
        "%d streams, %d tokens, blows: %s; %d streams recovered, %d attempts failed; slowest pause %.1f s",
        tally.whole,
        tally.tokens,
        dict(losses.done),
        tally.recovered,
        len(re.findall("an attempt failed", log)),
        tally.slowest_pause_s,
    )
    for way, seen in losses.seen_after_s.items():
        logger.info("%s: lost at most %.2f s after the blow (%s)", way, max(seen), ", ".join(f"{s:.2f}" for s in seen))
