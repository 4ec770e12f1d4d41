"""Which families are served: for each, the tensors of its checkpoints and how a model is built from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kernels.ops import Ops
from loopline.model.huginn import build_huginn, huginn_tensors
from loopline.model.layers import LoopedModel, RopeTable
from loopline.model.ouro import build_ouro, ouro_tensors
from loopline.model_spec import Family, ModelSpec

HEAD = "lm_head.weight"
_COMPUTED = ("freqs_cis", "rotary_emb.inv_freq")  # rope tables: stored by some, always computed here


@dataclass(frozen=True)
class Architecture:
    """One family."""

    body: Callable[[ModelSpec], dict[str, tuple[int, ...]]]
    """Name and shape of every tensor but the head."""
    build: Callable[[ModelSpec, Ops, RopeTable, Callable[[str], Tensor]], LoopedModel]


CATALOG: Mapping[Family, Architecture] = {
    Family.OURO: Architecture(ouro_tensors, build_ouro),
    Family.HUGINN: Architecture(huginn_tensors, build_huginn),
}


def required_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint must have."""
    return CATALOG[spec.family].body(spec) | ({} if spec.tied_head else _head(spec))


def allowed_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint may have: a tied head may be stored too, and is not read."""
    return CATALOG[spec.family].body(spec) | _head(spec)


def is_computed(name: str) -> bool:
    """Whether a stored tensor is a rope table, which is ignored whatever its shape."""
    return name.endswith(_COMPUTED)


def _head(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {HEAD: (spec.vocab_size, spec.hidden_size)}
