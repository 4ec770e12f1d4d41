"""The coordinator's counts, and a scrape of a coordinator with scripted workers."""

import asyncio
import json
import socket
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from coordinator.effects import Ending, Outcome
from coordinator.metrics import CoordinatorMetrics
from coordinator.registry import LossReason
from coordinator.scrape import ask_loop, serve_metrics
from loopline.errors import AddressInUse
from loopline.identity import Cause
from loopline.request import Route, Timing, Usage
from loopline.telemetry.metrics import registry_of
from tests.unit.coordinator.builders import VirtualClock
from tests.unit.coordinator.cluster import WAIT_S, scripted_cluster, until


def outcome(ending: Ending, *, prompt: int = 5, new: int = 3, cached: int = 0) -> Outcome:
    return Outcome(
        ending=ending,
        reason=None,
        detail="",
        usage=Usage(prompt_tokens=prompt, completion_tokens=new, cached_tokens=cached),
        timing=Timing(queued_s=0.25, ttft_s=0.5, total_s=2.0),
        route=Route(),
        stats=None,
    )


def samples(metrics: CoordinatorMetrics) -> dict[str, float]:
    found = {}
    for family in registry_of(metrics.collect).collect():
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}[{labels}]"] = sample.value
    return found


def test_each_cause_is_a_series_of_its_own_from_the_start() -> None:
    ignored = {Cause.STALE: 2}
    metrics = CoordinatorMetrics(VirtualClock(), ignored)
    metrics.attempt_failed(Cause.PEER_LOST)
    metrics.admitted("r1")
    metrics.ended("r1", outcome(Ending.DEADLINE))
    metrics.refused()
    metrics.worker_lost(LossReason.LEASE)
    ignored[Cause.STALE] += 1
    found = samples(metrics)
    assert found["loopline_failed_attempts_total[cause=peer_lost]"] == 1
    assert found["loopline_failed_attempts_total[cause=transfer_timeout]"] == 0
    assert found["loopline_requests_total[ending=deadline]"] == 1
    assert found["loopline_requests_total[ending=finished]"] == 0
    assert found["loopline_refused_requests_total[]"] == 1
    assert found["loopline_lost_workers_total[reason=lease]"] == 1
    assert found["loopline_ignored_messages_total[cause=stale]"] == 3


def test_times_of_a_request_and_its_tokens() -> None:
    clock = VirtualClock()
    metrics = CoordinatorMetrics(clock, {})
    metrics.admitted("r1")
    for pause_s in (0.5, 0.25, 0.75):
        clock.s += pause_s
        metrics.token("r1")
    metrics.ended("r1", outcome(Ending.FINISHED, prompt=16, cached=8))
    found = samples(metrics)
    assert found["loopline_time_to_first_token_seconds_count[]"] == 1
    assert found["loopline_time_to_first_token_seconds_sum[]"] == 0.5
    assert found["loopline_time_to_first_token_seconds_bucket[le=0.2]"] == 0
    assert found["loopline_time_to_first_token_seconds_bucket[le=0.5]"] == 1
    assert found["loopline_inter_token_latency_seconds_count[]"] == 2
    assert found["loopline_inter_token_latency_seconds_sum[]"] == 1.0
    assert found["loopline_request_queue_time_seconds_sum[]"] == 0.25
    assert found["loopline_e2e_request_latency_seconds_sum[]"] == 2.0
    assert found["loopline_generation_tokens_total[]"] == 3
    assert found["loopline_prompt_tokens_total[]"] == 16
    assert found["loopline_prompt_tokens_cached_total[]"] == 8


def test_what_no_client_asked_for_is_not_counted() -> None:
    metrics = CoordinatorMetrics(VirtualClock(), {})
    metrics.token("warm-up")
    metrics.ended("warm-up", outcome(Ending.FINISHED))
    found = samples(metrics)
    assert found["loopline_generation_tokens_total[]"] == found["loopline_requests_total[ending=finished]"] == 0
    assert found["loopline_time_to_first_token_seconds_count[]"] == 0


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def test_a_scrape_and_a_discovery_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise AssertionError("a scrape asked for every request")

    async def main() -> None:
        async with scripted_cluster() as cluster:
            prefill = cluster.attach("prefill-0")
            prefill.register = replace(prefill.register, metrics_address="127.0.0.1:9999")
            cluster.attach("decode-0")
            await until(lambda: cluster.dispatcher.readiness.serving, "serving")
            monkeypatch.setattr(cluster.dispatcher, "snapshot", fail)  # it grows with requests
            server = serve_metrics(cluster.dispatcher, "127.0.0.1", 0)
            here = f"127.0.0.1:{server.port}"
            try:
                lines = (await asyncio.to_thread(read, f"http://{here}/metrics")).splitlines()
                found = json.loads(await asyncio.to_thread(read, f"http://{here}/targets"))
            finally:
                await asyncio.to_thread(server.close)
        assert 'loopline_workers{role="prefill",state="ready"} 1.0' in lines
        assert 'loopline_workers{role="decode",state="lost"} 0.0' in lines
        assert "loopline_serving 1.0" in lines
        assert "loopline_num_requests_waiting 0.0" in lines
        assert found == [
            {"targets": [here], "labels": {"process": "coordinator", "kind": "coordinator"}},
            {"targets": ["127.0.0.1:9999"], "labels": {"process": "prefill-0", "kind": "prefill"}},
        ]

    asyncio.run(main())


def test_a_port_that_is_taken_is_named() -> None:
    async def main() -> None:
        async with scripted_cluster() as cluster:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
                with pytest.raises(AddressInUse, match=f"telemetry.metrics_port is {port}"):
                    serve_metrics(cluster.dispatcher, "127.0.0.1", port)

    asyncio.run(main())


def test_what_the_loop_raises_is_the_askers() -> None:
    def fail() -> Any:
        raise ValueError("raised on the loop")

    async def main() -> None:
        with pytest.raises(ValueError, match="raised on the loop"):
            await asyncio.to_thread(ask_loop, asyncio.get_running_loop(), fail)

    asyncio.run(main())
