"""The configurations that ship: they load, and what they promise of sizes is so."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtransfer.budget import BudgetLimits
from loopline.bench.shapes import SHAPES
from loopline.cli.main import app
from loopline.config import load_config
from loopline.identity import Role
from loopline.kv.layout import KVLayout
from loopline.model_spec import load_model_spec

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
ON_CPU = [path for path in CONFIGS if path.stem.startswith("local-cpu")]
ON_GPU = [path for path in CONFIGS if path.stem.startswith("gpu-")]
ON_GH200 = [path for path in CONFIGS if path.stem.startswith("gh200-")]
PROMPT_TOKENS = 2048
RUNNER = CliRunner()


@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.stem)
def test_on_a_cpu_a_request_of_the_whole_context_fits_every_worker(path: Path) -> None:
    config = load_config(path)
    spec = load_model_spec(config.model.path)
    layout = KVLayout.from_spec(spec, spec.default_loops, config.kv.block_size, config.model.dtype)
    groups = [config.group(role) for role in Role if config.group(role).replicas]
    assert groups
    for group in groups:
        assert group.num_blocks is not None
        assert group.num_blocks >= layout.blocks_for(spec.context_tokens)
        assert group.num_blocks * layout.block_bytes <= 256 * 2**20


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.stem)
def test_on_a_gpu_workers_share_it_and_a_prompt_fits_the_budget(path: Path) -> None:
    """The checkpoint itself is not shipped: the folder's name is the shape's."""
    config = load_config(path)
    spec = SHAPES[Path(config.model.path).name]
    layout = KVLayout.from_spec(spec, spec.default_loops, config.kv.block_size, config.model.dtype)
    groups = (config.prefill, config.decode)
    assert all(group.device == "cuda" and group.num_blocks is None for group in groups)
    assert sum(group.memory_fraction for group in groups) <= 0.9
    assert config.prefill.chunk_tokens * spec.default_loops <= config.prefill.max_token_loops
    assert config.decode.max_running * spec.default_loops <= config.decode.max_token_loops
    limits = BudgetLimits.of(config.worker_settings("prefill", "p", "127.0.0.1:1").transfer)
    assert layout.blocks_for(PROMPT_TOKENS) * layout.block_bytes <= limits.peer_bytes
    assert layout.block_bytes <= limits.push_bytes


@pytest.mark.parametrize("path", ON_GH200, ids=lambda path: path.stem)
def test_on_gh200_the_name_says_the_workers_and_a_prompt_fits_the_budget(path: Path) -> None:
    config = load_config(path)
    assert config.launcher.kind == "ray"  # who places workers on several nodes, or gives each a GPU of its own
    prefill, decode = (int(count) for count in re.findall(r"(\d+)[pd]", path.stem))
    assert (config.prefill.replicas, config.decode.replicas) == (prefill, decode)
    spec = SHAPES[Path(config.model.path).name]
    layout = KVLayout.from_spec(spec, spec.default_loops, config.kv.block_size, config.model.dtype)
    assert config.prefill.chunk_tokens * spec.default_loops <= config.prefill.max_token_loops
    assert config.decode.max_running * spec.default_loops <= config.decode.max_token_loops
    limits = BudgetLimits.of(config.worker_settings("prefill", "p", "127.0.0.1:1").transfer)
    assert layout.blocks_for(PROMPT_TOKENS) * layout.block_bytes <= limits.peer_bytes
    assert layout.block_bytes <= limits.push_bytes
    uses_nvlink = "cuda_ipc" in config.transfer.ucx["UCX_TLS"].split(",")
    assert uses_nvlink == (config.transfer.error_mode == "none")  # with peer UCX leaves CUDA IPC out
    assert "tcp" not in config.transfer.ucx["UCX_TLS"]


@pytest.mark.parametrize("path", ON_GH200, ids=lambda path: path.stem)
def test_on_gh200_each_ucx_setting_has_its_reason_above(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    settings = [number for number, line in enumerate(lines) if line.startswith("    UCX_")]
    assert len(settings) == 3
    assert all(lines[number - 1].startswith("    # ") for number in settings)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_has_a_plan_without_a_fault(path: Path) -> None:
    """`loopline check` on the hardware that each is for: requests fit, in numbers that its comments speak of."""
    names = [None, "gh200-144"] if path in ON_GH200 else [None]
    for name in names:
        arguments = ["check", str(path), "--json", "--rate", "0.5", *([] if name is None else ["--profile", name])]
        result = RUNNER.invoke(app, arguments)
        assert result.exit_code == 0, result.output
        plan = json.loads(result.output)
        assert plan["shortages"] == [] and (not plan["assumed"]) == (path not in ON_GPU)
        assert plan["requests_per_s"] > 0 and plan["bottleneck"] in ("prefill", "transfer", "decode", "unified")
        settings = [note for note in plan["notes"] if note.startswith("kv.prefix_cache is auto, and nothing is cached")]
        shared = [note for note in plan["notes"] if note.startswith("both roles are on cuda")]
        assert plan["notes"] == [*shared, *settings]
        assert bool(shared) == (path in ON_GPU) and (not settings or "huginn" in path.stem)
        if path in ON_GH200:
            config, workers = load_config(path), plan["workers"]
            assert plan["profiles"]["decode"]["name"] == (name or "gh200-96")
            assert plan["transfer"]["link"] == ("nvlink" if "2p2d" in path.stem else "infiniband")
            assert workers["prefill"]["fits"] == config.prefill.max_running
            assert plan["steps"]["decode"]["rows"] == config.decode.max_running


def test_there_are_configurations() -> None:
    assert {path.stem for path in ON_CPU} >= {"local-cpu", "local-cpu-huginn", "local-cpu-2p2d", "local-cpu-unified"}
    assert {path.stem for path in ON_GPU} >= {"gpu-ouro-1.4b", "gpu-huginn-0125"}
    shapes = [f"{workers}-{model}" for workers in ("1p1d", "2p2d", "4p8d") for model in ("ouro", "huginn")]
    assert {path.stem for path in ON_GH200} == {f"gh200-{shape}" for shape in shapes}
    assert set(CONFIGS) == {*ON_CPU, *ON_GPU, *ON_GH200}
