"""Checkpoint folders: their safetensors files read tensor by tensor, each accounted for, and their digest.

A folder holds `model.safetensors`, or `model.safetensors.index.json` with the shards that it names.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopline.errors import CheckpointError
from loopline.model.catalog import allowed_tensors, is_computed, required_tensors
from loopline.model.digest_cache import cached_digest
from loopline.model_spec import ModelSpec

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_DIGEST_KIND = "blake2b of pieces, 1"  # changes with whatever changes the digest of equal files
_DIGEST_BYTES = 16
_PIECE_DIGEST_BYTES = 32
_PIECE_BYTES = 1 << 26
_READ_BYTES = 1 << 20
_MOST_THREADS = 16


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of one folder, whose names, shapes and types were checked against a spec. Each read opens a file."""

    files: Mapping[str, Path]  # by tensor name
    device: torch.device
    dtype: torch.dtype

    def read(self, name: str) -> Tensor:
        """One tensor in the model's dtype, on its device, in memory of its own."""
        with safe_open(self.files[name], framework="pt", device="cpu") as opened:
            stored: Tensor = opened.get_tensor(name)
        return stored.to(self.device, self.dtype, copy=True)


def open_checkpoint(folder: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> CheckpointTensors:
    """Raise CheckpointError, naming file and tensor, unless the folder has exactly the tensors that `spec` asks for."""
    allowed = allowed_tensors(spec)
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        for name, (shape, kind) in _header(path).items():
            if is_computed(name):
                continue
            if name not in allowed:
                raise CheckpointError(f"{path}: tensor {name} {shape} does not belong to a {spec.family} model")
            if shape != allowed[name]:
                raise CheckpointError(f"{path}: tensor {name} has shape {shape}; config.json asks for {allowed[name]}")
            if kind not in _FLOAT_TYPES:
                raise CheckpointError(f"{path}: tensor {name} has type {kind}; allowed: {', '.join(_FLOAT_TYPES)}")
            if name in files:
                raise CheckpointError(f"{path}: tensor {name} is in {files[name].name} too")
            files[name] = path
    for name, shape in required_tensors(spec).items():
        if name not in files:
            raise CheckpointError(f"{folder}: tensor {name} {shape} is missing")
    return CheckpointTensors(files, device, dtype)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in name order. Raises CheckpointError that names what is missing or unreadable."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed = {name: folder / shard for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no readable weight_map: {error!r}") from error
    paths = sorted(set(placed.values()))
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{index}: names {path.name}, and there is no such file")
    headers = {path: _header(path) for path in paths}
    for name, path in placed.items():
        if name not in headers[path]:
            raise CheckpointError(f"{index}: places tensor {name} in {path.name}, which does not have it")
    return paths


def weights_digest(folder: str | Path, wall_ns: Callable[[], int] = time.time_ns) -> str:
    """Hexadecimal digest of config.json and the safetensors files, names and bytes: the same for equal files only.

    Kept between starts, and so quick where no file changed: see `cached_digest`, which `wall_ns` is for. Raises
    CheckpointError that names what is missing or unreadable.
    """
    root = Path(folder)
    files = [root / "config.json", *weight_files(root)]
    try:
        return cached_digest(root, files, _DIGEST_KIND, lambda: files_digest(files), wall_ns)
    except OSError as error:
        raise CheckpointError(f"{root}: {error}") from error


def files_digest(files: Sequence[Path], num_threads: int | None = None) -> str:
    """Hexadecimal blake2b of the names, sizes and pieces' blake2b of `files` in their order; reads all of each.

    Pieces, and not whole files, are what threads share: a checkpoint is often one file. `num_threads` (None: as many as
    there are processors, up to 16) does not change the result. Raises CheckpointError that names the file.
    """
    sizes = [_size_bytes(path) for path in files]
    pieces = [(path, start) for path, size in zip(files, sizes, strict=True) for start in range(0, size, _PIECE_BYTES)]
    with ThreadPoolExecutor(num_threads or min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
        digests = threads.map(_piece_digest, pieces)
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path, size in zip(files, sizes, strict=True):
            whole.update(f"{path.name!a} {size}\n".encode())
            for _ in range(0, size, _PIECE_BYTES):
                whole.update(next(digests))
    return whole.hexdigest()


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    """blake2b of the bytes of a file from an offset to the next piece or its end."""
    path, start = piece
    digest = hashlib.blake2b(digest_size=_PIECE_DIGEST_BYTES)
    part = memoryview(bytearray(_READ_BYTES))
    left = _PIECE_BYTES
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while left and (count := file.readinto(part[: min(left, _READ_BYTES)])):
                digest.update(part[:count])
                left -= count
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return digest.digest()


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and safetensors type of each tensor of a file, by name."""
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            names: list[str] = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
