"""What a worker counts of what it says and of its handoffs, and that what it is given goes on unchanged."""

import urllib.request
from types import SimpleNamespace
from typing import cast

import pytest

from kvtransfer.handoff import SendState
from kvtransfer.push_counts import PushCounts
from loopline.engine.engine import Engine
from loopline.engine.step_counts import StepCounts
from loopline.errors import AddressInUse
from loopline.identity import BlockCounts, Cause, HandoffKey, Role, WorkerLoad
from loopline.messages import LocalPrefillStarted, RequestFailed, Reserved, WorkerMessage
from loopline.sched.admission import PrefixCounts
from loopline.sched.share import PromptShare, RowSteps
from loopline.telemetry.metrics import registry_of
from loopline.worker.metrics import Scrapes, WorkerMetrics

KEY = HandoffKey("r1", 1)


def make() -> WorkerMetrics:
    load = WorkerLoad(1, True, 3, 2, 40, 1, BlockCounts(4, 1, 2, 3, 10), (("failed", 2),), (("stale", 5),))
    scheduler = SimpleNamespace(num_preempted=2, prefix_counts=PrefixCounts(), share=PromptShare(None, RowSteps()))
    engine = SimpleNamespace(counts=StepCounts(), scheduler=scheduler)
    return WorkerMetrics(Role.PREFILL, cast(Engine, engine), lambda: load, PushCounts)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return registry_of(metrics.collect).get_sample_value(name, labels)


def test_what_is_given_up_and_refused_is_counted_by_cause() -> None:
    metrics, sent = make(), list[WorkerMessage]()
    send = metrics.sending(sent.append)
    messages = [
        RequestFailed(KEY, Cause.TRANSFER_FAILED, "x"),
        Reserved(KEY, cause=Cause.NO_ROOM),
        Reserved(KEY),
        LocalPrefillStarted(KEY, Cause.WRONG_WRITER),
        LocalPrefillStarted(KEY),
    ]
    for message in messages:
        send(message)
    assert sent == messages
    assert sample(metrics, "loopline_given_up_requests_total", cause="transfer_failed") == 1
    assert sample(metrics, "loopline_refusals_total", cause="no_room") == 1
    assert sample(metrics, "loopline_refusals_total", cause="wrong_writer") == 1
    assert sample(metrics, "loopline_refusals_total", cause="draining") == 0


def test_a_port_is_listened_on_before_there_is_anything_to_show() -> None:
    def read() -> str:
        with urllib.request.urlopen(f"http://{scrapes.address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    scrapes = Scrapes("127.0.0.1", 0, "127.0.0.1")
    assert "loopline" not in read()
    port = int(scrapes.address.rpartition(":")[2])
    with pytest.raises(AddressInUse, match=f"--metrics-port is {port}: 127.0.0.1:{port} cannot be listened on"):
        Scrapes("127.0.0.1", port, "127.0.0.1")
    scrapes.show(make().collect)
    assert "loopline_preemptions_total 2.0" in read()


def test_handoffs_are_counted_by_the_states_that_they_enter() -> None:
    metrics, heard = make(), list[str]()
    entered = metrics.entering(heard.append)
    for state in (SendState.OPEN, SendState.COMMITTED, SendState.DRAINED):
        entered(state)
    assert heard == ["open", "committed", "drained"]
    assert sample(metrics, "loopline_handoff_states_total", state="drained") == 1
    assert sample(metrics, "loopline_handoff_states_total", state="failed") == 0


def test_gauges_are_those_of_the_published_load() -> None:
    metrics = make()
    states = ("free", "held", "cached", "quarantined")
    assert [sample(metrics, "loopline_kv_blocks", state=state) for state in states] == [4, 1, 2, 3]
    assert sample(metrics, "loopline_num_requests_running") == 3
    assert sample(metrics, "loopline_num_requests_waiting") == 2
    assert sample(metrics, "loopline_queued_token_loops") == 40
    assert sample(metrics, "loopline_handoffs", state="failed") == 2
    assert sample(metrics, "loopline_ignored_messages_total", cause="stale") == 5
    assert sample(metrics, "loopline_preemptions_total") == 2
    assert sample(metrics, "loopline_pushed_bytes_total") is None  # it has no budget: it pushes nothing
