"""Checkpoint folders that tests change."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def with_other_weights(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with the same shapes in which one number of one tensor is another. Returns `target`."""
    shutil.copytree(source, target)
    file = sorted(target.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    return target
