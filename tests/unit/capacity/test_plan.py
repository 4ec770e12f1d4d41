"""The plan of a cluster: counts by hand, limits that hold rows down, rates that balance, and files of profiles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from loopline.bench.shapes import SHAPES
from loopline.capacity.geometry import Geometry
from loopline.capacity.hardware import Profile
from loopline.capacity.memory import plan_arena
from loopline.capacity.notes import size
from loopline.capacity.plan import Plan, geometry_of, make_plan, usual_workload
from loopline.capacity.profiles import PROFILES, default_profile, read_profile
from loopline.capacity.splits import small_ratio
from loopline.capacity.times import decode_time, prefill_time
from loopline.capacity.workers import Workload, pushed
from loopline.config import ClusterConfig
from loopline.errors import ConfigError

OURO, HUGINN, TINY = SHAPES["ouro-1.4b"], SHAPES["huginn-0125"], SHAPES["tiny"]
H200 = PROFILES["h200"]
BOTH = (H200, H200)
LINK = {"peak_bytes_per_s": 25e9, "bytes_per_s": 22e9, "push_s": 1e-3}
LOAD = Workload(prompt_tokens=1024, new_tokens=256)


def _config(**sections: Any) -> ClusterConfig:
    base: dict[str, Any] = {"model": {"path": "models/none", "dtype": "bf16"}}
    for role in ("prefill", "decode"):
        base[role] = {"device": "cuda"}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return ClusterConfig.model_validate(base)


def _plan(workload: Workload = LOAD, link: str | None = None, **sections: Any) -> Plan:
    return make_plan(_config(**sections), OURO, BOTH, workload, link)


@pytest.mark.parametrize("spec", [OURO, HUGINN, TINY], ids=["ouro", "huginn", "tiny"])
def test_chunks_are_all_the_work_of_the_whole_prompt(spec: Any) -> None:
    geometry = Geometry.of(spec, spec.default_loops, "bf16")
    whole = geometry.prefill_work(1, 768)
    parts = [geometry.prefill_work(1, 256, start) for start in (0, 256, 512)]
    head = 2 * geometry.head_weights  # each pass has a last position
    assert sum(part.flops for part in parts) - 2 * head == whole.flops
    assert {part.weight_bytes for part in parts} == {whole.weight_bytes}


def test_weights_are_read_once_a_loop_and_kept_once() -> None:
    geometry = Geometry.of(OURO, 4, "bf16")
    assert geometry.stored_bytes == pytest.approx(2.87e9, rel=0.01)  # 1.43e9 parameters
    assert geometry.pass_weight_bytes == 2 * (4 * 24 * geometry.layer_weights + 49152 * 2048)
    deeper = Geometry.of(OURO, 2, "bf16", max_loops=4)
    assert deeper.layout.num_planes == 96 and deeper.layer_passes == 48
    assert deeper.decode_work(1, 99).kv_bytes == 100 * deeper.layout.token_bytes // 2


def test_an_arena_takes_what_weights_and_workspace_leave() -> None:
    config = _config(decode={"memory_fraction": 0.6})
    arena = plan_arena(config.engine_settings("decode"), geometry_of(config, OURO), H200)
    assert arena.is_estimate and arena.arena_bytes is not None
    used = int(0.6 * 139 * 2**30) - arena.arena_bytes
    assert 2.87e9 + 1.6e9 < used < 2.87e9 + 1.6e9 + 2e9
    fixed = plan_arena(_config(decode={"num_blocks": 100}).engine_settings("decode"), geometry_of(config, OURO), H200)
    assert (fixed.num_blocks, fixed.tokens, fixed.is_estimate) == (100, 1600, False)
    unknown = plan_arena(config.engine_settings("decode"), geometry_of(config, OURO), PROFILES["cpu"])
    assert unknown.num_blocks is None


@pytest.mark.parametrize(
    ("decode", "rows", "limit"),
    [
        ({"num_blocks": 800, "max_running": 64}, 10, "memory"),
        ({"num_blocks": 8000, "max_running": 64}, 64, "max_running"),
        ({"num_blocks": 8000, "max_running": 64, "max_token_loops": 40}, 64, "max_running"),
        ({"num_blocks": 800, "max_running": 64, "growth_share": 0.0}, 12, "memory"),
        ({"num_blocks": 79, "max_running": 64}, 0, "memory"),
    ],
)
def test_what_holds_the_rows_down_is_named(decode: dict[str, Any], rows: int, limit: str) -> None:
    """A request of 1,280 tokens needs 80 blocks, its prompt 64."""
    plan = _plan(decode=decode).decode
    assert (plan.rows, plan.rows_limit) == (rows, limit)


def test_a_request_that_fits_nowhere_is_said_to() -> None:
    plan = _plan(replace(LOAD, rate=1.0), decode={"num_blocks": 79}, prefill={"num_blocks": 63})
    assert plan.requests_per_s == 0 and plan.ratio is None and plan.prefill_per_decode is None and plan.split is None
    assert plan.shortages == (
        "a prefill worker has 63 blocks and such a request needs 64: prefill.num_blocks is too small",
        "a decode worker has 79 blocks and such a request needs 80: decode.num_blocks is too small",
    )
    assert plan.demand is not None and plan.demand.rows is None and plan.demand.decode_workers is None
    assert plan.demand.use["decode"] is None


@given(st.integers(2**28, 2**34), st.none() | st.integers(1, 2**31), st.sampled_from(["cuda", "cpu"]))
def test_what_is_missing_for_one_request_is_just_enough(memory: int, most: int | None, device: str) -> None:
    """With the memory that is said to be missing the same request fits."""
    sections = {role: {"device": device, "max_arena_bytes": most} for role in ("prefill", "decode")}
    profiles = [H200.model_copy(update={"memory_bytes": one}) for one in (memory, 2**36)]
    few, many = (make_plan(_config(**sections), OURO, (profile, profile), LOAD) for profile in profiles)
    arena, need = few.decode.arena, 81 * few.geometry.layout.block_bytes
    assert arena.left_bytes is not None and (few.decode.fits == 0) == any(" decode " in one for one in few.shortages)
    if most is not None and most < need:
        assert many.shortages and all(one.startswith("a ") for one in many.shortages)
        assert f"decode.max_arena_bytes is {most:,}" in many.shortages[-1]
        return
    assert not many.shortages and (few.decode.fits == 0) == (arena.left_bytes < need)
    if few.decode.fits == 0:
        assert few.shortages[-1].endswith(f"{size(need - arena.left_bytes)} are missing")


def test_a_gpu_that_is_too_small_is_said_to_be() -> None:
    small = H200.model_copy(update={"memory_bytes": 3_500_000_000})
    plan = make_plan(_config(), OURO, (small, small), LOAD)
    assert plan.shortages[1] == (
        "a decode worker has no block (it would not start) and such a request needs 80: the memory of its device x "
        "decode.memory_fraction 0.8, less weights, workspace and 1.5 GiB, leaves nothing, and with one more for "
        "padding they take 972 MiB: 3.07 GiB are missing"
    )


def test_rates_are_of_steps_and_the_least_is_the_bottleneck() -> None:
    plan = _plan(prefill={"replicas": 1, "num_blocks": 2000}, decode={"replicas": 3, "num_blocks": 8000})
    geometry = plan.geometry
    step = decode_time(H200, geometry, 32, 1024 + 128)
    assert plan.decode.requests_per_s == pytest.approx(32 / step.expected_s / 255)
    assert plan.rates["decode"] == pytest.approx(3 * plan.decode.requests_per_s)
    together = prefill_time(H200, geometry, plan.prefill.prompts, 1024, plan.prefill.chunk_tokens)
    assert plan.prefill.requests_per_s == pytest.approx(plan.prefill.prompts / together.expected_s)
    assert plan.bottleneck == "decode" and plan.requests_per_s == min(plan.rates.values())
    assert plan.notes[0].endswith("; KV goes by --link same-gpu then, not nvlink")
    assert _plan(link="same-gpu").notes[0].endswith(" requests/s")
    slow = _plan(link="tcp", decode={"replicas": 3, "num_blocks": 8000})
    assert slow.bottleneck == "transfer" and slow.transfer.link == "tcp"


def test_the_ratio_balances() -> None:
    plan = _plan(prefill={"num_blocks": 2000}, decode={"num_blocks": 8000})
    assert plan.prefill_per_decode is not None and plan.ratio is not None
    prefill, decode = plan.ratio
    assert prefill / decode == pytest.approx(plan.prefill_per_decode, rel=0.15)
    a_prefill = min(plan.prefill.requests_per_s, plan.transfer.requests_per_s)
    assert plan.prefill_per_decode * a_prefill == pytest.approx(plan.decode.requests_per_s)


@given(st.floats(1e-3, 1e3))
def test_a_ratio_in_small_numbers_is_near(value: float) -> None:
    prefill, decode = small_ratio(value)
    assert min(prefill, decode) in range(1, 5)
    assert prefill / decode == pytest.approx(value, rel=0.125)
    if min(prefill, decode) > 1:  # for none with a 1 is near
        one = max(value, 1 / value)
        assert abs(round(one) - one) > 0.1 * one


def test_a_ratio_of_many_to_few_is_one_to_so_many() -> None:
    values = (4 / 53, 3 / 14, 0.25, 1, 1.5, 3.36, 17)
    ratios = [(1, 13), (1, 5), (1, 4), (1, 1), (3, 2), (7, 2), (17, 1)]
    assert [small_ratio(value) for value in values] == ratios


def test_a_rate_needs_workers_and_makes_a_batch() -> None:
    plan = _plan(replace(LOAD, rate=20.0), prefill={"num_blocks": 2000}, decode={"replicas": 4, "num_blocks": 8000})
    demand = plan.demand
    assert demand is not None and demand.rows is not None and demand.token_s is not None
    assert demand.decode_workers is not None
    assert (
        (demand.decode_workers - 1) * plan.decode.requests_per_s
        < 20
        <= demand.decode_workers * plan.decode.requests_per_s
    )
    assert demand.rows == pytest.approx(20 / 4 * 255 * demand.token_s, rel=0.2)  # Little's law
    assert demand.use["decode"] == pytest.approx(20 / plan.rates["decode"])
    few = _plan(replace(LOAD, rate=1e4), prefill={"num_blocks": 2000}, decode={"num_blocks": 8000}).demand
    assert few is not None and few.rows is None and (few.use["decode"] or 0) > 1


def test_pushes_are_whole_blocks_cut_to_the_largest() -> None:
    config = _config(transfer={"max_push_bytes": 50 * 2**20})  # four blocks of 12 MiB
    settings, geometry = config.worker_settings("prefill", "p", "").transfer, geometry_of(config, OURO)
    assert pushed(settings, geometry, 1000, 256) == (63 * 12 * 2**20, 4 + 4 + 4 + 4)
    assert pushed(settings, geometry, 16, 256) == (12 * 2**20, 1)
    assert pushed(settings, geometry, 130, 64) == (9 * 12 * 2**20, 1 + 1 + 1)


def test_what_will_not_work_as_it_looks_is_noted() -> None:
    notes = " ".join(
        make_plan(
            _config(prefill={"chunk_tokens": 512}), HUGINN, BOTH, Workload(prompt_tokens=512, new_tokens=64)
        ).notes
    )
    assert "chunks are 256 tokens and not prefill.chunk_tokens" in notes and "8,192 / 32 loops" in notes
    assert "both roles are on cuda" in notes
    assert "more than a peer's share in flight" in " ".join(
        _plan(
            transfer={"in_flight_limit_bytes": 2**27}, prefill={"device": "cuda:0"}, decode={"device": "cuda:1"}
        ).notes
    )
    assert _plan(prefill={"device": "cuda:0"}, decode={"device": "cuda:1"}).notes == ()
    greedy = {"memory_fraction": 0.9}
    assert _plan(prefill=greedy, decode=greedy).notes[1] == (
        "on one GPU memory_fraction, 0.9 and 0.9, is more than all of its memory"
    )


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload(prompt_tokens=0, new_tokens=5), "prompt tokens: 0"),
        (Workload(prompt_tokens=5, new_tokens=1), "new tokens: 1"),
        (Workload(prompt_tokens=65000, new_tokens=600), "65600; allowed: up to the context, 65536"),
        (Workload(prompt_tokens=5, new_tokens=5, rate=0.0), "rate: 0.0"),
        (Workload(prompt_tokens=5, new_tokens=5, rate=float("nan")), "rate: nan"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(workload: Workload, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _plan(workload)
    assert usual_workload(OURO) == LOAD


def test_a_link_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"link is 'carrier-pigeon'; profile h200 has: same-gpu, nvlink"):
        _plan(link="carrier-pigeon")


# ---- profiles


def _read(text: str, base: Profile = H200) -> Profile:
    return read_profile(text, base, SHAPES.__getitem__)


def test_profiles_come_along_for_every_device() -> None:
    assert {"h200", "gh200-96", "gh200-144", "cpu"} == set(PROFILES)
    assert default_profile("cpu").name == "cpu" and default_profile("cuda:1").name == "h200"
    for profile in PROFILES.values():
        assert profile.link(None)[0] == profile.default_link
        assert all(link.bytes_per_s <= link.peak_bytes_per_s for link in profile.links.values())
    gib = {name: (profile.memory_bytes or 0) / 2**30 for name, profile in PROFILES.items()}
    assert 94 <= gib["gh200-96"] <= 94.88 and 141 <= gib["gh200-144"] <= 142.5  # below what such machines show in all
    assert gib["h200"] < gib["gh200-144"]


def test_a_file_is_laid_over_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump({"base": "gh200-96", "memory_bytes": 10**11, "links": {"infiniband": LINK}}))
    profile = _read(str(file))
    assert (profile.name, profile.memory_bytes, profile.bytes_per_s) == (
        "ours",
        10**11,
        PROFILES["gh200-96"].bytes_per_s,
    )
    assert profile.links["infiniband"].bytes_per_s == 22e9 and "nvlink" in profile.links


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"bytes_per_s": -1}, "bytes_per_s is -1; allowed: a number, at least 1, at most 1e.20"),
        ({"bites": 1}, "bites: no such key; allowed: name, source, device, .*, default_link, base$"),
        ({"weights_efficiency": 1.2}, "weights_efficiency is 1.2; allowed: a number, at least 1e-09, at most 1"),
        (
            {"memory_bytes": "much"},
            "memory_bytes is 'much'; allowed: a whole number, at least 1, at most .* or null",
        ),
        (
            {"links": {"nvlink": {"bytes": 1}}},
            "peak_bytes_per_s is missing; needed: a number, at least 1",
        ),
        (
            {"links": {"x": {**LINK, "bites": 1}}},
            "links.x.bites: no such key; allowed: peak_bytes_per_s, bytes_per_s, ",
        ),
        (
            {"links": {"nvlink": {**LINK, "bytes_per_s": 3e10}}},
            "links.nvlink.bytes_per_s is 30000000000.0; allowed: up to pe",
        ),
        ({"links": [1]}, "links is .1.; allowed: a mapping of NAME to a mapping with the keys"),
        ({"flops_per_s": {"bf16": "x"}}, "flops_per_s.bf16 is 'x'; allowed: a number, at least 1"),
        ({"base": "abacus"}, "base is 'abacus'; allowed: h200"),
        ([1], "holds no mapping"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_key(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=words) as caught:
        _read(str(file))
    assert str(file) in str(caught.value)


def test_a_report_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for text, words in (
        ("{", "cannot be read"),
        (json.dumps({"rates": {}}), "machine is missing; needed: a mapping with the keys device"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            _read(str(file))
    with pytest.raises(ConfigError, match="profile is 'h300'; allowed: h200, gh200-96"):
        _read("h300")


def test_a_report_of_a_transfer_is_a_link() -> None:
    data = Path(__file__).parents[2] / "data/capacity/h200-nvlink.json"
    profile = _read(str(data), PROFILES["gh200-96"])
    name, link = profile.link(None)
    assert name == "measured" and link.bytes_per_s == pytest.approx(415e9, rel=0.01)
