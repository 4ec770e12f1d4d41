"""What is asked of Ray, and who is placed where; needs no Ray."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ray_placement import (
    Need,
    Node,
    Strategy,
    Suspects,
    choose_node,
    less_placed,
    need_of,
    strategy_of,
    waiting_words,
)
from coordinator.starters import make_starter
from loopline.config import ClusterConfig, load_config
from loopline.errors import ConfigError, OperatorError
from loopline.identity import Role


def config(folder: Path, launcher: str, groups: str = "") -> ClusterConfig:
    path = folder / "cluster.yaml"
    path.write_text(f"model: {{path: somewhere}}\nlauncher: {{kind: ray, {launcher}}}\n{groups}", encoding="utf-8")
    return load_config(path)


def test_a_worker_takes_a_cpu_for_each_thread_and_what_the_yaml_names(tmp_path: Path) -> None:
    cluster = config(
        tmp_path,
        "prefill_resources: {prefill_node: 1}, decode_labels: {pool: decode}",
        "prefill: {num_threads: 4, deterministic: false}\ndecode: {device: cuda}\n",
    )
    prefill, decode = need_of(cluster, Role.PREFILL), need_of(cluster, Role.DECODE)
    assert prefill.resources == {"CPU": 4, "prefill_node": 1} and prefill.labels == {}
    assert (prefill.num_cpus, prefill.num_gpus) == (4, 0)
    assert decode.resources == {"CPU": 1, "GPU": 1} and decode.labels == {"pool": "decode"}
    assert (decode.num_cpus, decode.num_gpus) == (1, 1)
    assert decode.describe() == "1 CPU, 1 GPU, a node with pool=decode"


def test_decode_workers_are_spread_and_prefill_workers_as_asked(tmp_path: Path) -> None:
    for placement, strategy in (("pack", "pack"), ("spread", "spread")):
        cluster = config(tmp_path, f"prefill_placement: {placement}")
        assert (strategy_of(cluster, Role.PREFILL), strategy_of(cluster, Role.DECODE)) == (strategy, "spread")


@pytest.mark.parametrize(
    ("launcher", "groups", "named"),
    [
        ("restart: always", "decode: {device: 'cuda:1'}", "decode.device is cuda:1; allowed with launcher.kind: ray"),
        ("prefill_resources: {GPU: 2}", "", "launcher.prefill_resources.GPU is 2; allowed: custom resources"),
        (
            "address: local, decode_labels: {a: b}",
            "",
            r"launcher.decode_labels is .*allowed with launcher.address: local",
        ),
    ],
)
def test_what_cannot_be_asked_of_ray_is_named(launcher: str, groups: str, named: str, tmp_path: Path) -> None:
    cluster = config(tmp_path, launcher, groups)
    with pytest.raises(ConfigError, match=named):
        for role in Role:
            need_of(cluster, role)


def test_without_ray_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = config(tmp_path, "restart: always")
    monkeypatch.setitem(sys.modules, "ray", None)
    for module in ("starter", "process", "calls"):
        monkeypatch.delitem(sys.modules, f"coordinator.ray_{module}", raising=False)
    with pytest.raises(OperatorError, match=r"kind is ray, and .*'ray'.*`pip install .*'.\[ray\]'`"):
        make_starter(cluster, tmp_path / "cluster.yaml")


def node(name: str, cpus: float, free: float | None = None, **labels: str) -> Node:
    return Node(name, f"10.0.0.{name}", labels, {"CPU": cpus if free is None else free, "memory": 1e9, "node:x": 1.0})


ONE = Need({"CPU": 1.0}, {})


def place(nodes: list[Node], strategy: Strategy, count: int, needs: Need = ONE) -> list[str]:
    """The node of each of so many workers of a role, one after the other; fewer if there is no more room."""
    totals = {node.id: dict(node.free) for node in nodes}
    placed: list[str] = []
    while len(placed) < count:
        rest = less_placed(nodes, totals, [(name, needs) for name in placed])
        chosen = choose_node(rest, needs, strategy, Counter(placed))
        if chosen is None:
            break
        placed.append(chosen)
    return placed


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 12))
def test_packed_workers_take_as_few_nodes_as_can_hold_them(cpus: list[int], count: int) -> None:
    nodes = [node(str(index), own) for index, own in enumerate(cpus)]
    placed = place(nodes, "pack", count)
    assert len(placed) == min(count, sum(cpus))
    fewest, room = 0, 0
    for own in sorted(cpus, reverse=True):
        if room < len(placed):
            fewest, room = fewest + 1, room + own
    assert len(set(placed)) == fewest


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 12))
def test_spread_workers_lie_as_evenly_as_the_nodes_allow(cpus: list[int], count: int) -> None:
    nodes = [node(str(index), own) for index, own in enumerate(cpus)]
    placed = Counter(place(nodes, "spread", count))
    assert placed.total() == min(count, sum(cpus))
    with_room = [placed[str(index)] for index, own in enumerate(cpus) if placed[str(index)] < own]
    assert all(count <= least + 1 for count in placed.values() for least in with_room)


def test_prefill_workers_that_are_placed_first_are_packed_however_decode_workers_are_spread() -> None:
    nodes = [node(name, 4) for name in "abc"]
    prefill = place(nodes, "pack", 4)
    rest = less_placed(nodes, {node.id: node.free for node in nodes}, [(name, ONE) for name in prefill])
    assert len(set(prefill)) == 1 and Counter(place(rest, "spread", 8)) == dict.fromkeys(set("abc") - set(prefill), 4)


def test_only_a_node_with_the_labels_and_everything_else_is_chosen() -> None:
    nodes = [node("1", 4, pool="prefill"), node("2", 1, pool="decode"), node("3", 4, 0.0, pool="decode")]
    labelled = Need({"CPU": 1.0}, {"pool": "decode"})
    assert choose_node(nodes, labelled, "spread", {}) == "2"
    assert choose_node(nodes, Need({"CPU": 2.0}, {"pool": "decode"}), "spread", {}) is None
    assert choose_node(nodes, Need({"CPU": 1.0, "GPU": 1.0}, {}), "pack", {}) is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("a", ["1"]), ("!a", ["2", "3"]), ("in(a, b)", ["1", "2"]), ("!in(a,b)", ["3"]), ("in(c)", [])],
)
def test_a_label_may_be_a_selector_of_rays(wanted: str, found: list[str]) -> None:
    nodes = [node("1", 1, pool="a"), node("2", 1, pool="b"), node("3", 1)]
    assert [n.id for n in nodes if n.room_for(Need({"CPU": 1.0}, {"pool": wanted}))] == found


def test_what_others_take_counts_and_what_was_just_placed_counts_once() -> None:
    busy = [node("1", 4, free=1)]  # others have three
    assert [n.free["CPU"] for n in less_placed(busy, {"1": {"CPU": 4.0}}, [("1", ONE)])] == [1]
    stale = [node("1", 4, free=4)]  # it has not been heard yet
    assert [n.free["CPU"] for n in less_placed(stale, {"1": {"CPU": 4.0}}, [("1", ONE), ("gone", ONE)])] == [3]


def totals_of(nodes: list[Node], **total: float) -> dict[str, dict[str, float]]:
    return {node.id: {"memory": 1e9, **total} for node in nodes}


def test_what_a_worker_waits_for_is_said_node_by_node() -> None:
    nodes = [node("1", 2), node("2", 2, free=0)]
    said = waiting_words(Need({"CPU": 1.0, "GPU": 1.0}, {}), nodes, totals_of(nodes, CPU=2, GPU=1))
    assert said == "it needs 1 CPU, 1 GPU, all on one node; free: 10.0.0.1: 2 CPU; 10.0.0.2: nothing"
    ten = [node(str(n), 1) for n in range(10)]
    assert waiting_words(ONE, ten, totals_of(ten, CPU=1)).endswith("10.0.0.7: 1 CPU; and 2 more nodes")
    assert waiting_words(ONE, [], {}).endswith("free: no node")


def test_a_node_is_suspected_for_some_time_or_until_it_answers() -> None:
    now_s = 0.0
    suspects = Suspects(lambda: now_s, 90.0)
    suspects.add("a")
    suspects.add("b")
    suspects.discard("b")
    now_s = 80.0
    assert "a" in suspects and "b" not in suspects and "c" not in suspects
    now_s = 90.0
    assert "a" not in suspects
    suspects.add("a")
    assert "a" in suspects


def test_what_no_node_has_even_when_empty_is_no_full_cluster() -> None:
    nodes = [node("1", 2, free=0, pool="a"), node("2", 2, free=0, pool="b"), node("3", 2, free=0)]
    totals = totals_of(nodes, CPU=2)
    vain = "all on one node, and no living node has that even when empty:"
    for need in (Need({"CPU": 1.0, "GPU": 1.0}, {}), Need({"CPU": 3.0}, {}), Need({"CPU": 1.0, "decod_node": 1.0}, {})):
        said = waiting_words(need, nodes, totals)
        assert f"{vain} there are 10.0.0.1: 2 CPU; 10.0.0.2: 2 CPU; 10.0.0.3: 2 CPU" in said
    said = waiting_words(Need({"CPU": 1.0}, {"pool": "decode", "zone": "x"}), nodes, totals)
    assert (
        said
        == f"it needs 1 CPU, a node with pool=decode, a node with zone=x, {vain} pool is a, b; none has a label zone"
    )
    said = waiting_words(Need({"CPU": 4.0}, {"pool": "in(b,c)"}), nodes, totals)
    assert said.endswith(f"{vain} with such labels there are 10.0.0.2: 2 CPU")
    assert "even when empty" not in waiting_words(Need({"CPU": 2.0}, {"pool": "b"}), nodes, totals)
