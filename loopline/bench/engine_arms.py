"""Ways to compute one decode step, from plain torch to the engine's own, over one storage of keys and values.

A point is a number of rows, all at the last position of the same context. Its storage is viewed in two ways: as the
engine's paged arena, and as an arena whose blocks hold a whole context, where a row's keys of a plane lie side by side
as torch's own attention wants them. Arms differ in what computes and in how it is launched, in nothing else.

Shape letters: N rows, S context, H query heads, C key/value heads, d head size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.invariant import PlainProducts
from kernels.ops import AttentionPlan, DecodePlan, Ops
from kernels.reference import ReferenceOps
from loopline.engine.batch import DecodeColumns, RequestColumns
from loopline.engine.decode_loop import DecodeInputs, EagerDecode, compute
from loopline.engine.forward import Forward, PagedAttention, PlaneTable, Rows
from loopline.engine.graphs import GraphDecode
from loopline.errors import InvariantBroken
from loopline.kv.arena import Arena
from loopline.kv.layout import KVLayout
from loopline.model import LoopedModel
from loopline.model.huginn import HuginnModel
from loopline.model.noise import initial_state
from loopline.model.ouro import OuroModel
from loopline.request import SamplingParams
from loopline.sched.plan import KNOWN

T = TypeVar("T")
Step = Callable[[], Tensor]
"""Submits one step; the tokens that it chooses, [N] int64."""
BLOCK_SIZE = 16
_FILL_ELEMENTS = 1 << 28
_KV_STD = 0.3


def random_storage(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small random values, never zeros, on which arithmetic runs faster: [num_elements]."""
    storage = torch.empty(num_elements, dtype=dtype, device=device)
    for part in torch.split(storage, _FILL_ELEMENTS):
        part.normal_(0.0, _KV_STD)
    return storage


def with_ops(model: LoopedModel, ops: Ops) -> LoopedModel:
    """The same weights, computed with by other operations."""
    if not isinstance(model, OuroModel | HuginnModel):
        raise InvariantBroken(f"a model of type {type(model).__name__} cannot be given other operations")
    return replace(model, ops=ops)


class NotedPlanes(PlaneTable):
    """Notes which plane was asked for last: torch's attention takes a view of one, and a view needs a number."""

    last = 0

    def of(self, plane: int, num_rows: int) -> Tensor:
        """See `PlaneTable`."""
        self.last = plane
        return super().of(plane, num_rows)


def contiguous_attention(q: Tensor, arena: Tensor, plane: int, scale: float) -> Tensor:
    """torch's attention of rotated q [N, H, d], by whatever backend it picks, over all S tokens of each row's block in
    an arena [N, planes, 2, S, C, d]: [N, H, d].
    """
    keys, values = arena[:, plane].transpose(2, 3).unbind(1)  # [N, C, S, d] each
    grouped = q.shape[1] != keys.shape[1]
    mixed = functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=scale, enable_gqa=grouped)
    return mixed.squeeze(2)


