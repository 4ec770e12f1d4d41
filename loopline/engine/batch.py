"""What a step computes, as columns on the host and then as tensors: which row computes what, where its KV goes, what it
attends to.

Decode rows are one position each of many requests, and may be padded to any number of rows: padding writes the null
block and attends to nothing. A packed batch is consecutive positions of a few requests. Host work is a few array
operations for all decode rows, and a few more for each run.

Shape letters: N rows, D decode rows, B blocks of the longest table, R runs, S sampled rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.ops import ROW_TILE, PackedPlan, PackedRun
from loopline.engine.forward import Rows
from loopline.kv.block_books import IntArray
from loopline.kv.ledger import Ledger
from loopline.request import InitialState, Request, SamplingParams
from loopline.sched.plan import KNOWN, DecodeRows, RowRun

ToDevice = Callable[[Any], Tensor]
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, eq=False)
class RequestColumns:
    """What a row inherits from its request, [D] each."""

    seeds: IntArray  # the request seed's 64 bits
    zeros: IntArray  # 1: the initial state is all zeros
    temperature: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"  # 0: greedy

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "RequestColumns":
        return cls(
            np.array([signed_seed(one.seed) for one in params], np.int64),
            np.array([one.initial_state is InitialState.ZEROS for one in params], np.int64),
            np.array([chosen_temperature(one) for one in params], np.float64),
        )


@dataclass(frozen=True, eq=False)
class DecodeColumns:
    """Rows of a decode step on the host; int64 [D] unless said."""

    token_ids: IntArray
    sources: IntArray  # index into the previous step's chosen tokens, or KNOWN
    positions: IntArray
    slots: IntArray  # block * block_size + offset
    request: RequestColumns
    tables: IntArray  # [D, B]

    def __len__(self) -> int:
        return len(self.positions)


def decode_columns(decode: DecodeRows, request: RequestColumns, ledger: Ledger) -> DecodeColumns:
    """One new position of each of many requests."""
    positions, count = decode.positions, len(decode)
    tables = ledger.block_tables(decode.book_rows, int(positions.max()) // ledger.block_size + 1)
    blocks = tables[np.arange(count), positions // ledger.block_size]
    return DecodeColumns(
        token_ids=decode.token_ids,
        sources=np.full(count, KNOWN, np.int64) if decode.sources is None else decode.sources,
        positions=positions,
        slots=blocks * ledger.block_size + positions % ledger.block_size,
        request=request,
        tables=tables,
    )


def run_columns(run: RowRun, ledger: Ledger, null_block: int) -> DecodeColumns:
    """A run's positions as decode rows, every one with the run's table."""
    count = run.num_tokens
    positions, slots, table = _run_places(run, ledger, null_block)
    request = RequestColumns.of([run.params] * count)
    return DecodeColumns(
        token_ids=np.array(run.token_ids, np.int64),
        sources=np.full(count, KNOWN, np.int64),
        positions=positions,
        slots=slots,
        request=request,
        tables=np.broadcast_to(table, (count, len(table))),
    )


def part_of(columns: DecodeColumns, start: int, end: int) -> DecodeColumns:
    """Rows [start, end)."""
    request = columns.request
    return DecodeColumns(
        token_ids=columns.token_ids[start:end],
        sources=columns.sources[start:end],
        positions=columns.positions[start:end],
        slots=columns.slots[start:end],
        request=RequestColumns(request.seeds[start:end], request.zeros[start:end], request.temperature[start:end]),
        tables=columns.tables[start:end],
    )


class RequestColumnsCache:
    """The columns of the last decode batch's requests: they stay while the same requests decode."""

    def __init__(self) -> None:
        self._requests: tuple[Request, ...] | None = None
        self._columns: RequestColumns | None = None

    def get(self, requests: tuple[Request, ...]) -> RequestColumns:
        if self._columns is None or self._requests is not requests:
            self._requests = requests
            self._columns = RequestColumns.of([request.params for request in requests])
        return self._columns


@dataclass(frozen=True, eq=False)
class PackedColumns:
    """Runs one after the other, on the host, without padding; int64 [N] unless said."""

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    seeds: IntArray
    zeros: IntArray  # 0 or 1
    runs: tuple[PackedRun, ...]
    tables: IntArray  # [R, B]


def packed_columns(runs: Sequence[RowRun], ledger: Ledger, null_block: int) -> PackedColumns:
    """Lay runs out."""
    places = [_run_places(run, ledger, null_block) for run in runs]
    width = max(len(table) for _, _, table in places)
    counts = [run.num_tokens for run in runs]
    starts = np.cumsum([0, *counts])
    request = RequestColumns.of([run.params for run in runs])
    return PackedColumns(
        token_ids=np.concatenate([np.array(run.token_ids, np.int64) for run in runs]),
        positions=np.concatenate([positions for positions, _, _ in places]),
        slots=np.concatenate([slots for _, slots, _ in places]),
        seeds=np.repeat(request.seeds, counts),
        zeros=np.repeat(request.zeros, counts),
        runs=tuple(
            PackedRun(int(start), run.num_tokens, run.first_position) for start, run in zip(starts, runs, strict=False)
        ),
        tables=np.stack([np.pad(table, (0, width - len(table)), mode="edge") for _, _, table in places]),
    )


def packed_rows(columns: PackedColumns, null_slot: int, to_device: ToDevice) -> Rows:
    """The columns as tensors, padded to a multiple of ROW_TILE."""
    padding = -len(columns.positions) % ROW_TILE

    def column(values: IntArray, fill: int) -> Tensor:
        return to_device(np.concatenate([values, np.full(padding, fill, np.int64)]))

    return Rows(
        token_ids=column(columns.token_ids, 0),
        positions=column(columns.positions, 0),
        slots=column(columns.slots, null_slot),
        seeds=column(columns.seeds, 0),
        zeros=column(columns.zeros, 1).bool(),
        plan=PackedPlan(columns.runs, to_device(columns.tables)),
    )


def sampled_rows(runs: Sequence[RowRun]) -> IntArray:
    """The last row of each run that has a Sampling, [S]."""
    ends = np.cumsum([run.num_tokens for run in runs])
    return np.array([end - 1 for end, run in zip(ends, runs, strict=True) if run.sampling], np.int64)


def pinned_copier(device: torch.device) -> ToDevice:
    """Puts host arrays on `device` without making the host wait for what the device is doing."""

    def to_device(array: Any) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return to_device


def chosen_temperature(params: SamplingParams) -> float:
    """The temperature to choose by; one that float32 has no room to divide logits by is 0, which is greedy."""
    return params.temperature if params.temperature >= _LEAST_TEMPERATURE else 0.0


def signed_seed(seed: int) -> int:
    """The int64 with the same 64 bits."""
    return seed - 2**64 if seed >= 2**63 else seed


def _run_places(run: RowRun, ledger: Ledger, null_block: int) -> tuple[IntArray, IntArray, IntArray]:
    """Positions and slots of a run's rows, and the blocks [B] up to its last position."""
    block_size = ledger.block_size
    positions = np.arange(run.first_position, run.first_position + run.num_tokens, dtype=np.int64)
    table = ledger.block_table(run.allocation)[: int(positions[-1]) // block_size + 1]
    if run.writes:
        slots = table[positions // block_size] * block_size + positions % block_size
    else:
        slots = np.full(run.num_tokens, null_block * block_size)
    return positions, slots, table
