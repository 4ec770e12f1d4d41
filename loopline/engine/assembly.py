"""Puts an engine's device side together: how much memory the arena may have, decode graphs, and the way of prompts.

Memory on CUDA goes by measuring. Weights are loaded; the largest decode graph and the largest prompt step run once over
an arena of one block, and what they took is the workspace; the arena then gets what is left of the configured share.
"""

import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import PackedPlan, PackedRun
from loopline.engine.accuracy_gate import choose_prefill, gate_prompts
from loopline.engine.batch import pinned_copier, signed_seed
from loopline.engine.capacity import free_bytes
from loopline.engine.decode_loop import DecodeLoop, EagerDecode
from loopline.engine.forward import Forward, PlaneTable, Rows, StateSource
from loopline.engine.graphs import GraphDecode
from loopline.engine.packed_loop import EagerPacked, GraphPacked, PackedLoop
from loopline.engine.runner import Runner
from loopline.errors import ConfigError, InvariantBroken
from loopline.kv.arena import Arena, allocate_arena
from loopline.kv.arena_size import SLACK_BYTES, most_prompt_tokens
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Ledger
from loopline.model import LoopedModel
from loopline.model.layers import ExitGate
from loopline.noise_key import NoiseKey
from loopline.request import SamplingParams
from loopline.sched.plan import RowRun
from loopline.settings import EngineSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DeviceParts:
    """What computes over one arena."""

    forward: Forward
    decode: DecodeLoop
    packed: PackedLoop
    previous: Tensor  # int64: the last step's chosen tokens


def memory_budget(settings: EngineSettings, model: LoopedModel, layout: KVLayout, free_at_start: int) -> int:
    """Bytes that the arena may have. Raises ConfigError that says what to lower."""
    if not settings.device.startswith("cuda"):
        return int(free_bytes(settings.device) * settings.memory_fraction)
    _return_unused()
    weights = torch.cuda.memory_reserved(settings.device)
    workspace = _workspace_bytes(settings, model, layout)
    budget = int(free_at_start * settings.memory_fraction) - weights - workspace - SLACK_BYTES
    logger.info(
        "%s: %.2f GiB free at start; weights %.2f, workspace and graphs %.2f, left for the arena %.2f",
        settings.device,
        *(count / 2**30 for count in (free_at_start, weights, workspace, max(0, budget))),
    )
    return budget


