"""`loopline bench session` against clusters: one that runs, and one that it launches itself for its turns."""

import asyncio
import json
from pathlib import Path

import pytest

from loopline.bench.cluster_sessions import ClusterArm, ClusterLoad, measure
from loopline.bench.load_report import Watcher
from loopline.bench.sessions import SessionShape, draw_sessions
from loopline.bench.turn_figures import Limits
from loopline.errors import ConfigError
from tests.support.cluster import Cluster, launched, wait_until, write_config
from tests.support.golden import MODELS

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]


def test_arms_answer_alike_and_the_one_with_a_cache_finds_what_was_said(ouro: Cluster, tmp_path: Path) -> None:
    group: dict[str, object] = {"num_blocks": 48, "chunk_tokens": 32}
    cached = write_config(
        tmp_path / "cached.yaml", MODELS / "tiny-ouro", kv={"prefix_cache": True}, prefill=group, decode=group
    )
    arms = (ClusterArm("as it is", address=ouro.address), ClusterArm("cached", config=cached))
    trace = draw_sessions(SessionShape(sessions=3, turns=3, first=36, tool=8, answer=6, think_s=0.01))
    seen: list[str] = []
    watch = Watcher(lambda count: seen.append(str(count)), seen.append, lambda: seen.append("turn"))
    load = ClusterLoad(arms=arms, rounds=1)
    report = json.loads(json.dumps(asyncio.run(measure(load, trace, Limits(ttft_s=60), "a test", watch))))
    assert seen.count("turn") == 18 and seen[0] == "18"
    for arm in report["arms"]:
        (run,) = arm["runs"]
        assert run["turns"] == 9 and run["failed"] == 0, run["errors"]
        assert run["good_share"] == 1 and run["ttft_ms"]["p50"] > 0 and run["tpot_ms"]["p50"] > 0
        assert all(one["due_s"] <= one["first_s"] <= one["end_s"] and one["route"] for one in arm["turns"][0])
    plain, with_cache = (arm["median"]["cached_share"] for arm in report["arms"])
    assert plain == 0 and with_cache > 0
    assert [one["same_answers"] for one in report["ratios"]] == [1.0]
    wait_until(ouro.is_idle, "the cluster that runs is idle")


def test_arms_of_one_cluster_find_nothing_of_each_other(tmp_path: Path) -> None:
    """A running cluster beside itself, with a cache that keeps everything, and two turns of each arm."""
    group: dict[str, object] = {"num_blocks": 96, "chunk_tokens": 32}
    config = write_config(
        tmp_path / "cached.yaml", MODELS / "tiny-ouro", kv={"prefix_cache": True}, prefill=group, decode=group
    )
    trace = draw_sessions(SessionShape(sessions=2, turns=2, first=36, tool=8, answer=6, system=32))
    with launched(config, tmp_path) as cluster:
        arms = tuple(ClusterArm(name, address=cluster.address) for name in ("one", "two"))
        report = asyncio.run(measure(ClusterLoad(arms=arms, rounds=2), trace, Limits(), "a test", Watcher()))
        wait_until(cluster.is_idle, "the cluster is idle")
    assert [one["same_as"] for one in report["clusters"]] == [None, "one"]
    assert "two is the cluster of one" in report["notes"][0]
    assert [one["same_answers"] for one in report["ratios"]] == [None]
    for arm in report["arms"]:
        for run, turns in zip(arm["runs"], arm["turns"], strict=True):
            assert run["failed"] == 0, run["errors"]
            first = [one["cached_tokens"] for one in turns if one["turn"] == 0]
            assert 0 in first and all(cached <= 32 for cached in first)  # of the other session's, the common beginning
            assert run["by_turn"][1]["cached_share"] > 0
            assert sum(run["prefix_sources"].values()) == 4 and run["handoff_bytes"] > 0
            assert {one["prefix_source"] for one in turns} <= {"local", "recompute", "fetch"}


def test_a_turn_that_is_refused_ends_its_session_and_no_other(ouro: Cluster) -> None:
    """The second turn is more than the smaller arena holds."""
    shape = SessionShape(sessions=2, turns=2, first=4, tool=1200, answer=2)
    report = asyncio.run(
        measure(
            ClusterLoad(arms=(ClusterArm("one", address=ouro.address),), rounds=1),
            draw_sessions(shape),
            Limits(),
            "a test",
            Watcher(),
        )
    )
    (run,) = report["arms"][0]["runs"]
    assert run["turns"] == 4 and run["failed"] == 2
    assert all(error.startswith("RequestTooLarge") for error in run["errors"])
    wait_until(ouro.is_idle, "the cluster is idle")


def test_what_cannot_run_is_named_before_anything_does(tmp_path: Path) -> None:
    arm = ClusterArm("twice", address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="twice"):
        asyncio.run(measure(ClusterLoad(arms=(arm, arm)), draw_sessions(SessionShape()), Limits(), "", Watcher()))
    missing = ClusterArm("missing", config=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        asyncio.run(measure(ClusterLoad(arms=(missing,)), draw_sessions(SessionShape()), Limits(), "", Watcher()))
