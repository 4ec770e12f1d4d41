"""What the planner says of memory beside what engines and schedulers really do, and beside what one H200 has held."""

import dataclasses
import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from loopline.bench.shapes import SHAPES, config_json
from loopline.capacity.geometry import Geometry
from loopline.capacity.memory import plan_arena
from loopline.capacity.plan import geometry_of
from loopline.capacity.profiles import PROFILES
from loopline.capacity.workers import Workload, plan_decode, plan_prefill
from loopline.config import ClusterConfig
from loopline.engine.capacity import blocks_for_arena, free_bytes
from loopline.engine.local import LocalEngine
from loopline.errors import ConfigError
from loopline.kv.arena_size import blocks_that_fit
from loopline.kv.ledger import Ledger
from loopline.model_spec import load_model_spec
from loopline.request import Request, SamplingParams
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from tests.support.scheduling import ScriptedEngine

MODELS = Path(__file__).parents[3] / "configs/models"
MOST_ARENA = 64 * 2**20


def _config(path: str = "models/none", dtype: str = "bf16", **decode: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"path": path, "dtype": dtype}, "decode": decode})


@given(
    memory=st.integers(0, 2**38),
    most=st.none() | st.integers(1, 2**37),
    running=st.integers(1, 300),
    name=st.sampled_from(["ouro-1.4b", "huginn-0125", "tiny"]),
)
def test_blocks_fill_the_memory_and_are_never_more_than_requests_could_use(
    memory: int, most: int | None, running: int, name: str
) -> None:
    config, spec = _config(device="cuda", max_arena_bytes=most, max_running=running), SHAPES[name]
    settings, layout = config.engine_settings("decode"), geometry_of(config, SHAPES[name]).layout
    count = blocks_that_fit(settings, layout, spec.context_tokens, memory)
    left, useful = min(memory, most or memory), running * layout.blocks_for(spec.context_tokens)
    assert count == 0 or ((count + 1) * layout.block_bytes <= left and count <= useful)
    assert count == useful or (count + 2) * layout.block_bytes > left
    if count:
        assert blocks_for_arena(settings, layout, spec.context_tokens, memory) == count
        return
    with pytest.raises(ConfigError, match=f"{left} bytes of cuda memory are left"):
        blocks_for_arena(settings, layout, spec.context_tokens, memory)


