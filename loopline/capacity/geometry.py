"""How much work a model's passes are: weights, bytes moved, floating-point operations. Counts only; no rates.

Sources: the two public modelling files that `loopline.model_spec` names.
"""

from dataclasses import dataclass

from loopline.kv.layout import KVLayout
from loopline.model_spec import DTYPE_BYTES, Family, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one pass must do, whoever does it."""

    weight_bytes: int
    """Weights read: those of the loop once for every loop."""
    kv_bytes: int
    """Keys and values, read and written."""
    flops: int
    layer_passes: int
    """Layers that run one after the other."""

    @property
    def num_bytes(self) -> int:
        """Weights, keys and values."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A model as it is served: requests run `loops` loops, computed in `dtype` ("fp32" or "bf16"); `layout` is that of
    the arenas, which may have planes for more loops."""

    spec: ModelSpec
    loops: int
    dtype: str
    layout: KVLayout

    @classmethod
    def of(
        cls, spec: ModelSpec, loops: int, dtype: str, block_size: int = 16, max_loops: int | None = None
    ) -> "Geometry":
        """Geometry of requests that run `loops` loops, in arenas laid out for `max_loops`; None: for those. Raises
        ConfigError for values below 1."""
        layout = KVLayout.from_spec(spec, max_loops or loops, block_size, dtype)
        return cls(spec=spec, loops=loops, dtype=dtype, layout=layout)

    @property
    def layer_passes(self) -> int:
        """Layers that a token runs through, one after the other: as many as it has planes."""
        return self.spec.num_prelude + self.spec.num_coda + self.loops * self.spec.num_recurrent

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices: q, k, v and out; gate, up and down."""
        spec = self.spec
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return spec.hidden_size * (2 * heads + 2 * kv_heads + 3 * spec.intermediate_size)

    @property
    def adapter_weights(self) -> int:
        """Elements of the matrix that mixes state and input at the start of each loop: Huginn's."""
        return 2 * self.spec.hidden_size**2 if self.spec.family is Family.HUGINN else 0

    @property
    def head_weights(self) -> int:
        """Elements of the head."""
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def body_weights(self) -> int:
        """Elements that one token goes through, head and embedding not counted; the loop's count in every loop."""
        spec = self.spec
        once = (spec.num_prelude + spec.num_coda) * self.layer_weights
        return once + self.loops * (spec.num_recurrent * self.layer_weights + self.adapter_weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all matrices in memory: each layer once, the embedding, and the head where it is its own."""
        spec = self.spec
        tables = self.head_weights * (1 if spec.tied_head else 2)
        elements = spec.num_layers * self.layer_weights + self.adapter_weights + tables
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def pass_weight_bytes(self) -> int:
        """Bytes of weights that one pass reads; rows of the embedding left out."""
        return (self.body_weights + self.head_weights) * DTYPE_BYTES[self.dtype]

    def _attention_flops(self, pairs: int) -> int:
        """Of `pairs` pairs of a query and a key that it sees, in all planes."""
        return 4 * self.spec.num_heads * self.spec.head_dim * pairs * self.layer_passes

    def _kv_bytes(self, tokens: int) -> int:
        return tokens * self.layer_passes * self.layout.plane_token_bytes

    def decode_work(self, rows: int, context: int) -> Work:
        """One decode step of `rows` rows that each see `context` tokens."""
        products = 2 * rows * (self.body_weights + self.head_weights)
        return Work(
            weight_bytes=self.pass_weight_bytes,
            kv_bytes=self._kv_bytes(rows * (context + 1)),
            flops=products + self._attention_flops(rows * context),
            layer_passes=self.layer_passes,
        )

    def prefill_work(self, prompts: int, tokens: int, cached: int = 0) -> Work:
        """One pass over `tokens` tokens of each of `prompts` prompts, behind `cached` tokens of each that have KV
        already; with the head at the last position of each."""
        pairs = tokens * (tokens + 1) // 2 + tokens * cached
        products = 2 * self.body_weights * tokens + 2 * self.head_weights
        return Work(
            weight_bytes=self.pass_weight_bytes,
            kv_bytes=self._kv_bytes(prompts * (tokens + cached)),
            flops=prompts * (products + self._attention_flops(pairs)),
            layer_passes=self.layer_passes,
        )
