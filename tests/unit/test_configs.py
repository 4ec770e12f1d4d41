"""The configurations that ship: they load, and a request of the model's whole context fits every worker."""

from pathlib import Path

import pytest

from loopline.config import load_config
from loopline.kv.layout import KVLayout
from loopline.model_spec import load_model_spec

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("local-cpu*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_fits_its_model(path: Path) -> None:
    config = load_config(path)
    spec = load_model_spec(config.model.path)
    layout = KVLayout.from_spec(spec, spec.default_loops, config.kv.block_size, config.model.dtype)
    for group in (config.prefill, config.decode):
        assert group.num_blocks is not None
        assert group.num_blocks >= layout.blocks_for(spec.context_tokens)
        assert group.num_blocks * layout.block_bytes <= 256 * 2**20


def test_there_are_configurations() -> None:
    assert {path.stem for path in CONFIGS} >= {"local-cpu", "local-cpu-huginn", "local-cpu-2p2d"}
