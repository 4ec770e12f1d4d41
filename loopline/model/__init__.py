"""Looped models: checkpoints loaded into immutable models whose loop is driven from outside. See
`loopline.model.layers`.

Called by the engine and by tests and benches; knows nothing of requests, blocks or workers.
"""

from pathlib import Path

import torch
from torch import Tensor

from kernels import build_ops
from loopline.model.catalog import CATALOG, allowed_tensors
from loopline.model.layers import Attention, LoopedModel, RopeTable
from loopline.model.noise import initial_state
from loopline.model.weights import open_checkpoint, weights_digest
from loopline.model_spec import ModelSpec, load_model_spec

__all__ = [
    "Attention",
    "LoopedModel",
    "RopeTable",
    "initial_state",
    "load_model",
    "random_model",
    "resolve_dtype",
    "weights_digest",
]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    deterministic: bool = True,
) -> LoopedModel:
    """The model of a checkpoint folder.

    `dtype`: a torch dtype, "fp32", "bf16", or "auto" or None for the checkpoint's own. `deterministic` (CPU): a row's
    bits depend on no other row of its batch. Raises CheckpointError that names the file and key or tensor that is
    wrong.
    """
    spec = load_model_spec(path)
    place = torch.device(device)
    tensors = open_checkpoint(Path(path), spec, place, resolve_dtype(dtype, spec))
    ops = build_ops(place, deterministic=deterministic)
    return CATALOG[spec.family].build(spec, ops, RopeTable.build(spec, place), tensors.read)


def random_model(
    spec: ModelSpec,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    *,
    deterministic: bool = True,
) -> LoopedModel:
    """A model of this geometry with seeded random weights and no checkpoint, for benches and tests.

    Matrices keep the size of what they are given, norm weights are near 1 and biases small, so states stay finite at
    any depth.
    """
    place = torch.device(device)
    kind = resolve_dtype(dtype, spec)
    shapes = allowed_tensors(spec)
    generator = torch.Generator(place).manual_seed(seed)

    def tensor(name: str) -> Tensor:
        shape = shapes[name]
        values = torch.randn(shape, generator=generator, device=place)
        if len(shape) == 1:
            values = 1.0 + 0.1 * values
        elif len(shape) == 2:
            values = values * shape[1] ** -0.5
        else:
            values = 0.1 * values
        return values.to(kind)

    ops = build_ops(place, deterministic=deterministic)
    return CATALOG[spec.family].build(spec, ops, RopeTable.build(spec, place), tensor)


def resolve_dtype(dtype: torch.dtype | str | None, spec: ModelSpec) -> torch.dtype:
    """The torch dtype that `load_model`'s argument stands for; ValueError for a name that it does not know."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = spec.checkpoint_dtype if dtype in (None, "auto") else dtype
    if name not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
