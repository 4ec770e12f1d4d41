"""Computes plans: every segment's decode rows and runs, then the choice of tokens. Decides nothing: what to compute is
the scheduler's plan, what a result means is the scheduler's commit.

`submit` queues a plan's work on the device and returns; `collect` waits for its tokens. Chosen tokens stay on the
device, where the next step's rows read them, so a plan may be submitted before the one before it is collected.

Shape letters: N rows, R runs, S tokens to choose, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.ops import ROW_TILE
from loopline.engine.batch import (
    RequestColumnsCache,
    decode_columns,
    part_of,
    pinned_copier,
    run_columns,
    sampled_rows,
)
from loopline.engine.decode_loop import DecodeLoop, RowOutput
from loopline.engine.exit_gate import asked_exit_logits
from loopline.engine.forward import Forward
from loopline.engine.packed_loop import PackedLoop
from loopline.engine.sampler import Choice, Sampler, sample_rows
from loopline.kv.ledger import Ledger
from loopline.sched.plan import RowRun, StepPlan, StepResult
from loopline.sched.share import RowSteps

MOST_STEPS_AHEAD = 2
_NUM_RESULTS = MOST_STEPS_AHEAD + 2
"""Host buffers of tokens; more than steps that can be in flight."""


@dataclass(frozen=True, eq=False)
class Submitted:
    """A plan whose work is queued on the device."""

    plan: StepPlan
    choice: Choice
    token_ids: Tensor  # [S] int64 on the host, valid once `done`
    done: torch.cuda.Event | None  # None: it is done


class Runner:
    """Owns the buffers of chosen tokens; one thread at a time."""

    def __init__(
        self,
        forward: Forward,
        ledger: Ledger,
        decode: DecodeLoop,
        packed: PackedLoop,
        previous: Tensor,
        *,
        packs_prompts: bool,
    ) -> None:
        """`previous`: int64, room for the tokens that one step may choose; the decode loop reads it. `packs_prompts`
        False: prompts are computed as decode rows."""
        self._forward = forward
        self._ledger = ledger
        self._decode = decode
        self._packed = packed
        self._previous = previous
        self._packs_prompts = packs_prompts
        device = previous.device
        self._is_cuda = device.type == "cuda"
        self._to_device = pinned_copier(device)
        self._sampler = Sampler(forward.model.spec.vocab_size, str(device), forward.model.ops)
        self._requests = RequestColumnsCache()
        self._results = (
            [torch.empty(len(previous), dtype=torch.int64, pin_memory=True) for _ in range(_NUM_RESULTS)]
            if self._is_cuda
            else []
        )

    def use_ledger(self, ledger: Ledger) -> None:
        """Read these books from now on; nothing is in flight."""
        self._ledger = ledger
        self._packed.use_ledger(ledger)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Submitted:
        """Queue a plan's work. On a CPU it is done on return."""
        outputs: list[RowOutput] = []
        chosen: Tensor | None = None
        for segment in plan.segments:
            if segment.decode is not None:
                request = self._requests.get(segment.decode.requests)
                columns = decode_columns(segment.decode, request, self._ledger)
                output = self._decode.run(columns, segment.last_loop, self._previous)
                chosen = output.chosen
                is_last = segment is plan.segments[-1] and not segment.runs
                outputs.append(output if is_last else output.kept())  # the next run writes over it
            if segment.runs:
                outputs.append(self._prompts(segment.runs, segment.last_loop))
        rows = sample_rows(plan)
        if chosen is not None and len(outputs) == 1 and self._sampler.is_plain(rows):
            choice = Choice(chosen)
        else:
            logits = [output.logits for output in outputs]
            choice = self._sampler.choose(torch.cat(logits) if len(logits) > 1 else logits[0], rows)
        if self._forward.exit_gate is not None:
            gates = [(len(output.logits), output.gates) for output in outputs]
            choice = replace(choice, exits=asked_exit_logits(rows.params, gates, self._to_device))
        return self._hand_over(plan, choice)

    def collect(self, submitted: Submitted) -> StepResult:
        """Wait for a plan's tokens."""
        if submitted.done is not None:
            submitted.done.synchronize()
        return submitted.choice.result(submitted.plan.step, submitted.token_ids.tolist())

    @property
    def prompt_rows(self) -> RowSteps:
        """What passes over prompts are padded to, at the usual depth."""
        return RowSteps(self._packed.buckets if self._packs_prompts else ())

    def wait(self) -> None:
        """Wait for everything that is queued."""
        if self._is_cuda:
            torch.cuda.synchronize(self._previous.device)

    def packed_logits(self, runs: Sequence[RowRun], depth: int, *, every_row: bool = False) -> Tensor:
        """Compute runs in one packed pass; logits [S, V] float32 of the last row of each that has a Sampling;
        `every_row`: of every row [N, V]."""
        return self._packed_rows(runs, depth, every_row).logits

    def per_row_logits(self, runs: Sequence[RowRun], depth: int, *, every_row: bool = False) -> Tensor:
        """`packed_logits` with every position a row of the decode path."""
        return self._decode_rows(runs, depth, every_row).logits

    def _prompts(self, runs: Sequence[RowRun], depth: int) -> RowOutput:
        """Compute runs; of each that has a Sampling the last row [S]."""
        return self._packed_rows(runs, depth) if self._packs_prompts else self._decode_rows(runs, depth)

    def _packed_rows(self, runs: Sequence[RowRun], depth: int, every_row: bool = False) -> RowOutput:
        passed = self._packed.run(runs, depth)
        hidden, gates = passed.hidden, passed.gates
        head = self._forward.model.head
        if every_row:
            return RowOutput(head(hidden)[: sum(run.num_tokens for run in runs)])
        rows = sampled_rows(runs)
        if not len(rows):
            return RowOutput(hidden.new_zeros((0, self._forward.model.spec.vocab_size), dtype=torch.float32))
        padded = self._to_device(np.concatenate([rows, np.zeros(-len(rows) % ROW_TILE, np.int64)]))
        logits = head(hidden[padded])[: len(rows)]
        return RowOutput(logits, None, None if gates is None else gates[padded[: len(rows)]])

    def _decode_rows(self, runs: Sequence[RowRun], depth: int, every_row: bool = False) -> RowOutput:
        kept: list[RowOutput] = []
        for run in runs:
            columns = run_columns(run, self._ledger, self._forward.arena.null_block)
            for start in range(0, len(columns), self._decode.max_rows):
                part = part_of(columns, start, min(start + self._decode.max_rows, len(columns)))
                output = self._decode.run(part, depth, self._previous)
                is_last = start + len(part) == len(columns)
                if every_row:
                    kept.append(output.kept())
                elif is_last and run.sampling is not None:
                    kept.append(output.rows(len(part) - 1, len(part)).kept())
        if not kept:
            return RowOutput(torch.zeros((0, self._forward.model.spec.vocab_size), device=self._previous.device))
        gates = [output.gates for output in kept if output.gates is not None]
        return RowOutput(torch.cat([output.logits for output in kept]), None, torch.cat(gates) if gates else None)

    def _hand_over(self, plan: StepPlan, choice: Choice) -> Submitted:
        """Keep the tokens for the next step, and send them on their way to the host."""
        count, choice = len(choice.token_ids), choice.on_host()
        self._previous[:count].copy_(choice.token_ids)
        if not self._is_cuda:
            return Submitted(plan, choice, choice.token_ids, None)
        on_host = self._results[plan.step % _NUM_RESULTS][:count]
        on_host.copy_(self._previous[:count], non_blocking=True)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's stubs leave it out
        done.record()
        return Submitted(plan, choice, on_host, done)