@dataclass(frozen=True, kw_only=True)
class PlainOps(ReferenceOps):
    """The plain twins, torch's attention over a contiguous cache, and the plain way to choose greedily."""

    products: PlainProducts = field(default_factory=PlainProducts)
    planes: NotedPlanes

    def paged_attention(
        self,
        q: Tensor,
        arena: Tensor,
        planes: Tensor,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """See `contiguous_attention`; `plan` is that every row sees its whole context."""
        return contiguous_attention(q, arena, self.planes.last, scale)

    def choose_tokens(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The largest logit of each row."""
        return logits.argmax(dim=1)


def elementwise_ops(noted: NotedPlanes) -> Ops:
    """This package's elementwise kernels, with cuBLAS and torch's attention over a contiguous cache."""
    from kernels.triton_ops import ElementwiseOps  # it compiles for CUDA, and a CPU does without it

    @dataclass(frozen=True)
    class WithContiguousAttention(ElementwiseOps):
        def paged_attention(
            self,
            q: Tensor,
            arena: Tensor,
            planes: Tensor,
            plan: AttentionPlan,
            scale: float,
        ) -> Tensor:
            return contiguous_attention(q, arena, noted.last, scale)

    return WithContiguousAttention()


class DecodePoint:
    """Keys, values and inputs of `num_rows` rows at position `context - 1`, their blocks in random order.

    `model` computes with its device's own operations; full depth, greedy.
    """

    def __init__(self, model: LoopedModel, dtype: str, num_rows: int, context: int) -> None:
        """`dtype`: "fp32" or "bf16", the model's."""
        self.model = model
        self.num_rows = num_rows
        self.context = context
        self.depth = model.spec.default_loops
        self.layout = KVLayout.from_spec(model.spec, self.depth, BLOCK_SIZE, dtype)
        self._generator = np.random.default_rng([num_rows, context])
        self._token_ids = self._generator.integers(0, model.spec.vocab_size, num_rows)
        self.num_blocks = num_rows * self.layout.blocks_for(context)
        token_elements = self.layout.num_planes * 2 * self.layout.kv_heads * self.layout.head_dim
        num_elements = (self.num_blocks + 1) * BLOCK_SIZE * token_elements
        self._storage = random_storage(num_elements, model.dtype, model.device)
        self.previous = torch.zeros(num_rows, dtype=torch.int64, device=model.device)

    @property
    def kv_bytes_moved(self) -> int:
        """What a step reads of the context, and writes of its new position."""
        return self.num_rows * (self.context + 1) * self.layout.token_bytes

    def paged(self) -> Forward:
        """The engine's forward pass over its own arena."""
        arena = self._arena(self.layout, self.num_blocks)
        return Forward(self.model, arena, PlaneTable(self.layout.num_planes, self.model.device))

    def contiguous(self, ops_of: Callable[[NotedPlanes], Ops]) -> Forward:
        """A forward pass by other operations over the same storage, a block for each row. There is no null block: no
        row is padding."""
        noted = NotedPlanes(self.layout.num_planes, self.model.device)
        arena = self._arena(replace(self.layout, block_size=self.context), self.num_rows - 1)
        return Forward(with_ops(self.model, ops_of(noted)), arena, noted)

    def inputs(self, forward: Forward) -> DecodeInputs:
        """`columns` on the device."""
        columns, device = self.columns(forward), self.model.device
        zeros = torch.zeros(self.num_rows, dtype=torch.int64, device=device)

        def on_device(values: object) -> Tensor:
            return torch.tensor(np.array(values), device=device)

        return DecodeInputs(
            token_ids=on_device(columns.token_ids),
            sources=on_device(columns.sources),
            positions=on_device(columns.positions),
            slots=on_device(columns.slots),
            seeds=on_device(columns.request.seeds),
            zeros=zeros,
            temperature=zeros.double(),
            block_tables=on_device(columns.tables),
        )

    def columns(self, forward: Forward) -> DecodeColumns:
        """The rows, as the engine would hand them to its decode loop."""
        block_size, last = forward.arena.layout.block_size, self.context - 1
        num_blocks = self.num_rows * forward.arena.layout.blocks_for(self.context)
        order = np.random.default_rng(num_blocks).permutation(num_blocks) if block_size == BLOCK_SIZE else None
        tables = (np.arange(num_blocks) if order is None else order).reshape(self.num_rows, -1)
        return DecodeColumns(
            token_ids=self._token_ids,
            sources=np.full(self.num_rows, KNOWN, np.int64),
            positions=np.full(self.num_rows, last, np.int64),
            slots=tables[:, last // block_size] * block_size + last % block_size,
            request=RequestColumns.of([SamplingParams(seed=row) for row in range(self.num_rows)]),
            tables=tables,
        )

    def _arena(self, layout: KVLayout, num_blocks: int) -> Arena:
        shape = (num_blocks + 1, layout.num_planes, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        return Arena(layout, num_blocks, self._storage[: int(np.prod(shape))].view(shape))


# ---- arms


def _capture(run: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """A CUDA graph's replay and what it makes, which is there from the first: it has been replayed once.

    The replay keeps `run` alive, and with it the inputs that the graph reads and does not own.
    """
    run()  # compiles what is not compiled yet
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()

    def replay(_keeps: object = run) -> None:
        graph.replay()

    replay()
    return replay, made


def _chosen(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise InvariantBroken("a measured step chooses its tokens")
    return tokens


def _eagerly(point: DecodePoint, forward: Forward) -> Step:
    inputs = point.inputs(forward)
    return lambda: _chosen(compute(forward, inputs, point.previous, point.depth, chooses=True).chosen)


def _as_one_graph(point: DecodePoint, forward: Forward) -> Step:
    forward.planes.reserve(point.num_rows)  # graphs hold its address
    replay, chosen = _capture(_eagerly(point, forward))

    def step() -> Tensor:
        replay()
        return chosen

    return step


def _plain_eager(point: DecodePoint) -> Step:
    return _eagerly(point, point.contiguous(lambda noted: PlainOps(planes=noted)))


def _plain_graph(point: DecodePoint) -> Step:
    return _as_one_graph(point, point.contiguous(lambda noted: PlainOps(planes=noted)))


def _elementwise_graph(point: DecodePoint) -> Step:
    return _as_one_graph(point, point.contiguous(elementwise_ops))


def _unfused(point: DecodePoint) -> Step:
    """The engine's operations, each loop a graph of its own that the host waits for; the last also has coda, head and
    choice.
    """
    forward = point.paged()
    forward.planes.reserve(point.num_rows)
    model, inputs = forward.model, point.inputs(forward)
    rows = Rows(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        slots=inputs.slots,
        seeds=inputs.seeds,
        zeros=inputs.zeros.bool(),
        plan=DecodePlan(inputs.positions, inputs.block_tables),
    )

    def begin() -> tuple[PagedAttention, Tensor, Tensor]:
        attention = PagedAttention(model, forward.arena, forward.planes, rows)
        embedded = model.prelude(rows.token_ids, attention)
        noise = None
        if model.uses_initial_state:
            noise = initial_state(model.ops, rows.seeds, rows.positions, rows.zeros, embedded)
        return attention, embedded, model.first_state(embedded, noise)

    def one_loop(loop: int, state: Tensor) -> Tensor:
        """The next state; after the last loop the chosen tokens."""
        state = model.core_step(loop, state, embedded, attention)
        if loop < point.depth - 1:
            return state
        logits = model.head(model.coda(state, attention))
        return model.ops.choose_tokens(logits, inputs.temperature.float(), rows.seeds, rows.positions + 1)

    prelude, (attention, embedded, result) = _capture(begin)
    loops: list[Callable[[], None]] = []
    for loop in range(point.depth):
        replay, result = _capture(partial(one_loop, loop, result))
        loops.append(replay)

    def step() -> Tensor:
        prelude()
        for replay in loops:
            replay()
            torch.cuda.synchronize()
        return result

    return step


def _engine(point: DecodePoint, *, replays: bool = True) -> Step:
    """As an engine runs it, the way of its inputs to the device included."""
    forward = point.paged()
    columns, layout = point.columns(forward), point.layout
    if point.model.device.type != "cuda":
        loop = EagerDecode(forward, point.num_rows)
        return lambda: loop.run(columns, point.depth, point.previous).logits.argmax(dim=1)
    width = layout.blocks_for(point.model.spec.context_tokens)
    graphs = GraphDecode(forward, point.num_rows, width, point.previous, replays=replays)
    graphs.run_largest(point.depth)  # what nothing was captured for runs kernel by kernel
    return lambda: _chosen(graphs.run(columns, point.depth, point.previous).chosen)


def _engine_eager(point: DecodePoint) -> Step:
    return _engine(point, replays=False)


DECODE_ARMS: Mapping[str, Callable[[DecodePoint], Step]] = {
    "plain-eager": _plain_eager,
    "plain-graph": _plain_graph,
    "elementwise-graph": _elementwise_graph,
    "unfused": _unfused,
    "engine-eager": _engine_eager,
    "engine": _engine,
}
CPU_ARMS = ("plain-eager", "engine")
CUDA_ARMS = ("plain-eager", "plain-graph", "elementwise-graph", "unfused", "engine")
"""Those that run where nothing else is asked for."""
