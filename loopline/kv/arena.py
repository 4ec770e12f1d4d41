"""The one tensor that holds a worker's blocks. The only module of `loopline.kv` that imports torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopline.errors import ConfigError
from loopline.kv.layout import KVLayout

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Arena:
    """`tensor` is [num_blocks + 1, planes, 2, block_size, kv_heads, head_dim]; the last block is the null block, which
    takes the writes of padding rows and warm-up pushes and is never read."""

    layout: KVLayout
    num_blocks: int
    tensor: Tensor

    @property
    def null_block(self) -> int:
        """Id of the block outside the total."""
        return self.num_blocks

    @property
    def base_address(self) -> int:
        """Address of block 0 in this process (device memory for CUDA)."""
        return self.tensor.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, null block included."""
        return (self.num_blocks + 1) * self.layout.block_bytes

    def read_blocks(self, block_ids: Sequence[int]) -> Iterator[memoryview]:
        """Each block's bytes as they are now: on a CPU the memory itself, on CUDA a copy on the host."""
        rows = self.tensor.view(self.num_blocks + 1, -1).view(torch.uint8)  # [num_blocks + 1, block_bytes]
        for block in block_ids:
            yield rows[block].cpu().numpy().data


def allocate_arena(layout: KVLayout, num_blocks: int, device: str) -> Arena:
    """A zeroed arena, every page of it present. Raises ConfigError that names the bytes if they cannot be had."""
    shape = (
        num_blocks + 1,
        layout.num_planes,
        2,
        layout.block_size,
        layout.kv_heads,
        layout.head_dim,
    )
    try:
        tensor = torch.zeros(shape, dtype=_DTYPES[layout.dtype], device=device)
    except RuntimeError as error:  # torch's allocators raise it, or a subclass, when memory is short
        wanted = (num_blocks + 1) * layout.block_bytes
        raise ConfigError(
            f"an arena of {num_blocks} blocks ({wanted} bytes) on {device}: {error}; lower num_blocks"
        ) from error
    return Arena(layout, num_blocks, tensor)
