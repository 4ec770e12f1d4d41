"""The engine benchmark: all arms compute one step, work is counted right, and a failure costs one arm. No times."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from loopline.bench.device_time import Arm, Timer, interleave
from loopline.bench.engine import EngineBench, measure
from loopline.bench.engine_arms import CUDA_ARMS, DECODE_ARMS, DecodePoint, PlainOps
from loopline.bench.engine_idle import IdleSizes, trace_figures
from loopline.bench.engine_plot import plot_engine
from loopline.bench.engine_prefill import PrefillPoint, passes
from loopline.bench.shapes import SHAPES, body_weights, config_json, prompt_flops, weight_bytes
from loopline.cli.main import app
from loopline.engine.decode_loop import compute
from loopline.errors import ConfigError
from loopline.kv.ledger import Allocation, Ledger
from loopline.model import random_model
from loopline.model_spec import Family, ModelSpec, load_model_spec

RUNNER = CliRunner()
TINY = SHAPES["tiny"]
TINY_GROUPED = replace(TINY, num_heads=4, head_dim=8)
TINY_HUGINN = replace(TINY, family=Family.HUGINN, num_prelude=1, num_coda=1, tied_head=True)
ARGUMENTS = ["bench", "engine", "tiny", "--device", "cpu", "--dtype", "fp32", "--decode", "3x20", "--prefill", "2x24"]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    bench = EngineBench(
        model="tiny",
        device="cpu",
        dtype="fp32",
        decode=((1, 16), (3, 33)),
        prefill=((2, 24), (1, 40)),
        rounds=2,
        steps=2,
        prefill_chunk=20,
        per_row_rows=16,
        idle=IdleSizes(requests=2, prompt_tokens=20, new_tokens=16, clocked_steps=3),
    )
    return measure(bench, "a test")


def test_the_report_has_every_point_and_arm(report: dict[str, Any]) -> None:
    assert [(one["rows"], one["context"]) for one in report["decode"]] == [(1, 16), (3, 33)]
    assert [(one["prompts"], one["tokens"]) for one in report["prefill"]] == [(2, 24), (1, 40)]
    assert [list(one["arms"]) for one in report["decode"]] == [["plain-eager", "engine"]] * 2
    assert [list(one["arms"]) for one in report["prefill"]] == [["packed", "per-row"], ["packed"]]
    assert set(report["decode"][0]["ratios"]) == {"plain-eager / engine", "plain-eager / floor", "engine / floor"}
    for point in report["decode"] + report["prefill"]:
        assert point["floor_ms"] > 0
        for arm in point["arms"].values():
            assert arm["rounds"] == 2 and 0 < arm["min_ms"] <= arm["median_ms"] <= arm["max_ms"]
    assert report["machine"]["command"] == "a test" and report["rates"]["copy_bytes_per_s"] > 0
    assert report["idle"]["step_ms"] > 0 and report["idle"]["trace"] is None
    assert 0 < report["idle"]["start_to_engine_s"] < report["idle"]["start_to_first_token_s"]
    assert json.loads(json.dumps(report)) == report


def test_a_floor_is_bytes_over_the_measured_rate(report: dict[str, Any]) -> None:
    point = report["decode"][1]
    token_bytes = 2 * 2 * (2 * 2 * 16 * 4)  # loops, layers; key and value of two heads of 16, fp32
    assert point["kv_bytes"] == 3 * 34 * token_bytes
    moved = point["weight_bytes"] + point["kv_bytes"]
    assert point["floor_ms"] == pytest.approx(moved / report["rates"]["copy_bytes_per_s"] * 1e3)


@pytest.mark.parametrize("spec", [TINY, TINY_GROUPED, TINY_HUGINN], ids=["ouro", "grouped", "huginn"])
@torch.inference_mode()
def test_plain_operations_over_the_contiguous_view_compute_the_engines_step(spec: ModelSpec) -> None:
    point = DecodePoint(random_model(spec), "fp32", num_rows=3, context=21)
    paged, contiguous = point.paged(), point.contiguous(lambda noted: PlainOps(planes=noted))
    inputs = point.inputs(paged)
    expected = compute(paged, inputs, point.previous, point.depth, chooses=False).logits
    blocks = paged.arena.tensor[inputs.block_tables]  # [N, blocks, planes, 2, block_size, C, d]
    in_order = blocks.permute(0, 2, 3, 1, 4, 5, 6).flatten(3, 4)[:, :, :, : point.context].clone()
    contiguous.arena.tensor.copy_(in_order)
    contiguous.arena.tensor[:, :, :, -1] = torch.nan  # of the new position, which the step writes
    got = compute(contiguous, point.inputs(contiguous), point.previous, point.depth, chooses=True)
    torch.testing.assert_close(got.logits, expected, rtol=1e-4, atol=1e-4)
    assert got.chosen is not None and got.chosen.tolist() == expected.argmax(dim=1).tolist()


@pytest.mark.parametrize("spec", [TINY, TINY_HUGINN], ids=["ouro", "huginn"])
def test_packed_and_per_row_prompts_are_the_same_prompts(spec: ModelSpec) -> None:
    point = PrefillPoint(random_model(spec), "fp32", 2, 24, chunk_tokens=20, per_row_rows=16)
    packed, per_row = point.packed(), point.per_row()
    assert packed.shape == (1, spec.vocab_size)
    torch.testing.assert_close(packed, per_row, rtol=1e-4, atol=1e-4)


def test_passes_hold_every_token_once_and_choose_once_a_prompt() -> None:
    ledger = Ledger(4, 16)
    allocations = [one for _ in range(2) if isinstance(one := ledger.reserve(10, 10), Allocation)]
    made = passes([range(10), range(10, 20)], allocations, depth=2, chunk_tokens=8)
    runs = [(run.first_position, run.token_ids, run.sampling is not None) for part in made for run in part]
    assert [sum(run.num_tokens for run in part) for part in made] == [8, 8, 4]
    assert runs == [
        (0, tuple(range(8)), False),
        (8, (8, 9), True),
        (0, tuple(range(10, 16)), False),
        (6, tuple(range(16, 20)), True),
    ]


def test_an_arm_that_fails_leaves_the_others_their_figures() -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("gone")

    arms = [Arm("bad", fails), Arm("good", lambda: None), Arm("short", lambda: None, most_rounds=1)]
    interleave(arms, Timer(torch.device("cpu")), rounds=4, calls=2)
    assert [len(arm.round_s) for arm in arms] == [1, 4, 1]
    assert arms[0].report()["error"] == "RuntimeError: gone" and len(calls) == 4
    assert "error" not in arms[1].report()


def test_idle_time_is_what_no_device_work_covers() -> None:
    events = [
        {"name": "a", "ts": 0, "dur": 50},
        {"name": "b", "ts": 20, "dur": 10},  # inside the first
        {"name": "a", "ts": 55, "dur": 45},  # after 5 us
        {"name": "c", "ts": 200, "dur": 100},  # after 100 us
    ]
    figures = trace_figures(list(reversed(events)))
    assert figures["window_ms"] == pytest.approx(0.3)
    assert figures["idle_share"] == pytest.approx(105 / 300)
    assert figures["large_gaps"] == {
        "above_us": 20.0,
        "count": 1,
        "total_ms": pytest.approx(0.1),
        "share": pytest.approx(100 / 300),
        "longest_us": 100.0,
    }
    assert figures["small_gaps"] == {"count": 1, "share": pytest.approx(5 / 300)}
    assert [one["name"] for one in figures["kernels"]] == ["c", "a", "b"]


@pytest.mark.parametrize("spec", [*SHAPES.values(), TINY_HUGINN], ids=[*SHAPES, "tiny-huginn"])
def test_a_shape_is_read_back_from_its_config(spec: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(spec)), encoding="utf-8")
    assert load_model_spec(tmp_path) == spec


def test_the_work_of_the_public_shapes_is_counted_right() -> None:
    ouro, huginn = SHAPES["ouro-1.4b"], SHAPES["huginn-0125"]
    assert weight_bytes(ouro, "bf16") == pytest.approx(10.1e9, rel=0.01)
    assert weight_bytes(huginn, "bf16") == pytest.approx(108.6e9, rel=0.01)
    assert 2 * body_weights(ouro) == pytest.approx(9.87e9, rel=0.01)
    assert 2 * body_weights(huginn) == pytest.approx(108e9, rel=0.01)
    attention = prompt_flops(ouro, 2) - 2 * prompt_flops(ouro, 1) + 2 * ouro.vocab_size * ouro.hidden_size
    assert attention == 4 * 16 * 128 * 96  # the second token sees one key more


def test_all_default_arms_exist() -> None:
    assert set(CUDA_ARMS) <= set(DECODE_ARMS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"arms": ("plain-graph",)}, "plain-graph"),
        ({"decode": ((1, 5000),)}, "1x5000"),
        ({"prefill": ((0, 5),)}, "0x5"),
        ({"dtype": "fp8"}, "fp8"),
        ({"device": "meta"}, "meta"),
        ({"model": "no-such"}, "no-such"),
    ],
)
def test_what_cannot_be_measured_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        measure(replace(EngineBench(model="tiny", device="cpu", dtype="fp32"), **change), "")


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    more = ["--rounds", "1", "--steps", "1", "--json", str(tmp_path / "report.json")]
    result = RUNNER.invoke(app, ARGUMENTS + more)
    assert result.exit_code == 0, result.output
    assert "decode 3x20" in result.stdout and "per-row" in result.stdout
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert written["model"] == {"name": "tiny", "loops": 2, "dtype": "fp32", "random_weights": True}


def test_points_that_are_no_pairs_are_named() -> None:
    result = RUNNER.invoke(app, [*ARGUMENTS, "--decode", "1x2x3"])
    assert result.exit_code == 2 and "--decode" in result.output


def test_a_picture_is_drawn(tmp_path: Path, report: dict[str, Any]) -> None:
    pytest.importorskip("matplotlib")
    plot_engine(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_it_needs_none_of_the_clusters_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('pydantic', 'yaml', 'grpc', 'tokenizers', 'jinja2', 'nixl'): sys.modules[name] = None\n"
        "import loopline.cli.bench, loopline.bench.engine"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=True, timeout=60)
