"""A real engine's prefix cache as the coordinator comes to know it: the same digests, with no root sent."""

from dataclasses import replace

import pytest

from coordinator.prefixes import PrefixTable, RequestPrefixes
from loopline.engine.engine import Engine
from loopline.identity import WorkerId
from loopline.messages import PrefixReport
from loopline.sched.policy import UnifiedPolicy
from loopline.worker.prefix_reporter import PrefixReporter
from tests.support.families import FAMILIES, asking

WORKER = WorkerId("uuid", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_coordinator_names_blocks_as_the_engine_does(family: str) -> None:
    engine = Engine(replace(FAMILIES[family], block_size=4, num_blocks=16), UnifiedPolicy())
    table, prefixes = PrefixTable(), RequestPrefixes()
    table.joined(WORKER, 16, 0.0)
    asked: list[bool] = []

    def take(report: PrefixReport) -> None:
        asked.append(table.take(WORKER, report, 0.0))

    reporter = PrefixReporter(engine.ledger.prefix, take)
    reporter.ask()
    request = asking("r", tuple(range(10)), max_tokens=2, loops=engine.model.spec.default_loops)
    engine.scheduler.submit(request)
    while engine.step() is not None:
        pass
    reporter.maybe_report(0.0, busy=False)
    digests = prefixes.digests(request, engine.fingerprint(), 4)
    assert asked == [False, False] and len(digests) == 2
    assert table.num_cached(WORKER, digests) == 2
