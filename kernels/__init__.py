"""Kernels and the seam through which models reach them. `build_ops` picks an implementation for a device."""

import torch

from kernels.ops import ROW_TILE, AttentionPlan, Ops, RopeStyle
from kernels.reference import reference_ops

__all__ = ["ROW_TILE", "AttentionPlan", "Ops", "RopeStyle", "build_ops"]


def build_ops(device: torch.device, *, deterministic: bool) -> Ops:
    """What models on `device` compute with. `deterministic` (CPU): a row's bits depend on no other row of its batch."""
    return reference_ops(deterministic=deterministic and device.type == "cpu")
