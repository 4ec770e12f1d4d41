"""Paged attention against a plain oracle in float64, over arenas that hold NaN wherever a row may not look.

Small shapes run in the interpreter where there is no GPU; the same tests at more and at real shapes are marked `gpu`.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import decode_attention as decode
from kernels import packed_attention as packed
from kernels.ops import DecodePlan, PackedPlan, PackedRun, TiledPlan, tiles_of
from kernels.reference import reference_ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_PLANES = 3
LENGTHS = (100, 1, 517, 16, 0, 15, 17, 64)  # 0: a padding row


@dataclass(frozen=True)
class Shape:
    """Of heads and of the arena's blocks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def queries(self, num_rows: int, generator: torch.Generator) -> Tensor:
        """[N, H, d], a strided part of what a projection writes."""
        shape = (num_rows, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        return _normal(shape, generator, self.dtype)[:, : self.num_heads]


SMALL = Shape(4, 4, 16)
GROUPED = Shape(4, 2, 32, dtype=torch.bfloat16)
ODD = Shape(5, 5, 96)
OURO = Shape(16, 16, 128, dtype=torch.bfloat16)
HUGINN = Shape(55, 55, 96, dtype=torch.bfloat16)
MANY_SHAPES = (
    Shape(4, 4, 16, 8),
    Shape(4, 4, 16, 64, torch.bfloat16),
    Shape(4, 2, 32),
    GROUPED,
    replace(ODD, dtype=torch.bfloat16),
    replace(ODD, block_size=64),
    Shape(4, 2, 96, 32, torch.bfloat16),
    Shape(4, 4, 128, 16, torch.bfloat16),
    Shape(4, 2, 128, 8, torch.bfloat16),
    Shape(5, 5, 128),
)
"""Every head size with both dtypes, and every other value with each of these; each shape is compiled anew."""


def gpu(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.gpu)


def _normal(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def _generator(*key: object) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(zlib.crc32(repr(key).encode()))


def _paged(lengths: Sequence[int], shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An arena with keys and values of requests of these lengths in shuffled blocks, NaN elsewhere; block tables with
    columns to spare.
    """
    size = shape.block_size
    counts = [-(-length // size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3, generator=generator, device=DEVICE)
    arena_shape = (len(blocks), NUM_PLANES, 2, size, shape.num_kv_heads, shape.head_dim)
    arena = torch.full(arena_shape, torch.nan, dtype=shape.dtype, device=DEVICE)
    tables = torch.full((len(lengths), max(counts) + 2), int(blocks[-1]), device=DEVICE)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = blocks[taken : taken + count]
        taken += count
        positions = torch.arange(length, device=DEVICE)
        kv = _normal((length, *arena_shape[1:3], *arena_shape[4:]), generator, shape.dtype)
        arena[tables[row, positions // size], :, :, positions % size] = kv
    return arena, tables


def _oracle(q: Tensor, arena: Tensor, plane: int, table: Tensor, length: int, shape: Shape) -> Tensor:
    """Attention of one row [H, d] to the first `length` positions: [H, d] float64."""
    positions = torch.arange(length, device=DEVICE)
    kv = arena[table[positions // shape.block_size], plane, :, positions % shape.block_size].double()
    keys, values = kv.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=2).unbind(1)  # [length, H, d]
    weights = (torch.einsum("hd,thd->ht", q.double(), keys) * shape.scale).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


def _assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.is_contiguous()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def _decode_config(num_rows: int, shape: Shape, **changes: int) -> decode.DecodeConfig:
    """The one that would be chosen; in the interpreter, which takes long over each program and tile, with few."""
    config = decode._config(num_rows, shape.num_heads, shape.head_dim)
    if DEVICE.type == "cpu":
        config = replace(config, max_splits=3, num_tokens=16)
    return replace(config, **changes)


def _check_decode(shape: Shape, lengths: Sequence[int], **changes: int) -> None:
    generator = _generator(shape, lengths, changes)
    arena, tables = _paged(lengths, shape, generator)
    q = shape.queries(len(lengths), generator)
    planes = torch.randint(0, NUM_PLANES, (len(lengths),), generator=generator, device=DEVICE)
    plan = DecodePlan(torch.tensor(lengths, device=DEVICE) - 1, tables)
    config = _decode_config(len(lengths), shape, **changes)
    actual = decode.decode_attention_tuned(q, arena, planes, plan, shape.scale, config)
    expected = torch.zeros(*q.shape, dtype=torch.float64, device=DEVICE)
    for row, length in enumerate(lengths):
        if length:
            expected[row] = _oracle(q[row], arena, int(planes[row]), tables[row], length, shape)
    _assert_close(actual, expected, shape.dtype)


@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [(SMALL, 8), (GROUPED, 2), (ODD, 1), (replace(ODD, dtype=torch.bfloat16), 2)]
    + [gpu(shape, num_rows) for shape in MANY_SHAPES for num_rows in (1, 2, 8, 33)],
)
def test_a_decode_row_attends_to_all_it_may_see(shape: Shape, num_rows: int) -> None:
    _check_decode(shape, (LENGTHS * 5)[:num_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [OURO, HUGINN])
@pytest.mark.parametrize(("num_rows", "length"), [(1, 512), (1, 5000), (32, 2048), (128, 576)])
def test_decode_at_real_sizes(shape: Shape, num_rows: int, length: int) -> None:
    _check_decode(shape, [length - 7 * row % 31 for row in range(num_rows)])


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (SMALL, {"max_splits": 1}),
        (SMALL, {"max_splits": 5, "min_split": 8, "num_tokens": 4, "num_heads": 2}),
        (replace(SMALL, block_size=12), {}),
        (replace(SMALL, block_size=512), {"num_tokens": 16}),
    ]
    + [
        gpu(shape, {"num_stages": stages, "num_tokens": tokens, "num_heads": heads, "num_warps": heads // 2})
        for shape in (OURO, HUGINN)
        for stages, tokens, heads in ((1, 4, 8), (1, 8, 16), (2, 16, 8), (3, 8, 4), (4, 4, 8))
    ],
)
def test_decode_is_right_however_it_is_cut(shape: Shape, changes: dict[str, int]) -> None:
    _check_decode(shape, (100, 17, 1, 0), **changes)


@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [(SMALL, 2), *(gpu(shape, num_rows) for shape in (SMALL, OURO, HUGINN) for num_rows in (2, 8, 33, 128))],
)
def test_the_bits_of_a_decode_row_depend_on_no_other(shape: Shape, num_rows: int) -> None:
    lengths = (LENGTHS * 16)[:num_rows]
    generator = _generator(shape, num_rows)
    arena, tables = _paged(lengths, shape, generator)
    q, planes = shape.queries(num_rows, generator), torch.arange(num_rows, device=DEVICE) % NUM_PLANES
    positions = torch.tensor(lengths, device=DEVICE) - 1
    config = _decode_config(num_rows, shape)
    among = decode.decode_attention_tuned(q, arena, planes, DecodePlan(positions, tables), shape.scale, config)
    for row in range(0, num_rows, max(1, num_rows // 8)):
        alone = torch.full_like(positions, -1)
        alone[-1] = positions[row]
        moved_q, moved_planes, moved_tables = q.clone(), planes.clone(), tables.clone()
        moved_q[-1], moved_planes[-1], moved_tables[-1] = q[row], planes[row], tables[row]
        plan = DecodePlan(alone, moved_tables)
        out = decode.decode_attention_tuned(moved_q, arena, moved_planes, plan, shape.scale, config)
        assert torch.equal(out[-1], among[row])
        assert not out[:-1].any()


def _packed_config(shape: Shape, **changes: int) -> packed.PackedConfig:
    """The one that would be chosen; in the interpreter with few tiles."""
    config = packed._config(shape.dtype)
    if DEVICE.type == "cpu":
        config = replace(config, num_rows=32, num_keys=32)
    return replace(config, **changes)


# Runs as (first position, number of rows), with padding rows before and after.
RUNS = ((0, 1), (0, 40), (37, 21), (99, 1), (16, 17))


def _check_packed(
    shape: Shape, runs: Sequence[tuple[int, int]], padding: int = 2, config: packed.PackedConfig | None = None
) -> None:
    generator = _generator(shape, runs)
    arena, tables = _paged([start + count for start, count in runs], shape, generator)
    planned, first_row = [], padding
    for start, count in runs:
        planned.append(PackedRun(first_row, count, start))
        first_row += count
    num_rows = first_row + padding
    q, planes = shape.queries(num_rows, generator), torch.zeros(num_rows, dtype=torch.int64)
    expected = torch.zeros(*q.shape, dtype=torch.float64, device=DEVICE)
    for index, run in enumerate(planned):
        plane = index % NUM_PLANES
        planes[run.first_row : run.first_row + run.num_rows] = plane
        for offset in range(run.num_rows):
            row, length = run.first_row + offset, run.first_position + offset + 1
            expected[row] = _oracle(q[row], arena, plane, tables[index], length, shape)
    plan = PackedPlan(tuple(planned), tables)
    config = config or _packed_config(shape)
    for _ in range(2):  # the second time with tiles that are already worked out
        actual = packed.packed_attention_tuned(q, arena, planes.to(DEVICE), plan, shape.scale, config)
        _assert_close(actual, expected, shape.dtype)


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        (Shape(2, 2, 16), RUNS),
        (GROUPED, ((0, 40), (5, 1))),
        (replace(ODD, dtype=torch.bfloat16), ((126, 4),)),
        *(gpu(shape, (*RUNS, (512, 5), (0, 300))) for shape in MANY_SHAPES),
    ],
)
def test_packed_rows_attend_to_all_they_may_see(shape: Shape, runs: tuple[tuple[int, int], ...]) -> None:
    _check_packed(shape, runs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [OURO, HUGINN])
@pytest.mark.parametrize("runs", [((0, 700),), ((0, 1), (1500, 1), (640, 257), (0, 129))])
def test_packed_at_real_sizes(shape: Shape, runs: tuple[tuple[int, int], ...]) -> None:
    _check_packed(shape, runs, padding=0)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (replace(GROUPED, num_heads=2, num_kv_heads=1), {"num_rows": 16, "mask_all": True}),
        *(
            gpu(shape, {"num_rows": rows, "num_keys": keys, "num_warps": rows // 16, "num_stages": stages} | more)
            for shape in (OURO, HUGINN)
            for rows, keys, stages, more in (
                (128, 128, 2, {"mask_all": True}),
                (128, 64, 3, {"max_registers": 128}),
                (64, 64, 3, {}),
            )
        ),
    ],
)
def test_packed_is_right_however_it_is_cut(shape: Shape, changes: dict[str, int]) -> None:
    _check_packed(shape, RUNS, config=_packed_config(shape, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SMALL, GROUPED, OURO, HUGINN])
def test_the_bits_of_a_packed_row_do_not_depend_on_how_its_prompt_is_cut(shape: Shape) -> None:
    length, cuts = 700, (0, 1, 130, 512, 513)
    generator = _generator(shape, length)
    arena, tables = _paged([length], shape, generator)
    q, planes = shape.queries(length, generator), torch.zeros(length, dtype=torch.int64, device=DEVICE)
    whole = PackedPlan((PackedRun(0, length, 0),), tables)
    runs = [PackedRun(start, end - start, start) for start, end in zip(cuts, (*cuts[1:], length), strict=True)]
    pieces = PackedPlan(tuple(runs), tables.expand(len(runs), -1))
    outs = [packed.packed_attention(q, arena, planes, plan, shape.scale) for plan in (whole, pieces)]
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(*outs)


@pytest.mark.parametrize("shape", [SMALL, GROUPED, gpu(OURO), gpu(HUGINN)])
def test_tiles_are_another_way_to_say_runs(shape: Shape) -> None:
    lengths = [33, 5, 18]
    generator = _generator(shape, "tiles")
    arena, tables = _paged(lengths, shape, generator)
    runs = (PackedRun(0, 20, 13), PackedRun(20, 5, 0), PackedRun(25, 1, 17))
    q, planes = shape.queries(40, generator), torch.ones(40, dtype=torch.int64, device=DEVICE)
    by_runs = PackedPlan(runs, tables)
    for ops, tile_rows in (
        (reference_ops(deterministic=False), 8),
        (None, packed.tile_rows(shape.dtype)),
    ):
        tiles = torch.zeros((9, 4), dtype=torch.int32, device=DEVICE)
        made = torch.tensor(tiles_of(runs, tile_rows), dtype=torch.int32)
        tiles[: len(made)] = made.to(DEVICE)
        attend = packed.packed_attention if ops is None else ops.paged_attention
        whole, tiled = (attend(q, arena, planes, plan, shape.scale) for plan in (by_runs, TiledPlan(tiles, tables)))
        assert torch.isfinite(whole).all()
        assert torch.equal(whole, tiled)
        assert tiled[26:].count_nonzero() == 0


@pytest.mark.gpu
def test_a_captured_decode_serves_every_filling_of_its_plan() -> None:
    lengths = [900, 40, 0, 333]
    generator = _generator("captured")
    arena, tables = _paged(lengths, OURO, generator)
    q, planes = OURO.queries(4, generator), torch.arange(4, device=DEVICE) % NUM_PLANES
    plan = DecodePlan(torch.full((4,), -1, device=DEVICE), torch.zeros_like(tables))
    decode.decode_attention(q, arena, planes, plan, OURO.scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode.decode_attention(q, arena, planes, plan, OURO.scale)
    for seen in (lengths, [1, 16, 0, 17], [0, 0, 0, 0], [512, 8, 0, 333]):
        plan.positions.copy_(torch.tensor(seen) - 1)
        plan.block_tables.copy_(tables)
        out.fill_(torch.nan)
        graph.replay()
        fresh = DecodePlan(plan.positions.clone(), tables)
        assert torch.isfinite(out).all()
        assert torch.equal(out, decode.decode_attention(q, arena, planes, fresh, OURO.scale))


@pytest.mark.gpu
def test_an_arena_may_have_more_elements_than_32_bits_count() -> None:
    generator, length = _generator("large"), 200
    small, tables = _paged([length], OURO, generator)
    num_blocks = 2**32 // small[0].numel() + len(small)
    arena = torch.full((num_blocks, *small.shape[1:]), torch.nan, dtype=OURO.dtype, device=DEVICE)
    arena[-len(small) :] = small
    far_tables = tables + (num_blocks - len(small))
    q, planes = OURO.queries(length, generator), torch.full((length,), 2, device=DEVICE)
    plan = PackedPlan((PackedRun(0, length, 0),), tables), PackedPlan((PackedRun(0, length, 0),), far_tables)
    near = packed.packed_attention(q, small, planes, plan[0], OURO.scale)
    assert torch.isfinite(near).all()
    assert torch.equal(packed.packed_attention(q, arena, planes, plan[1], OURO.scale), near)
    positions = torch.tensor([length - 1], device=DEVICE)
    near = decode.decode_attention(q[:1], small, planes[:1], DecodePlan(positions, tables), OURO.scale)
    assert torch.isfinite(near).all()
    assert torch.equal(
        decode.decode_attention(q[:1], arena, planes[:1], DecodePlan(positions, far_tables), OURO.scale), near
    )
