"""How many answers run at once at a rate: in decode workers, and in unified ones, which compute prompts too."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.bench.shapes import SHAPES
from loopline.capacity.hardware import Profile
from loopline.capacity.plan import Plan, geometry_of, make_plan, running_rows
from loopline.capacity.profiles import PROFILES
from loopline.capacity.times import decode_time, prefill_time
from loopline.capacity.workers import Workload, mean_context
from loopline.config import ClusterConfig

LOAD = Workload(prompt_tokens=1024, new_tokens=256)
HARDWARE = {"h200": "cuda", "cpu": "cpu"}


def _config(device: str, **sections: Any) -> ClusterConfig:
    dtype = "bf16" if device == "cuda" else "fp32"
    roles = {role: {"device": device, **values} for role, values in sections.items()}
    return ClusterConfig.model_validate({"model": {"path": "models/none", "dtype": dtype}, **roles})


def _unified(profile: Profile, workload: Workload, model: str = "ouro-1.4b", **section: Any) -> Plan:
    config = _config(HARDWARE[profile.name], unified={"replicas": 1, "num_blocks": 8000, **section})
    return make_plan(config, SHAPES[model], (profile, profile), workload)


@given(
    name=st.sampled_from(sorted(HARDWARE)),
    model=st.sampled_from(["ouro-1.4b", "huginn-0125", "tiny"]),
    most=st.integers(1, 70),
    part=st.floats(0.05, 1.4),
    context=st.integers(64, 4096),
)
def test_the_least_batch_that_serves_is_found(name: str, model: str, most: int, part: float, context: int) -> None:
    """Whatever the padding of rows: no smaller batch serves, and there is one whenever any batch does."""
    profile = PROFILES[name]
    geometry = geometry_of(_config(HARDWARE[name]), SHAPES[model])

    def step_s(rows: int) -> float:
        return decode_time(profile, geometry, rows, context).expected_s

    rate = part * most / step_s(most)
    serving = [rows for rows in range(1, most + 1) if rate * step_s(rows) <= rows]
    found = running_rows(rate, most, step_s)
    assert (found is None) == (not serving)
    if found is not None:
        assert serving[0] - 1 < found <= serving[0]


def test_one_row_more_than_a_tile_hides_no_batch_that_serves() -> None:
    """On a CPU nine rows take what sixteen take; eight make more tokens than nine, and the note says so."""
    profile, config = PROFILES["cpu"], _config("cpu", decode={"num_blocks": 8000, "max_running": 9})
    full = make_plan(config, SHAPES["ouro-1.4b"], (profile, profile), LOAD)
    assert full.decode.whole_tiles_per_s > full.decode.tokens_per_s
    rate = (full.decode.whole_tiles_per_s + full.decode.tokens_per_s) / 2 / (LOAD.new_tokens - 1)
    plan = make_plan(config, SHAPES["ouro-1.4b"], (profile, profile), replace(LOAD, rate=rate))
    assert plan.demand is not None and plan.demand.rows is not None and 6 < plan.demand.rows <= 8
    (note,) = plan.notes
    assert note.startswith("9 rows make ") and note.endswith("decode.max_running: 8 keeps to whole ones")
    whole = _config("cpu", decode={"num_blocks": 8000, "max_running": 8})
    assert make_plan(whole, SHAPES["ouro-1.4b"], (profile, profile), LOAD).notes == ()


@given(
    name=st.sampled_from(sorted(HARDWARE)),
    model=st.sampled_from(["ouro-1.4b", "huginn-0125"]),
    running=st.sampled_from([1, 2, 8, 16, 64]),
    prompt=st.integers(16, 2048),
    new=st.integers(2, 1024),
    part=st.floats(0.05, 0.999),
)
def test_unified_workers_keep_what_they_promise(
    name: str, model: str, running: int, prompt: int, new: int, part: float
) -> None:
    """At a part of what they serve, the batch of Little's law makes its tokens in the time that prompts leave."""
    profile, load = PROFILES[name], Workload(prompt_tokens=prompt, new_tokens=new)
    section = {"max_running": running, "num_blocks": 100_000}
    rate = part * _unified(profile, load, model, **section).requests_per_s
    plan = _unified(profile, replace(load, rate=rate), model, **section)
    assert plan.demand is not None and plan.demand.rows is not None and plan.demand.token_s is not None
    assert plan.demand.use["unified"] == pytest.approx(part)
    batch = -(-plan.demand.rows // 1)
    step_s = decode_time(profile, plan.geometry, int(batch), mean_context(load)).expected_s
    steps_part = rate * (new - 1) / batch * step_s  # of the device's time, were the batch always whole
    assert rate / plan.prefill.requests_per_s + steps_part <= 1 + 1e-9
    assert plan.demand.rows == pytest.approx(rate * (new - 1) * plan.demand.token_s)


def test_near_what_it_serves_a_unified_worker_is_nearly_full() -> None:
    """The time of prompts counts: steps alone would make it 28 of 64 rows."""
    served = _unified(PROFILES["h200"], LOAD, max_running=64).requests_per_s
    plan = _unified(PROFILES["h200"], replace(LOAD, rate=0.99 * served), max_running=64)
    assert plan.demand is not None and plan.demand.rows is not None and plan.demand.token_s is not None
    assert 55 < plan.demand.rows <= 64
    assert plan.demand.token_s > 1.2 * plan.decode.full.expected_s
    more = _unified(PROFILES["h200"], replace(LOAD, rate=1.01 * served), max_running=64)
    assert more.demand is not None and more.demand.rows is None
    far_more = _unified(PROFILES["h200"], replace(LOAD, rate=100 * served), max_running=64)
    assert far_more.demand is not None and far_more.demand.rows is None


def test_prompts_of_a_unified_worker_hold_blocks_for_their_answers_and_keep_to_their_share() -> None:
    plan = _unified(PROFILES["cpu"], LOAD, num_blocks=320, max_running=32)
    assert plan.prefill.fits == plan.decode.fits == 4  # 80 blocks each
    assert (plan.prefill.prompts, plan.prefill.chunk_tokens) == (1, 256)
    wide = _unified(PROFILES["cpu"], LOAD, num_blocks=320, prefill_share_tokens=512)
    assert (wide.prefill.prompts, wide.prefill.chunk_tokens) == (2, 256)
    narrow = _unified(PROFILES["cpu"], LOAD, num_blocks=320, prefill_share_tokens=64)
    assert (narrow.prefill.prompts, narrow.prefill.chunk_tokens) == (1, 64)
    one = prefill_time(PROFILES["cpu"], narrow.geometry, 1, 1024, 64)
    assert narrow.prefill.requests_per_s == pytest.approx(1 / one.expected_s)


def test_a_request_that_fits_no_unified_worker_is_said_to() -> None:
    plan = _unified(PROFILES["h200"], replace(LOAD, rate=1.0), num_blocks=79)
    assert plan.notes == () and plan.shortages == (
        "a unified worker has 79 blocks and such a request needs 80: unified.num_blocks is too small",
    )
    assert plan.requests_per_s == 0 and plan.demand is not None and plan.demand.rows is None


def test_of_very_many_rows_few_are_looked_at() -> None:
    looked: list[int] = []

    def step_s(rows: int) -> float:
        looked.append(rows)
        return 0.01 + rows * 1e-6

    found = running_rows(900_000.0, 10**6, step_s)
    assert found == pytest.approx(90_000, rel=1e-3) and len(looked) < 200
    assert running_rows(1e7, 10**6, step_s) is None and len(looked) < 400
    assert running_rows(1.0, 10**6, lambda rows: float("inf")) is None
