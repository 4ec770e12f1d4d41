"""What is asked of Ray, and who is placed with whom; needs no Ray."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ray_placement import Groups, need_of, strategy_of
from coordinator.starters import make_starter
from loopline.config import ClusterConfig, load_config
from loopline.errors import ConfigError, OperatorError
from loopline.identity import Role
from loopline.launcher_messages import KeptWorker


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
    for placement, strategy in (("pack", "PACK"), ("spread", "SPREAD")):
        cluster = config(tmp_path, f"prefill_placement: {placement}")
        assert (strategy_of(cluster, Role.PREFILL), strategy_of(cluster, Role.DECODE)) == (strategy, "SPREAD")


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
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.delitem(__import__("sys").modules, "coordinator.ray_starter", raising=False)
    with pytest.raises(OperatorError, match=r"launcher.kind is ray, and .*'ray'.*pip install 'loopline\[ray\]'"):
        make_starter(cluster, tmp_path / "cluster.yaml")


def kept(*names: str) -> list[KeptWorker]:
    return [KeptWorker(name, Role(name.partition("-")[0]), leaving=False) for name in names]


def test_who_comes_together_shares_a_group_and_free_places_are_taken_first() -> None:
    groups = Groups()
    prefill, decode = groups.expect(kept("prefill-0", "decode-0", "decode-1"))
    assert (prefill.holders, decode.holders) == (["prefill-0"], ["decode-0", "decode-1"])
    assert groups.release("decode-1") is None
    (later,) = groups.expect(kept("decode-1", "decode-2", "decode-3"))
    assert (decode.holders, later.holders) == (["decode-0", "decode-1"], ["decode-2", "decode-3"])
    assert groups.slot("decode-3").bundle == 1 and groups.slot("decode-3").group is later
    assert groups.release("decode-2") is None and groups.release("decode-3") is later
    assert groups.release("prefill-0") is prefill


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_every_worker_has_one_place_and_empty_groups_go(wanted: list[tuple[int, int]]) -> None:
    groups, names, made = Groups(), set[str](), []
    for prefill, decode in wanted:
        want = {f"prefill-{n}" for n in range(prefill)} | {f"decode-{n}" for n in range(decode)}
        for name in sorted(names - want):
            if (gone := groups.release(name)) is not None:
                made.remove(gone)
        made += groups.expect(kept(*sorted(want - names)))
        names = want
        held = [holder for group in made for holder in group.holders if holder is not None]
        assert sorted(held) == sorted(names)
        assert all(not group.is_empty for group in made)
        assert all(groups.slot(name).group.role is Role(name.partition("-")[0]) for name in names)
