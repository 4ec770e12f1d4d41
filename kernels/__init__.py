"""Kernels and the seam through which models reach them. `build_ops` picks an implementation for a device."""

import torch

from kernels.ops import ROW_TILE, AttentionPlan, DecodePlan, Ops, PackedPlan, PackedRun, RopeStyle, TiledPlan
from kernels.reference import reference_ops

__all__ = [
    "ROW_TILE",
    "AttentionPlan",
    "DecodePlan",
    "Ops",
    "PackedPlan",
    "PackedRun",
    "RopeStyle",
    "TiledPlan",
    "build_ops",
]


def build_ops(device: torch.device, *, deterministic: bool) -> Ops:
    """What models on `device` compute with. `deterministic` (CPU): a row's bits depend on no other row of its batch."""
    if device.type == "cuda":
        from kernels.triton_ops import TritonOps  # it compiles for CUDA, and a CPU does without it

        return TritonOps()
    return reference_ops(deterministic=deterministic)