def require_plain_allocations() -> None:
    """Raise ConfigError unless torch's CUDA allocator gives memory that transfers can register."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise ConfigError(
                f"{name} has expandable_segments:True; an arena in such memory cannot be registered for transfers; "
                "allowed: expandable_segments:False"
            )


def build_parts(
    settings: EngineSettings, model: LoopedModel, arena: Arena, ledger: Ledger, states: StateSource | None
) -> DeviceParts:
    """The forward pass over an arena, and the loops that run its decode rows and its prompts."""
    max_rows, layout = settings.scheduler.max_running, arena.layout
    gate, planes = _exit_gate(settings, model), PlaneTable(layout.num_planes, model.device)
    noise_seed = signed_seed(settings.noise_seed) if NoiseKey(settings.noise_key) is NoiseKey.POSITION else None
    forward = Forward(model, arena, planes, states, gate, noise_seed)
    previous = torch.zeros(max_rows, dtype=torch.int64, device=model.device)
    eager = EagerPacked(forward, ledger, pinned_copier(model.device))
    if model.device.type != "cuda":
        return DeviceParts(forward, EagerDecode(forward, max_rows), eager, previous)
    width = layout.blocks_for(model.spec.context_tokens)
    replays = settings.cuda_graphs and states is None  # a source of states may look at values
    decode = GraphDecode(forward, max_rows, width, previous, replays=replays)
    if not replays or settings.prefill == "per_row":
        return DeviceParts(forward, decode, eager, previous)
    depth = _usual_depth(forward)
    most = most_prompt_tokens(settings, depth)
    packed = GraphPacked(forward, eager, max_rows=most, max_runs=max_rows, depth=depth)
    return DeviceParts(forward, decode, packed, previous)


def build_runner(settings: EngineSettings, parts: DeviceParts, ledger: Ledger) -> Runner:
    """The runner, its graphs captured; how it computes prompts is settled by the accuracy gate."""
    depth = _usual_depth(parts.forward)
    with torch.inference_mode():
        if isinstance(parts.decode, GraphDecode):
            for one in sorted({depth, parts.forward.arena.layout.max_loops}):
                parts.decode.capture_all(one)
        if isinstance(parts.packed, GraphPacked):
            parts.packed.capture_all()

    def runner(mode: str) -> Runner:
        packs = mode == "packed"
        return Runner(parts.forward, ledger, parts.decode, parts.packed, parts.previous, packs_prompts=packs)

    mode = settings.prefill
    if mode == "auto" and (parts.previous.device.type != "cuda" or settings.load_format == "dummy"):
        mode = "packed"  # the plain twins keep a row's bits either way, and random weights have no accuracy to lose
    trial = runner("packed")
    prompts = _prompts_that_fit(parts.forward, ledger)
    mode, _ = choose_prefill(
        mode,
        lambda: _gate_logits(trial.packed_logits, ledger, prompts, depth),
        lambda: _gate_logits(trial.per_row_logits, ledger, prompts, depth),
        parts.forward.model.dtype,
    )
    return trial if mode == "packed" else runner(mode)


def _exit_gate(settings: EngineSettings, model: LoopedModel) -> ExitGate | None:
    """The gate, where it is to be evaluated. Raises ConfigError for a model that has none."""
    if not settings.exit_gate:
        return None
    if model.exit_gate is None:
        raise ConfigError(
            f"model.exit_gate is on, and a checkpoint of the family {model.spec.family.value} has no exit gate; "
            "allowed: off"
        )
    return model.exit_gate


def _usual_depth(forward: Forward) -> int:
    """The depth of a request that asks for none."""
    return min(forward.model.spec.default_loops, forward.arena.layout.max_loops)


def _workspace_bytes(settings: EngineSettings, model: LoopedModel, layout: KVLayout) -> int:
    """What the largest decode graph and the largest prompt step take beside weights and arena.

    By this process's own allocator: what is free on the device also changes by what others there do meanwhile.
    """
    before = torch.cuda.memory_reserved(settings.device)
    torch.cuda.reset_peak_memory_stats(settings.device)
    tokens = most_prompt_tokens(settings, 1)
    try:
        with torch.inference_mode():
            arena, ledger = allocate_arena(layout, 1, settings.device), Ledger(1, settings.block_size)
            _run_largest(build_parts(settings, model, arena, ledger, None), layout, tokens)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory on {settings.device} for a step of {settings.scheduler.max_running} decode rows and {tokens} "
            "prompt tokens beside the weights; lower scheduler.max_running, chunk_tokens or max_token_loops"
        ) from error
    taken = torch.cuda.max_memory_reserved(settings.device) - before
    _return_unused()
    return taken


def _return_unused() -> None:
    """Give back what torch keeps for later and nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()


def _run_largest(parts: DeviceParts, layout: KVLayout, num_tokens: int) -> None:
    if not isinstance(parts.decode, GraphDecode):
        raise InvariantBroken("workspace is measured on CUDA")
    device = parts.previous.device
    parts.decode.run_largest(layout.max_loops)
    if isinstance(parts.packed, GraphPacked):
        parts.packed.capture(parts.packed.buckets[-1])
    positions = torch.arange(num_tokens, device=device)
    rows = Rows(
        token_ids=torch.zeros_like(positions),
        positions=positions.clamp(max=parts.forward.model.spec.context_tokens - 1),
        slots=torch.full_like(positions, parts.forward.arena.null_block * layout.block_size),
        seeds=torch.zeros_like(positions),
        zeros=torch.ones_like(positions, dtype=torch.bool),
        plan=PackedPlan(
            (PackedRun(0, num_tokens, 0),),
            torch.zeros((1, layout.blocks_for(num_tokens)), dtype=torch.int64, device=device),
        ),
    )
    parts.forward.run(rows, 1)


def _prompts_that_fit(forward: Forward, ledger: Ledger) -> tuple[tuple[int, ...], ...]:
    spec = forward.model.spec
    return gate_prompts(spec.vocab_size, min(spec.context_tokens, ledger.total_blocks * ledger.block_size))


def _gate_logits(
    compute: Callable[..., Tensor], ledger: Ledger, prompts: Sequence[tuple[int, ...]], depth: int
) -> Tensor:
    """Logits [tokens, V] of every position of the prompts, in blocks that are given back afterwards."""
    parts = []
    for prompt in prompts:
        allocation = ledger.reserve(len(prompt), len(prompt))
        if allocation is None:
            raise InvariantBroken("an arena that nobody uses has no room")
        run = RowRun("accuracy-gate", allocation, SamplingParams(loops=depth), 0, prompt, None)
        with torch.inference_mode():
            parts.append(compute([run], depth, every_row=True))
        ledger.release(allocation)
    return torch.cat(parts)
