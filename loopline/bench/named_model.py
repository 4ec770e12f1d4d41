"""The model that a bench is asked for: a checkpoint folder, or the name of a shape in `loopline.bench.shapes`."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loopline.bench.shapes import SHAPES, config_json
from loopline.errors import ConfigError
from loopline.model_spec import ModelSpec, load_model_spec


def spec_of(model: str) -> ModelSpec:
    """Its shape. Raises ConfigError for what is neither."""
    if model in SHAPES:
        return SHAPES[model]
    if not Path(model).is_dir():
        raise ConfigError(f"model is {model!r}; allowed: a checkpoint folder, {', '.join(SHAPES)}")
    return load_model_spec(model)


def is_random(model: str, random_weights: bool) -> bool:
    """Whether its weights are made up: a named shape has no others, of a folder they may be asked for."""
    return random_weights or model in SHAPES


@contextmanager
def folder_of(model: str) -> Iterator[Path]:
    """The checkpoint folder; of a named shape one with its config.json, for as long as it is needed."""
    if model not in SHAPES:
        yield Path(model)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_json(SHAPES[model])), encoding="utf-8")
        yield Path(folder)
