"""What a cluster says of a request: one id in every process's log, counts that scrapes find, one trace."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from loopline.client import Accepted
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.collector import Collector, SeenSpan
from tests.support.golden import MODELS

LOOPS = 3  # not the default
STATES = ("free", "held", "cached", "quarantined")
Samples = dict[str, float]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


@pytest.fixture(scope="module")
def ouro(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    """One prefill and one decode worker on tiny-ouro that say all they can."""
    folder = tmp_path_factory.mktemp("observed")
    telemetry: dict[str, object] = {"log_format": "json", "metrics_port": 0, "otlp_endpoint": collector.endpoint}
    config = write_config(folder / "cluster.yaml", MODELS / "tiny-ouro", kv={"prefix_cache": True}, telemetry=telemetry)
    with launched(config, folder) as cluster:
        yield cluster


def lines_of(cluster: Cluster, process: str) -> Iterator[dict[str, Any]]:
    for line in (cluster.run_dir / f"{process}.log").read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):  # libraries that are not Python write lines of their own
            yield json.loads(line)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def metrics_url(cluster: Cluster) -> str:
    """The coordinator's, as its log says."""
    said = next(line["message"] for line in lines_of(cluster, "coordinator") if "metrics are at" in line["message"])
    url = re.search(r"http://\S+/metrics", said)
    assert url is not None
    return url.group()


