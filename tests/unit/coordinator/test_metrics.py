import socket
import urllib.request

import pytest

from coordinator.effects import Ending
from coordinator.metrics import CoordinatorMetrics
from coordinator.registry import LossReason
from loopline.errors import AddressInUse
from loopline.identity import Cause


def test_a_scrape_shows_each_cause_as_a_series_of_its_own() -> None:
    ignored = {Cause.STALE: 2}
    metrics = CoordinatorMetrics(ignored)
    metrics.attempt_failed(Cause.PEER_LOST)
    metrics.ended(Ending.DEADLINE)
    metrics.refused()
    metrics.worker_lost(LossReason.LEASE)
    port = metrics.serve("127.0.0.1", 0)
    ignored[Cause.STALE] += 1
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert 'loopline_failed_attempts_total{cause="peer_lost"} 1.0' in lines
    assert 'loopline_failed_attempts_total{cause="transfer_timeout"} 0.0' in lines
    assert 'loopline_requests_total{ending="deadline"} 1.0' in lines
    assert 'loopline_requests_total{ending="finished"} 0.0' in lines
    assert "loopline_refused_requests_total 1.0" in lines
    assert 'loopline_lost_workers_total{reason="lease"} 1.0' in lines
    assert 'loopline_ignored_messages_total{cause="stale"} 3.0' in lines


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"telemetry.metrics_port is {port}"):
            CoordinatorMetrics({}).serve("127.0.0.1", port)
