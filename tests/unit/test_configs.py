"""The configurations that ship: they load, and what they promise of sizes is so."""

from pathlib import Path

import pytest

from kvtransfer.budget import BudgetLimits
from loopline.bench.shapes import SHAPES
from loopline.config import load_config
from loopline.identity import Role
from loopline.kv.layout import KVLayout
from loopline.model_spec import load_model_spec

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
ON_CPU = [path for path in CONFIGS if path.stem.startswith("local-cpu")]
ON_GPU = [path for path in CONFIGS if path.stem.startswith("gpu-")]
PROMPT_TOKENS = 2048


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


def test_there_are_configurations() -> None:
    assert {path.stem for path in ON_CPU} >= {"local-cpu", "local-cpu-huginn", "local-cpu-2p2d", "local-cpu-unified"}
    assert {path.stem for path in ON_GPU} >= {"gpu-ouro-1.4b", "gpu-huginn-0125"}
    assert set(CONFIGS) == {*ON_CPU, *ON_GPU}
