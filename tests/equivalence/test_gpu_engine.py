"""The engine on CUDA: graphs against eager steps, fused loops against one loop at a time, prompts both ways, and what a
row's result may depend on."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.ops import DecodePlan
from loopline.engine.assembly import DeviceParts, build_parts
from loopline.engine.batch import DecodeColumns, RequestColumns
from loopline.engine.decode_loop import compute
from loopline.engine.forward import PagedAttention, PlaneTable, Rows
from loopline.engine.graphs import GraphDecode, buckets_up_to
from loopline.engine.local import LocalEngine
from loopline.engine.packed_loop import GraphPacked
from loopline.kv.arena import allocate_arena
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Ledger
from loopline.model import random_model
from loopline.model.noise import initial_state
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.request import Request, SamplingParams
from loopline.sched.plan import RowRun
from loopline.settings import EngineSettings, SchedulerSettings
from tests.support.golden import MODELS, TRAINED

pytestmark = pytest.mark.gpu
BLOCK_SIZE, MAX_ROWS, LENGTH, REPEATS = 16, 32, 100, 100


def spec_of(name: str) -> ModelSpec:
    """A trained tiny model's geometry, with heads as wide as its big sister's."""
    spec = load_model_spec(MODELS / name)
    width, heads, head_dim = (512, 4, 128) if name == "tiny-ouro" else (480, 5, 96)
    return replace(
        spec, hidden_size=width, num_heads=heads, num_kv_heads=heads, head_dim=head_dim, intermediate_size=1408
    )


class Bench:
    """Decode rows of random prompts over one arena: row i has its own blocks, whose KV is random."""

    def __init__(self, name: str, dtype: str, *, replays: bool = True) -> None:
        spec = spec_of(name)
        self.model = random_model(spec, "cuda", dtype, seed=3)
        self.layout = KVLayout.from_spec(spec, spec.default_loops, BLOCK_SIZE, dtype)
        self.blocks_per_row = LENGTH // BLOCK_SIZE + 2
        arena = allocate_arena(self.layout, MAX_ROWS * self.blocks_per_row, "cuda")
        torch.manual_seed(5)
        arena.tensor.normal_()
        self.arena = arena
        self.depth = spec.default_loops
        settings = EngineSettings(
            model_path="", device="cuda", cuda_graphs=replays, scheduler=SchedulerSettings(max_running=MAX_ROWS)
        )
        self.ledger = Ledger(arena.num_blocks, BLOCK_SIZE)
        self.parts: DeviceParts = build_parts(settings, self.model, arena, self.ledger, None)
        self.tables = np.random.default_rng(1).permutation(arena.num_blocks).reshape(MAX_ROWS, -1)

    def columns(self, rows: Sequence[int], positions: Sequence[int]) -> DecodeColumns:
        at = np.array(positions, np.int64)
        tables = self.tables[list(rows)].astype(np.int64)
        blocks = tables[np.arange(len(at)), at // BLOCK_SIZE]
        params = [SamplingParams(seed=row, temperature=0.8 if row % 2 else 0.0) for row in rows]
        return DecodeColumns(
            token_ids=np.array([7 * row % 200 for row in rows], np.int64),
            sources=np.full(len(at), -1, np.int64),
            positions=at,
            slots=blocks * BLOCK_SIZE + at % BLOCK_SIZE,
            request=RequestColumns.of(params),
            tables=tables,
        )

    def run(self, columns: DecodeColumns) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            output = self.parts.decode.run(columns, self.depth, self.parts.previous)
        assert output.chosen is not None
        return output.logits.clone(), output.chosen.clone()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_replay_equals_eager_bit_for_bit_at_every_bucket(name: str, dtype: str) -> None:
    replayed, eager = Bench(name, dtype), Bench(name, dtype, replays=False)
    for bucket in buckets_up_to(MAX_ROWS):
        columns = replayed.columns(range(bucket), [LENGTH - row for row in range(bucket)])
        expected = eager.run(columns)
        assert torch.isfinite(expected[0]).all()
        for _ in range(REPEATS):
            logits, chosen = replayed.run(columns)
            assert torch.equal(logits, expected[0])
            assert torch.equal(chosen, expected[1])
        assert torch.equal(replayed.arena.tensor[:-1], eager.arena.tensor[:-1])  # all but the null block


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_fused_loops_equal_one_loop_at_a_time(name: str, dtype: str) -> None:
    fused, unfused = Bench(name, dtype), Bench(name, dtype)
    assert isinstance(unfused.parts.decode, GraphDecode)
    for bucket in (1, 4, 32):
        columns = fused.columns(range(bucket), [LENGTH - row for row in range(bucket)])
        logits, _ = fused.run(columns)
        device = torch.device("cuda")
        rows = Rows(
            token_ids=torch.tensor(columns.token_ids, device=device),
            positions=torch.tensor(columns.positions, device=device),
            slots=torch.tensor(columns.slots, device=device),
            seeds=torch.tensor(columns.request.seeds, device=device),
            zeros=torch.zeros(bucket, dtype=torch.bool, device=device),
            plan=DecodePlan(
                torch.tensor(columns.positions, device=device), torch.tensor(columns.tables, device=device)
            ),
        )
        model = unfused.model
        with torch.inference_mode():
            planes = PlaneTable(unfused.layout.num_planes, device)
            attention = PagedAttention(model, unfused.arena, planes, rows)
            e = model.prelude(rows.token_ids, attention)
            noise = None
            if model.uses_initial_state:
                noise = initial_state(model.ops, rows.seeds, rows.positions, rows.zeros, e)
            state = model.first_state(e, noise)
            for loop in range(unfused.depth):
                torch.cuda.synchronize()
                state = model.core_step(loop, state, e, attention)
            torch.cuda.synchronize()
            expected = model.head(model.coda(state, attention))
        assert torch.equal(logits, expected)
        assert torch.equal(fused.arena.tensor[:-1], unfused.arena.tensor[:-1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_rows_result_does_not_depend_on_its_batch_at_one_bucket(name: str, dtype: str) -> None:
    bench = Bench(name, dtype)
    rng = np.random.default_rng(9)
    alone: dict[int, tuple[Tensor, Tensor]] = {}
    for row in range(5):
        others = [row, *range(20, 31)]  # 12 rows: the bucket of 16
        logits, chosen = bench.run(bench.columns(others, [LENGTH - row, *range(50, 61)]))
        alone[row] = (logits[0], chosen[0])
    for _ in range(20):
        count = int(rng.integers(9, 17))
        others = [int(one) for one in rng.permutation(np.arange(5, MAX_ROWS))[: count - 1]]
        row, place = int(rng.integers(0, 5)), int(rng.integers(0, count))
        rows = [*others[:place], row, *others[place:]]
        positions = [LENGTH - row if one == row else int(rng.integers(0, LENGTH)) for one in rows]
        logits, chosen = bench.run(bench.columns(rows, positions))
        assert torch.equal(logits[place], alone[row][0])
        assert torch.equal(chosen[place], alone[row][1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_prompt_graph_equals_the_same_rows_launched_one_by_one(name: str, dtype: str) -> None:
    replayed, eager = Bench(name, dtype), Bench(name, dtype, replays=False)
    assert isinstance(replayed.parts.packed, GraphPacked)
    for counts in ((64,), (60, 3, 1), (100, 28), (40, 40, 40, 8)):  # whole buckets: the same products in both
        hidden = []
        for bench in (replayed, eager):
            allocations = [bench.ledger.reserve(count, count) for count in counts]
            runs = []
            for number, (count, allocation) in enumerate(zip(counts, allocations, strict=True)):
                assert allocation is not None
                prompt = tuple(np.random.default_rng([7, number]).integers(0, 200, count).tolist())
                params = SamplingParams(loops=bench.depth, seed=number)
                runs.append(RowRun(f"r{number}", allocation, params, 0, prompt, None))
            with torch.inference_mode():
                hidden.append(bench.parts.packed.run(runs, bench.depth).hidden[: sum(counts)].clone())
            for allocation in allocations:
                bench.ledger.release(allocation)
        assert torch.isfinite(hidden[1]).all()
        assert torch.equal(*hidden)
        assert torch.equal(replayed.arena.tensor[:-1], eager.arena.tensor[:-1])


def test_padding_rows_write_the_null_block_alone() -> None:
    bench = Bench("tiny-ouro", "bf16")
    before = bench.arena.tensor.clone()
    columns = bench.columns([0, 1, 2], [40, 41, 42])
    bench.run(columns)
    changed = (bench.arena.tensor != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) - {bench.arena.null_block} == set((columns.slots // BLOCK_SIZE).tolist())


def test_a_token_from_the_step_before_is_the_token_itself() -> None:
    bench = Bench("tiny-ouro", "fp32")
    known = bench.columns(range(3), [40, 41, 42])
    expected, _ = bench.run(known)
    bench.parts.previous[:3] = torch.tensor([99, *known.token_ids[[2, 0]].tolist()], device="cuda")
    carried = replace(known, token_ids=np.array([0, known.token_ids[1], 0]), sources=np.array([2, -1, 1]))
    logits, _ = bench.run(carried)
    assert torch.equal(logits, expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_compute_needs_nothing_of_the_host() -> None:
    """A captured step may not wait for the device; an eager one of the same code raises here where it would."""
    bench = Bench("tiny-huginn", "bf16", replays=False)
    columns = bench.columns(range(4), [40, 41, 42, 43])
    bench.run(columns)
    decode = bench.parts.decode
    assert isinstance(decode, GraphDecode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            compute(bench.parts.forward, decode._inputs(4), bench.parts.previous, bench.depth, chooses=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requests(count: int, max_tokens: int, temperature: float) -> list[Request]:
    rng = np.random.default_rng(4)
    return [
        Request(
            request_id=f"r{index}",
            prompt_ids=tuple(rng.integers(1, 200, int(rng.integers(1, 90))).tolist()),
            params=SamplingParams(
                max_tokens=max_tokens - index % 5, loops=4, seed=index, temperature=temperature, stop_ids=(3, 77)
            ),
        )
        for index in range(count)
    ]


def answers(one: EngineSettings, asked: Sequence[Request]) -> dict[str, list[int | None]]:
    engine = LocalEngine(one)
    rows = engine.generate_all(asked)
    engine.close()
    return {name: [row.token_id for row in answer] for name, answer in rows.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", TRAINED)
def test_settings_that_change_no_token_in_fp32(name: str, temperature: float) -> None:
    settings = EngineSettings(
        model_path=str(MODELS / name),
        device="cuda",
        dtype="fp32",
        num_blocks=400,
        scheduler=SchedulerSettings(max_running=8, chunk_tokens=32, steps_ahead=1),
    )
    asked = requests(20, 40, temperature)
    expected = answers(replace(settings, device="cpu", scheduler=replace(settings.scheduler, steps_ahead=0)), asked)
    for other in (
        settings,
        replace(settings, scheduler=replace(settings.scheduler, steps_ahead=0)),
        replace(settings, cuda_graphs=False),
        replace(settings, prefill="per_row"),
        replace(settings, prefill="packed"),
    ):
        assert answers(other, asked) == expected


def test_position_keyed_noise_and_shared_prefixes_change_no_token_in_fp32() -> None:
    """A CPU without a cache, and a GPU with one: graphs and not, prompts both ways, each request with its own seed."""
    settings = EngineSettings(
        model_path=str(MODELS / "tiny-huginn"),
        dtype="fp32",
        num_blocks=400,
        noise_key="position",
        noise_seed=2**63 + 1,
        prefix_cache="off",
        scheduler=SchedulerSettings(max_running=8, chunk_tokens=32),
    )
    first = requests(10, 30, 0.0)
    said = answers(settings, first)
    turns = [
        replace(one, request_id=f"{one.request_id}b", prompt_ids=(*one.prompt_ids, *known(said[one.request_id]), 5, 6))
        for one in first
    ]
    said |= answers(settings, turns)
    on_gpu = replace(settings, device="cuda", prefix_cache="on", scheduler=replace(settings.scheduler, steps_ahead=1))
    for changes in ({}, {"cuda_graphs": False}, {"prefill": "per_row"}, {"prefill": "packed"}):
        engine = LocalEngine(replace(on_gpu, **changes))  # type: ignore[arg-type]
        rows = engine.generate_all(first)
        assert all(engine.find_cached(one) for one in turns if len(one.prompt_ids) > 2 * BLOCK_SIZE)
        rows |= engine.generate_all(turns)
        assert {name: [row.token_id for row in answer] for name, answer in rows.items()} == said
        engine.close()


def known(tokens: Sequence[int | None]) -> list[int]:
    return [token for token in tokens if token is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models_pass_the_accuracy_gate(name: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(model_path=str(MODELS / name), device="cuda", dtype=dtype, num_blocks=100)
    with caplog.at_level("INFO", logger="loopline.engine.accuracy_gate"):
        LocalEngine(settings).close()
    assert [record.levelname for record in caplog.records] == ["INFO"], caplog.text
    assert "packed" in caplog.text


def test_memory_is_measured_and_the_arena_takes_the_rest(tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    settings = EngineSettings(
        model_path=str(MODELS / "tiny-ouro"),
        device="cuda",
        memory_fraction=0.3,
        scheduler=SchedulerSettings(max_running=100_000),
    )
    with pytest.raises(Exception, match="lower"):
        LocalEngine(replace(settings, memory_fraction=1e-6, scheduler=SchedulerSettings(max_running=8)))
    config = json.loads((MODELS / "tiny-ouro" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    roomy = SchedulerSettings(max_running=256)
    engine = LocalEngine(
        replace(settings, model_path=str(tmp_path), load_format="dummy", max_arena_bytes=None, scheduler=roomy)
    )
    assert 0.1 * total < engine.arena.num_bytes < 0.3 * total
    engine.close()
