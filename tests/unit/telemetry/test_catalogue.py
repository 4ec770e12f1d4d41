"""One list of metrics: what processes show, what is documented and what the dashboard asks for are the same."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.core import Metric

from coordinator.effects import Ending
from coordinator.metrics import CoordinatorMetrics, collect_cluster
from coordinator.snapshot import ClusterSnapshot
from kvtransfer.push_counts import PushCounts
from loopline.clock import MonotonicClock
from loopline.engine.engine import Engine
from loopline.engine.step_counts import StepCounts
from loopline.identity import BlockCounts, BudgetCounts, Role, WorkerLoad
from loopline.sched.admission import PrefixCounts
from loopline.sched.share import PromptShare, RowSteps
from loopline.telemetry import catalogue
from loopline.telemetry.metrics import Definition, Kind
from loopline.worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "configs/grafana/loopline.json"
EVERY = {metric.name: metric for metric in (*catalogue.COORDINATOR, *catalogue.PREFILL_WORKER)}
_PARTS = ("_bucket", "_sum", "_count")
Row = tuple[str, str, tuple[str, ...], str]


def as_row(metric: Definition) -> Row:
    return metric.name, metric.kind.value, metric.labels, metric.what


def rows_of(families: Iterable[Metric]) -> list[Row]:
    """What was collected, as rows; the labels are those of the samples."""
    rows = []
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {tuple(label for label in sample.labels if label != "le") for sample in family.samples}
        assert len(labels) == 1, f"{name} has samples with different labels, or none"
        rows.append((name, family.type, labels.pop(), family.documentation))
    return rows


def assert_same(families: Iterable[Metric], metrics: Sequence[Definition]) -> None:
    assert sorted(rows_of(families)) == sorted(map(as_row, metrics))


def worker_metrics(role: Role) -> WorkerMetrics:
    budget = BudgetCounts(1, 2, 3, 0.5) if role is Role.PREFILL else None
    load = WorkerLoad(1, False, 0, 0, 0, 0, BlockCounts(4, 1, 2, 3, 10), (), (), budget)
    scheduler = SimpleNamespace(num_preempted=2, prefix_counts=PrefixCounts(), share=PromptShare(None, RowSteps()))
    engine = SimpleNamespace(counts=StepCounts(), scheduler=scheduler)
    return WorkerMetrics(role, cast(Engine, engine), lambda: load, PushCounts)


def test_the_coordinator_shows_what_is_listed() -> None:
    counted = CoordinatorMetrics(MonotonicClock(), {}).collect()
    now = collect_cluster(ClusterSnapshot(()), queued=1, running=2, serving=True)
    assert_same([*counted, *now], catalogue.COORDINATOR)


@pytest.mark.parametrize(
    ("role", "listed"), [(Role.PREFILL, catalogue.PREFILL_WORKER), (Role.DECODE, catalogue.WORKER)]
)
def test_a_worker_shows_what_is_listed(role: Role, listed: Sequence[Definition]) -> None:
    assert_same(worker_metrics(role).collect(), listed)


def test_names_follow_the_conventions() -> None:
    for name, metric in EVERY.items():
        assert re.fullmatch(r"loopline_[a-z0-9_]+", name)
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert metric.kind is not Kind.HISTOGRAM or name.endswith("_seconds"), name
        assert metric.what.endswith(".") and "|" not in metric.what, name


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(loopline_\w+)` \| (\w+) \|([^|]*)\| ([^|]+) \|$", text, re.MULTILINE)
    documented = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), what) for name, kind, labels, what in rows]
    assert sorted(documented) == sorted(map(as_row, EVERY.values()))


def test_every_ending_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^`ending`: ([^.]+)\.", text, re.MULTILINE)
    assert [word.strip() for word in listed.split(",")] == [ending.value for ending in Ending]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    of_targets = {"process", "kind", "le"}
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    asked = set()
    for target in (target for panel in panels for target in panel["targets"]):
        expression, labels = target["expr"], set(of_targets)
        for name in re.findall(r"loopline_\w+", expression):
            part = next((part for part in _PARTS if name.endswith(part) and name not in EVERY), "")
            metric = EVERY[name.removesuffix(part)]
            assert bool(part) == (metric.kind is Kind.HISTOGRAM), expression
            labels |= set(metric.labels)
            asked.add(metric.name)
        groups = re.findall(r"by \(([^)]*)\)", expression) + re.findall(r"\{\{([^}]*)\}\}", target["legendFormat"])
        assert {label.strip() for group in groups for label in group.split(",")} <= labels, expression
    assert asked == set(EVERY)


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    found = dashboard()
    ids = Counter(panel["id"] for panel in found["panels"])
    assert max(ids.values()) == 1
    assert found["schemaVersion"] >= 36 and found["uid"] and found["title"]
    (variable,) = found["templating"]["list"]
    assert variable["type"] == "datasource" and variable["query"] == "prometheus"
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))
