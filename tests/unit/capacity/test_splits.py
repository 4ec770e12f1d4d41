"""How workers are best split, and which link a file lets expect."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.bench.shapes import SHAPES
from loopline.capacity.links import likely_link
from loopline.capacity.plan import Plan, make_plan
from loopline.capacity.profiles import PROFILES
from loopline.capacity.splits import Rates, best_split
from loopline.capacity.workers import Workload
from loopline.config import ClusterConfig
from loopline.errors import ConfigError

H200 = PROFILES["h200"]
LOAD = Workload(prompt_tokens=1024, new_tokens=256)
FOUR: dict[str, Any] = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "launcher": {"kind": "ray"}}


def _config(**sections: Any) -> ClusterConfig:
    base: dict[str, Any] = {"model": {"path": "models/none", "dtype": "bf16"}}
    for role in ("prefill", "decode"):
        base[role] = {"device": "cuda", **sections.pop(role, {})}
    return ClusterConfig.model_validate(base | sections)


def _plan(link: str | None = None, num_workers: int | None = None, **sections: Any) -> Plan:
    return make_plan(_config(**sections), SHAPES["ouro-1.4b"], (H200, H200), LOAD, link, num_workers)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0.01, 100), st.integers(2, 40), st.integers(1, 39))
def test_no_split_serves_more_than_the_best(
    prefill: float, transfer: float, decode: float, workers: int, own: int
) -> None:
    rates = Rates(prefill=prefill, transfer=transfer, decode=decode)
    best = best_split(rates, workers, (own, 40 - own))
    assert best.prefill + best.decode == workers and min(best.prefill, best.decode) >= 1
    assert best.requests_per_s == min(rates.of(best.prefill, best.decode).values())
    others = [min(rates.of(count, workers - count).values()) for count in range(1, workers)]
    assert best.requests_per_s == max(others)
    if workers == 40 and others[own - 1] == max(others):
        assert (best.prefill, best.decode) == (own, 40 - own)


def test_the_split_is_of_the_files_workers_or_of_as_many_as_are_asked_for() -> None:
    plan = _plan(**FOUR)
    assert plan.split is not None and (plan.split.prefill, plan.split.decode) == (1, 3)
    assert plan.split.requests_per_s == pytest.approx(1.5 * plan.requests_per_s)
    more = _plan(num_workers=20, **FOUR).split
    assert more is not None and more.prefill + more.decode == 20 and more.requests_per_s > 4 * plan.requests_per_s
    with pytest.raises(ConfigError, match="workers: 1; allowed: 2 and above"):
        _plan(num_workers=1, **FOUR)


def test_workers_that_cannot_change_roles_are_not_split() -> None:
    assert _plan().split is None  # both on one GPU
    assert _plan(prefill={"device": "cuda:0"}, decode={"device": "cuda:1"}).split is not None
    config = _config(decode={"device": "cpu"})
    assert make_plan(config, SHAPES["ouro-1.4b"], (H200, PROFILES["cpu"]), LOAD).split is None


@pytest.mark.parametrize(
    ("launcher", "transfer", "link"),
    [
        ("ray", {}, "nvlink"),
        ("local", {}, "same-gpu"),
        ("local", {"error_mode": "peer"}, "tcp"),
        ("ray", {"error_mode": "peer"}, "infiniband"),
        ("ray", {"ucx": {"UCX_TLS": "cuda_copy,rc,sm,self"}}, "infiniband"),
        ("local", {"ucx": {"UCX_TLS": "cuda_copy,rc_mlx5"}}, "infiniband"),
        ("ray", {"ucx": {"UCX_TLS": "cuda_copy,tcp"}}, "tcp"),
        ("ray", {"ucx": {"UCX_TLS": "cuda_ipc,cuda_copy,rc"}}, "nvlink"),
        ("ray", {"ucx": {"UCX_TLS": "all"}}, "nvlink"),
        ("ray", {"ucx": {"UCX_TLS": "^tcp"}}, "nvlink"),
        ("ray", {"ucx": {"UCX_TLS": "^cuda_ipc"}}, "infiniband"),
        ("ray", {"ucx": {"UCX_TLS": "self"}}, "nvlink"),  # nothing is left: no link is likelier than the default
    ],
)
def test_the_likely_link_is_one_that_the_file_allows(launcher: str, transfer: dict[str, Any], link: str) -> None:
    assert likely_link(_config(launcher={"kind": launcher}, transfer=transfer), H200)[0] == link


def test_a_link_that_the_file_leaves_out_is_noted() -> None:
    sections = {"launcher": {"kind": "ray"}, "transfer": {"ucx": {"UCX_TLS": "cuda_copy,rc"}}}
    assert _plan(link="infiniband", **sections).notes == ()
    assert _plan(link="nvlink", **sections).notes == (
        "the link is nvlink, and no push can take it: UCX_TLS is cuda_copy,rc, without cuda_ipc",
    )
    assert "without tcp" in _plan(link="tcp", **sections).notes[0]
    (note,) = _plan(link="nvlink", launcher={"kind": "ray"}, transfer={"error_mode": "peer"}).notes
    assert note.endswith("with transfer.error_mode: peer UCX leaves CUDA IPC out")
