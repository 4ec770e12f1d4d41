"""Where keys and values lie: planes inside a block, bytes of a block. The only place that knows bytes.

    arena  [num_blocks + 1, planes, 2, block_size, kv_heads, head_dim]   block-major; the last block is the null block
    planes prelude layers | coda layers | loop 0's recurrent layers | loop 1's | ...

Planes that do not depend on the loop are stored once. A block is one contiguous range over all its planes, and
consecutive blocks are one range: that is what makes a handoff a few descriptors.
"""

from dataclasses import dataclass

from loopline.errors import ConfigError
from loopline.model_spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Frozen geometry of one arena. `dtype` is the KV dtype, which may differ from the compute dtype."""

    num_prelude: int
    num_recurrent: int
    num_coda: int
    max_loops: int
    block_size: int  # tokens
    kv_heads: int
    head_dim: int
    dtype: str  # "fp32" | "bf16"

    @classmethod
    def from_spec(cls, spec: ModelSpec, max_loops: int, block_size: int, dtype: str) -> "KVLayout":
        """The layout of a model served up to `max_loops` deep. Raises ConfigError for values below 1."""
        for name, value in (("max_loops", max_loops), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; allowed: 1 and above")
        return cls(
            num_prelude=spec.num_prelude,
            num_recurrent=spec.num_recurrent,
            num_coda=spec.num_coda,
            max_loops=max_loops,
            block_size=block_size,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
        )

    @property
    def num_planes(self) -> int:
        """Planes a token has at full depth."""
        return self.num_prelude + self.num_coda + self.max_loops * self.num_recurrent

    @property
    def plane_token_bytes(self) -> int:
        """Bytes of one token's key and value in one plane."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all planes."""
        return self.num_planes * self.plane_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: one contiguous range."""
        return self.block_size * self.token_bytes

    @property
    def unpacked_token_bytes(self) -> int:
        """Bytes of one token in a layout that keeps every layer at every loop; for comparison only."""
        layers = self.num_prelude + self.num_recurrent + self.num_coda
        return layers * self.max_loops * self.plane_token_bytes

    def plane(self, loop: int, layer: int) -> int:
        """The plane that physical layer `layer` (prelude, recurrent, coda in that order) reads and writes at `loop`.

        Layers outside the recurrent block have one plane and are asked for with loop 0.
        """
        if not 0 <= loop < self.max_loops:
            raise ValueError(f"loop is {loop}; allowed: 0 to {self.max_loops - 1}")
        recurrent = layer - self.num_prelude
        if 0 <= recurrent < self.num_recurrent:
            return self.num_prelude + self.num_coda + loop * self.num_recurrent + recurrent
        if loop != 0:
            raise ValueError(f"layer {layer} is outside the recurrent block and has no plane for loop {loop}")
        if 0 <= layer < self.num_prelude:
            return layer
        coda = recurrent - self.num_recurrent
        if 0 <= coda < self.num_coda:
            return self.num_prelude + coda
        raise ValueError(f"layer is {layer}; allowed: 0 to {self.num_prelude + self.num_recurrent + self.num_coda - 1}")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)
