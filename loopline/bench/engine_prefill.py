"""Two ways to compute the same prompts through the engine's runner: packed passes, and every token as a decode row.

`loopline.bench.engine` calls it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loopline.bench.engine_arms import BLOCK_SIZE, random_storage
from loopline.engine.batch import pinned_copier
from loopline.engine.decode_loop import DecodeLoop, EagerDecode
from loopline.engine.forward import Forward, PlaneTable
from loopline.engine.graphs import GraphDecode
from loopline.engine.packed_loop import EagerPacked, GraphPacked, PackedLoop
from loopline.engine.runner import Runner
from loopline.errors import InvariantBroken
from loopline.kv.arena import Arena
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Allocation, Ledger
from loopline.model import LoopedModel
from loopline.request import SamplingParams
from loopline.sched.plan import RowRun, Sampling, TokenHistory


class PrefillPoint:
    """`num_prompts` prompts of random tokens, at full depth, with blocks of their own."""

    def __init__(
        self, model: LoopedModel, dtype: str, num_prompts: int, num_tokens: int, chunk_tokens: int, per_row_rows: int
    ) -> None:
        """`dtype`: "fp32" or "bf16", the model's. `chunk_tokens`: tokens of one packed pass at most. `per_row_rows`:
        rows of one decode step, where prompts are computed so."""
        self.model = model
        self.depth = model.spec.default_loops
        self.layout = KVLayout.from_spec(model.spec, self.depth, BLOCK_SIZE, dtype)
        ledger = Ledger(num_prompts * self.layout.blocks_for(num_tokens), BLOCK_SIZE)
        forward = Forward(model, self._arena(ledger.total_blocks), PlaneTable(self.layout.num_planes, model.device))
        previous = torch.zeros(max(per_row_rows, num_prompts), dtype=torch.int64, device=model.device)
        decode = self._decode_loop(forward, per_row_rows, previous)
        eager = EagerPacked(forward, ledger, pinned_copier(model.device))
        packed: PackedLoop = eager
        if model.device.type == "cuda":
            most = min(chunk_tokens, num_prompts * num_tokens)
            packed = GraphPacked(forward, eager, max_rows=most, max_runs=num_prompts, depth=self.depth)
        self._runner = Runner(forward, ledger, decode, packed, previous, packs_prompts=True)
        generator = np.random.default_rng([num_prompts, num_tokens])
        prompts = generator.integers(0, model.spec.vocab_size, (num_prompts, num_tokens)).tolist()
        allocations = [_reserve(ledger, num_tokens) for _ in prompts]
        self._passes = passes(prompts, allocations, self.depth, chunk_tokens)

    @torch.inference_mode()
    def packed(self) -> Tensor:
        """All passes; logits [S, V] of the prompts that ended in the last."""
        return [self._runner.packed_logits(runs, self.depth) for runs in self._passes][-1]

    @torch.inference_mode()
    def per_row(self) -> Tensor:
        """The same prompts as decode rows."""
        return [self._runner.per_row_logits(runs, self.depth) for runs in self._passes][-1]

    def _arena(self, num_blocks: int) -> Arena:
        layout, model = self.layout, self.model
        shape = (num_blocks + 1, layout.num_planes, 2, layout.block_size, layout.kv_heads, layout.head_dim)
        return Arena(layout, num_blocks, random_storage(int(np.prod(shape)), model.dtype, model.device).view(shape))

    def _decode_loop(self, forward: Forward, max_rows: int, previous: Tensor) -> DecodeLoop:
        if self.model.device.type != "cuda":
            return EagerDecode(forward, max_rows)
        width = self.layout.blocks_for(self.model.spec.context_tokens)
        return GraphDecode(forward, max_rows, width, previous, replays=True)


def passes(
    prompts: Sequence[Sequence[int]], allocations: Sequence[Allocation], depth: int, chunk_tokens: int
) -> list[list[RowRun]]:
    """Prompts one behind the other, cut where a pass has `chunk_tokens` tokens."""
    made: list[list[RowRun]] = [[]]
    room = chunk_tokens
    for number, (prompt, allocation) in enumerate(zip(prompts, allocations, strict=True)):
        start = 0
        while start < len(prompt):
            if not room:
                made.append([])
                room = chunk_tokens
            end = min(len(prompt), start + room)
            sampling = Sampling(end, 0, TokenHistory()) if end == len(prompt) else None
            params = SamplingParams(loops=depth, seed=number)
            made[-1].append(RowRun(f"prompt{number}", allocation, params, start, tuple(prompt[start:end]), sampling))
            room -= end - start
            start = end
    return made


def _reserve(ledger: Ledger, num_tokens: int) -> Allocation:
    allocation = ledger.reserve(num_tokens, num_tokens)
    if allocation is None:
        raise InvariantBroken("an arena made for these prompts has no room for one of them")
    return allocation