def scrape(url: str) -> Samples:
    """Value by name and labels, as the scrape shows them."""
    rows = [line.rpartition(" ") for line in read(url).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def scrape_all(cluster: Cluster) -> dict[str, Samples]:
    """Of every process that service discovery finds, by its name."""
    found = json.loads(read(metrics_url(cluster).replace("/metrics", "/targets")))
    return {one["labels"]["process"]: scrape(f"http://{one['targets'][0]}/metrics") for one in found}


def test_one_id_leads_through_every_process(ouro: Cluster) -> None:
    events = list(ouro.client.generate("def", max_tokens=4, ignore_eos=True, label="mine"))
    (accepted,) = [event for event in events if isinstance(event, Accepted)]

    def messages(process: str) -> list[str]:
        return [line["message"] for line in lines_of(ouro, process) if line.get("request_id") == accepted.request_id]

    end = "finished after 4 tokens; prefilled by prefill-0, decoded by decode-0"
    for process, words in (
        ("coordinator", "label 'mine'"),
        ("prefill-0", "prefilled 3 tokens"),
        ("decode-0", "decoding from position 3"),
        ("coordinator", end),
    ):  # an answer may be there before all that is said of it
        said = wait_until(lambda p=process, w=words: [m for m in messages(p) if w in m], f"{process} says {words!r}")
        assert words != end or end in said


def test_each_ending_is_a_count_of_its_own(ouro: Cluster) -> None:
    before = scrape(metrics_url(ouro))
    stream = ouro.client.generate("abc", max_tokens=200, ignore_eos=True)
    next(stream)
    stream.close()
    ouro.wait_idle()
    after = scrape(metrics_url(ouro))
    endings = {name: after[name] - before[name] for name in after if name.startswith("loopline_requests_total")}
    assert {name: count for name, count in endings.items() if count} == {
        'loopline_requests_total{ending="cancelled"}': 1.0
    }
    for name in ("loopline_failed_attempts_total", "loopline_lost_workers_total"):
        assert sum(value for key, value in after.items() if key.startswith(name)) == 0


def test_one_request_is_counted_to_the_last_token_in_every_process(ouro: Cluster) -> None:
    ouro.wait_idle()
    before = scrape_all(ouro)
    prompt, new, total = list(range(10, 50)), 8, 0
    for _ in range(2):  # the second one finds two blocks of 16 tokens
        ouro.client.complete(prompt, max_tokens=new, ignore_eos=True, loops=LOOPS)
        total += 1
    ouro.wait_idle()
    cached = 32
    all_prompts = total * len(prompt)
    wait_until(lambda: done(scrape_all(ouro), before) == (total, total), "the scrape shows both handoffs as done")
    after = scrape_all(ouro)
    assert set(after) == {"coordinator", "prefill-0", "decode-0"}

    def grown(process: str, name: str) -> float:
        return after[process][name] - before[process][name]

    assert grown("coordinator", 'loopline_requests_total{ending="finished"}') == total
    assert grown("coordinator", "loopline_time_to_first_token_seconds_count") == total
    assert grown("coordinator", "loopline_inter_token_latency_seconds_count") == total * (new - 1)
    assert grown("coordinator", "loopline_generation_tokens_total") == total * new
    assert grown("coordinator", "loopline_prompt_tokens_total") == all_prompts
    assert grown("coordinator", "loopline_prompt_tokens_cached_total") == cached
    assert grown("coordinator", "loopline_e2e_request_latency_seconds_count") == total
    assert after["coordinator"]['loopline_workers{role="decode",state="ready"}'] == 1
    assert after["coordinator"]["loopline_serving"] == 1

    assert grown("prefill-0", 'loopline_token_loops_total{phase="prefill"}') == (all_prompts - cached) * LOOPS
    assert grown("prefill-0", 'loopline_token_loops_total{phase="decode"}') == 0
    assert grown("prefill-0", "loopline_prefix_cache_queries_total") == all_prompts
    assert grown("prefill-0", "loopline_prefix_cache_hits_total") == cached
    assert grown("prefill-0", 'loopline_step_seconds_count{rows="prefill"}') == total
    assert grown("prefill-0", 'loopline_pushes_total{result="done"}') == total
    assert grown("prefill-0", "loopline_push_seconds_count") == total
    pushed = grown("prefill-0", "loopline_pushed_bytes_total")
    blocks_pushed = 3 + 1  # whole blocks; the decode worker has the first two of the second request
    assert pushed == blocks_pushed * 16 * ouro.client.model().kv_bytes_per_token
    assert after["prefill-0"]["loopline_push_in_flight_bytes"] == 0

    assert grown("decode-0", 'loopline_token_loops_total{phase="decode"}') == total * (new - 1) * LOOPS
    assert grown("decode-0", 'loopline_step_seconds_count{rows="decode"}') == total * (new - 1)
    assert "loopline_pushed_bytes_total" not in after["decode-0"]
    for name in ("prefill-0", "decode-0"):
        states = {state: after[name][f'loopline_kv_blocks{{state="{state}"}}'] for state in STATES}
        wait_until(lambda name=name, states=states: has_blocks(ouro, name, states), "a heartbeat says the same")
        assert sum(states.values()) == ouro.workers()[name].blocks.total
        assert after[name]["loopline_num_requests_running"] == 0


def has_blocks(cluster: Cluster, name: str, states: dict[str, float]) -> bool:
    blocks = cluster.workers()[name].blocks
    return states == {state: getattr(blocks, state) for state in STATES}


def done(after: dict[str, Samples], before: dict[str, Samples]) -> tuple[float, float]:
    """Handoffs that have come to their good end since, at both workers."""
    names = {"prefill-0": "drained", "decode-0": "active"}
    keys = {process: f'loopline_handoff_states_total{{state="{state}"}}' for process, state in names.items()}
    prefill, decode = (after[process][key] - before[process][key] for process, key in keys.items())
    return prefill, decode


def test_a_trace_leads_through_all_three_processes_from_the_clients_span_on(
    ouro: Cluster, collector: Collector
) -> None:
    trace_id, client_span, prompt, new = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 40, 8
    sampling = loopline_pb2.SamplingParams(max_tokens=new, ignore_eos=True, loops=LOOPS)
    ids = loopline_pb2.TokenIds(ids=range(100, 100 + prompt))
    with grpc.insecure_channel(ouro.address) as channel:
        stub: Any = loopline_pb2_grpc.LooplineStub(channel)  # type: ignore[no-untyped-call]
        metadata = (("traceparent", f"00-{trace_id}-{client_span}-01"),)
        events = list(
            stub.Generate(loopline_pb2.GenerateRequest(token_ids=ids, sampling=sampling), metadata=metadata, timeout=30)
        )
    names = {"request", "queued", "attempt", "reserve", "bind", "prefill", "handoff", "decode"}
    wait_until(lambda: {span.name for span in collector.spans(trace_id)} >= names, "every span has come")
    spans = {span.name: span for span in collector.spans(trace_id)}
    assert len(collector.spans(trace_id)) == len(names)
    whole, attempt = spans["request"], spans["attempt"]
    of: dict[str, tuple[str, str]] = {
        "request": (client_span, "coordinator"),
        "queued": (whole.span_id, "coordinator"),
        "attempt": (whole.span_id, "coordinator"),
        "reserve": (attempt.span_id, "coordinator"),
        "bind": (attempt.span_id, "coordinator"),
        "prefill": (attempt.span_id, "prefill-0"),
        "handoff": (attempt.span_id, "prefill-0"),
        "decode": (attempt.span_id, "decode-0"),
    }
    assert {name: (span.parent_id, span.instance) for name, span in spans.items()} == of
    assert {span.error for span in spans.values()} == {""}
    for name in ("request", "prefill", "handoff", "decode"):
        assert attributes(spans[name], "request_id") == (events[0].accepted.request_id,)
    assert attributes(spans["prefill"], "tokens", "cached_tokens", "depth") == (prompt, 0, LOOPS)
    assert attributes(spans["handoff"], "pushes", "descriptors") == (1, events[-1].finished.handoff.descriptors)
    assert attributes(spans["decode"], "tokens", "token_loops", "finish") == (new - 1, (new - 1) * LOOPS, "length")
    assert attributes(whole, "completion_tokens", "prefill", "decode") == (new, "prefill-0", "decode-0")
    order = [spans[name].start_ns for name in ("request", "queued", "attempt", "bind", "prefill", "handoff", "decode")]
    assert order == sorted(order)  # one machine, one clock
    assert all(whole.start_ns <= span.start_ns <= span.end_ns for span in spans.values())


def attributes(span: SeenSpan, *names: str) -> tuple[Any, ...]:
    return tuple(span.attributes[f"loopline.{name}"] for name in names)


def test_a_recovery_is_a_second_attempt_of_the_trace_and_the_new_worker_is_found(
    ouro: Cluster, collector: Collector
) -> None:
    """The last test here: it ends a worker."""
    trace_id, new = "1af7651916cd43dd8448eb211c80319d", 400
    before, killed = scrape(metrics_url(ouro)), ouro.workers()["decode-0"]
    sampling = loopline_pb2.SamplingParams(max_tokens=new, ignore_eos=True, loops=1)
    request = loopline_pb2.GenerateRequest(token_ids=loopline_pb2.TokenIds(ids=[65, 66, 67]), sampling=sampling)
    with grpc.insecure_channel(ouro.address) as channel:
        stub: Any = loopline_pb2_grpc.LooplineStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.Generate(request, metadata=(("traceparent", f"00-{trace_id}-{'b' * 16}-01"),), timeout=60)
        events = [next(stream) for _ in range(3)]  # accepted, and tokens of the decode worker
        os.kill(killed.pid, signal.SIGKILL)
        events += stream
    assert events[-1].finished.usage.completion_tokens == new
    wait_until(lambda: any(span.name == "request" for span in collector.spans(trace_id)), "the request's span has come")
    wait_until(lambda: any(span.name == "decode" for span in collector.spans(trace_id)), "the second decode's too")
    spans = sorted(collector.spans(trace_id), key=lambda span: span.start_ns)
    attempts = [span for span in spans if span.name == "attempt"]
    assert (attempts[0].error, attempts[-1].error) == ("peer_lost", "")
    (decode,) = [span for span in spans if span.name == "decode"]  # what was killed has told nothing
    assert decode.parent_id == attempts[-1].span_id
    after = scrape(metrics_url(ouro))
    grown = {name: after[name] - before[name] for name in after}
    assert grown['loopline_failed_attempts_total{cause="peer_lost"}'] == 1
    assert sum(grown[f'loopline_lost_workers_total{{reason="{reason}"}}'] for reason in ("stream", "reaped")) == 1
    assert grown["loopline_generation_tokens_total"] == new
    assert grown["loopline_time_to_first_token_seconds_count"] == 1
    found = scrape_all(ouro)
    assert set(found) == {"coordinator", "prefill-0", "decode-0"}
    assert ouro.workers()["decode-0"].metrics_address != killed.metrics_address
    assert found["decode-0"]['loopline_handoff_states_total{state="active"}'] >= 1