@pytest.mark.parametrize("model", ["tiny-ouro", "tiny-huginn"])
def test_an_engine_gets_the_arena_that_was_planned_and_has_the_weights(model: str) -> None:
    """A whole engine on this CPU, which has more memory than the arena may take."""
    config = _config(str(MODELS / model), "fp32", max_arena_bytes=MOST_ARENA, max_running=8)
    settings, geometry = config.engine_settings("decode"), geometry_of(config, load_model_spec(MODELS / model))
    planned = plan_arena(settings, geometry, PROFILES["cpu"].model_copy(update={"memory_bytes": 2**33}))
    engine = LocalEngine(settings)
    found = engine.arena.num_blocks, engine.arena.num_bytes
    engine.close()
    assert (planned.num_blocks, planned.arena_bytes) == found and planned.is_estimate
    assert MOST_ARENA - geometry.layout.block_bytes < found[1] <= MOST_ARENA
    with safe_open(MODELS / model / "model.safetensors", "numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  # it is no mapping
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    assert geometry.stored_bytes == pytest.approx(4 * matrices, rel=0.001)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["ouro-1.4b", "huginn-0125"])
def test_a_gpu_engine_gets_about_the_arena_that_was_planned(shape: str, tmp_path: Path) -> None:
    """Of the memory that is free on this GPU now; weights and workspace are measured there and estimated here."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(SHAPES[shape])), encoding="utf-8")
    config = _config(str(tmp_path), device="cuda", memory_fraction=0.6, max_running=32)
    settings = dataclasses.replace(config.engine_settings("decode"), load_format="dummy")
    free = {"memory_bytes": free_bytes("cuda")}
    planned = plan_arena(settings, geometry_of(config, SHAPES[shape]), PROFILES["h200"].model_copy(update=free))
    engine = LocalEngine(settings)
    found = engine.arena.num_blocks, engine.arena.num_bytes
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()  # for the next one
    assert planned.num_blocks == pytest.approx(found[0], rel=0.25), (planned, found)


@given(
    num_blocks=st.integers(1, 600),
    running=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    prompt=st.integers(1, 400),
    new=st.integers(2, 200),
)
def test_as_many_requests_fit_as_a_scheduler_lets_in(
    num_blocks: int, running: int, share: float, prompt: int, new: int
) -> None:
    config = _config(num_blocks=num_blocks, max_running=running, growth_share=share)
    settings, workload = config.engine_settings("decode"), Workload(prompt_tokens=prompt, new_tokens=new)
    plan = plan_decode(settings, geometry_of(config, SHAPES["tiny"]), PROFILES["h200"], workload)
    ledger = Ledger(num_blocks, settings.block_size)
    roomy = dataclasses.replace(settings.scheduler, max_token_loops=2**20, chunk_tokens=512, max_waiting=64)
    scheduler = Scheduler(ledger, roomy, UnifiedPolicy())
    for number in range(running + 2):
        params = SamplingParams(max_tokens=new, loops=2, seed=number)
        prompt_ids = tuple(range(number * 500, number * 500 + prompt))  # nothing of it is shared
        scheduler.submit(Request(request_id=str(number), prompt_ids=prompt_ids, params=params))
    step = scheduler.plan()
    assert len({run.request_id for run in step.runs} if step is not None else ()) == plan.fits


@given(
    loops=st.sampled_from([2, 4]),
    most=st.integers(1, 200),
    running=st.integers(1, 6),
    blocks=st.integers(40, 200),
    prompt=st.integers(1, 60),
)
def test_as_many_rows_decode_as_in_a_scheduler_and_chunks_are_its_own(
    loops: int, most: int, running: int, blocks: int, prompt: int
) -> None:
    """Whatever few token-loops a step has: rows that decode run in any case, and prompts progress beside them."""
    config = _config(num_blocks=blocks, max_running=running, max_token_loops=most, chunk_tokens=32)
    settings, workload = config.engine_settings("decode"), Workload(prompt_tokens=prompt, new_tokens=400)
    geometry = Geometry.of(SHAPES["tiny"], loops, "bf16")
    plan = plan_decode(settings, geometry, PROFILES["h200"], workload)
    scheduler = Scheduler(Ledger(blocks, settings.block_size), settings.scheduler, UnifiedPolicy())
    for number in range(running):
        params = SamplingParams(max_tokens=400, loops=loops, seed=number)
        prompt_ids = tuple(range(number * 500, number * 500 + prompt))
        scheduler.submit(Request(request_id=str(number), prompt_ids=prompt_ids, params=params))
    engine = ScriptedEngine(scheduler, 0)
    for _ in range(200):
        engine.step()
    rows = [sum(len(one.decode) for one in step.segments if one.decode is not None) for step in engine.plans]
    assert max(rows, default=0) == plan.rows
    alone = plan_prefill(settings, geometry, PROFILES["h200"], workload)
    if engine.plans:
        assert engine.plans[0].segments[0].runs[0].num_tokens == min(prompt, alone.chunk_tokens)


def test_the_planned_h200_holds_what_one_held() -> None:
    """Conversations of docs/performance.md: Huginn's 85.6 GB of KV were 0.9 of an arena, with prompt steps of 2,048
    tokens. Nor is an arena planned that its memory, 143,771 MiB, could not hold with the weights."""
    config = _config(device="cuda", memory_fraction=0.95, max_running=32, chunk_tokens=256, max_token_loops=65536)
    arena = plan_arena(config.engine_settings("decode"), geometry_of(config, SHAPES["huginn-0125"]), PROFILES["h200"])
    assert arena.arena_bytes is not None and 85.6e9 / 0.9 < arena.arena_bytes < 143_771 * 2**20 - 7.13e9
