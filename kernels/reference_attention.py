"""Paged attention in plain torch, laid out so that a row's bits depend on its own query and keys alone.

Keys are taken in tiles that stand at fixed positions. A row's maximum over its key tiles is exact, and its sums run
over them in order; a tile that the row does not see adds zero, so it does not matter how far other rows look.

Shape letters are those of `kernels.ops`; here also G query tiles of T = ROW_TILE rows, A query groups computed
together, Q rows of each, D key tiles that each sees, S keys of a key tile, r query heads a key/value head, R = r * Q
rows of one product.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.invariant import Products
from kernels.ops import ROW_TILE, AttentionPlan, DecodePlan, PackedPlan, PackedRun, TiledPlan

KEY_TILE = 64
"""Fewest keys of a key tile."""
_GROUP_TILES = (16, 4, 1)
"""Query tiles that may be computed as one group, largest first. Its tiles share the keys they read."""
_MOST_KEY_BYTES = 3 << 19
"""Bytes of keys in float32 gathered at once, unless one group alone needs more. What is computed of them stays in a
core's caches then, and is never so large that the allocator asks the system for every piece of it."""
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class _Tiles:
    """A plan cut into tiles: consecutive positions of one request. Padding entries repeat a valid row."""

    rows: Tensor  # [G, T] int64
    positions: Tensor  # [G, T] int64, -1 for padding
    block_tables: Tensor  # [G, B] int64

    @classmethod
    def of(cls, plan: AttentionPlan) -> "_Tiles":
        if isinstance(plan, DecodePlan):
            return cls._of_decode(plan)
        if isinstance(plan, TiledPlan):
            tiles = [tile for tile in plan.tiles.tolist() if tile[2]]
            runs = tuple(PackedRun(first_row, num_rows, position) for _, first_row, num_rows, position in tiles)
            return cls._of_packed(PackedPlan(runs, plan.block_tables[[tile[0] for tile in tiles]]))
        return cls._of_packed(plan)

    @classmethod
    def _of_decode(cls, plan: DecodePlan) -> "_Tiles":
        """A tile for each real row, which is its only one."""
        (rows,) = torch.nonzero(plan.positions >= 0, as_tuple=True)
        positions = plan.positions.new_full((len(rows), ROW_TILE), -1)
        positions[:, 0] = plan.positions[rows]
        return cls(rows.unsqueeze(1).expand(-1, ROW_TILE), positions, plan.block_tables[rows].long())

    @classmethod
    def _of_packed(cls, plan: PackedPlan) -> "_Tiles":
        device = plan.block_tables.device
        rows, positions, owners = [], [], []
        for index, run in enumerate(plan.runs):
            num_tiles = -(-run.num_rows // ROW_TILE)
            place = torch.arange(num_tiles * ROW_TILE, device=device).view(num_tiles, ROW_TILE)
            real = place < run.num_rows
            rows.append(torch.where(real, run.first_row + place, run.first_row))
            positions.append(torch.where(real, run.first_position + place, -1))
            owners += [index] * num_tiles
        return cls(torch.cat(rows), torch.cat(positions), plan.block_tables[torch.tensor(owners, device=device)].long())


@dataclass(frozen=True)
class QueryGroups:
    """Groups of one shape, computed together; the same for every plane."""

    rows: Tensor  # [A, Q] int64
    real: Tensor  # [A, Q] bool: not padding
    blocks: Tensor  # [A, D * blocks a key tile] int64
    hidden: Tensor  # [D, A, 1, 1, Q, S] bool: keys after the row's position
    unwritten: Tensor  # [A, 1, S, 1] bool: keys of the last key tile after the group's last position


def group_queries(plan: AttentionPlan, arena: Tensor) -> tuple[QueryGroups, ...]:
    """All query tiles of a plan, in as few products as their shapes and that of `arena` [blocks, planes, 2, block_size,
    C, d] allow."""
    block_size, num_kv_heads, head_dim = arena.shape[3:]
    key_tile, all_tiles = _key_tile(block_size), _Tiles.of(plan)
    most_key_tiles = _MOST_KEY_BYTES // (4 * key_tile * num_kv_heads * head_dim)
    if not len(all_tiles.rows):
        return ()
    last_positions = all_tiles.positions.amax(dim=1).tolist()
    by_shape: dict[tuple[int, int], list[int]] = {}
    for first_tile, num_tiles in _neighbours(all_tiles):
        last = max(0, *last_positions[first_tile : first_tile + num_tiles])
        by_shape.setdefault((num_tiles, last // key_tile + 1), []).append(first_tile)
    groups = []
    for (num_tiles, num_key_tiles), first_tiles in by_shape.items():
        at_once = max(1, most_key_tiles // num_key_tiles)
        for start in range(0, len(first_tiles), at_once):
            firsts = torch.tensor(first_tiles[start : start + at_once], device=all_tiles.rows.device)
            tiles = firsts.unsqueeze(1) + torch.arange(num_tiles, device=firsts.device)  # [A, tiles a group]
            groups.append(_groups_of(all_tiles, tiles, num_key_tiles, block_size))
    return tuple(groups)


def attend(
    q: Tensor,  # [N, H, d]
    arena: Tensor,
    planes: Tensor,  # [N] int64
    groups: tuple[QueryGroups, ...],
    scale: float,
    products: Products,
) -> Tensor:
    """Causal attention, softmax in float32: [N, H, d]; zero for rows that are in no group."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    scaled = q.float() * scale
    num_blocks, num_planes, _, block_size, num_kv_heads, head_dim = arena.shape
    sides = arena.view(num_blocks * num_planes * 2, block_size, num_kv_heads, head_dim)
    for group in groups:
        keys = 2 * (group.blocks * num_planes + planes[group.rows[:, :1]])  # [A, blocks]; values stand right behind
        key_tiles = _gather(sides, keys, group.hidden.shape[0])
        value_tiles = _gather(sides, keys + 1, group.hidden.shape[0]).contiguous()
        mixed = _attend_groups(scaled[group.rows], key_tiles, value_tiles, group, products)  # [A, Q, H, d]
        out[group.rows[group.real]] = mixed[group.real].to(q.dtype)
    return out


def _attend_groups(
    q: Tensor,  # [A, Q, H, d] float32, scaled
    key_tiles: Tensor,  # [D, A, C, S, d] float32
    value_tiles: Tensor,  # [D, A, C, S, d] float32
    group: QueryGroups,
    products: Products,
) -> Tensor:
    """Attention of one group's rows: [A, Q, H, d]."""
    num_groups, num_rows, _, head_dim = q.shape
    num_key_tiles, _, num_kv_heads, key_tile, _ = key_tiles.shape
    # Beyond what is written an arena may hold anything, NaN too, which a weight of zero would not hide.
    value_tiles[-1].masked_fill_(group.unwritten, 0.0)

    by_head = q.view(num_groups, num_rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # [A, C, r, Q, d]
    queries = by_head.flatten(2, 3).expand(num_key_tiles, -1, -1, -1, -1)  # [D, A, C, R, d]
    scores = products.bmm_transposed(queries.flatten(0, 2), key_tiles.flatten(0, 2))  # [D * A * C, R, S]
    scores = scores.view(num_key_tiles, num_groups, num_kv_heads, -1, num_rows, key_tile)  # [D, A, C, r, Q, S]
    scores.masked_fill_(group.hidden, -torch.inf)
    peaks = scores.amax(dim=(0, 5), keepdim=True).clamp_(min=_LOWEST)  # [1, A, C, r, Q, 1]
    weights = scores.sub_(peaks).exp_()
    sums = _sum_in_order(weights.sum(dim=5))  # [A, C, r, Q]
    mixed = products.bmm(weights.flatten(3, 4).flatten(0, 2), value_tiles.flatten(0, 2))  # [D * A * C, R, d]
    mixed = _sum_in_order(mixed.view(num_key_tiles, num_groups, num_kv_heads, -1, num_rows, head_dim))
    return (mixed / sums.unsqueeze(4)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over the first axis, one after the other, so that trailing zeros change no bit."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _gather(sides: Tensor, index: Tensor, num_key_tiles: int) -> Tensor:
    """Blocks' keys or values [A, b] of [planes' sides, block_size, C, d] as key tiles: [D, A, C, S, d] float32."""
    num_groups, (_, _, num_kv_heads, head_dim) = index.shape[0], sides.shape
    tiles = sides.index_select(0, index.flatten()).view(num_groups, num_key_tiles, -1, num_kv_heads, head_dim)
    return tiles.permute(1, 0, 3, 2, 4).float()


def _neighbours(tiles: _Tiles) -> list[tuple[int, int]]:
    """The tiles cut into groups (first tile, count) of sizes in _GROUP_TILES; a group's tiles continue one another."""
    positions, tables = tiles.positions, tiles.block_tables
    follows = (positions[1:, 0] == positions[:-1, 0] + positions.shape[1]) & (tables[1:] == tables[:-1]).all(dim=1)
    starts = [0, *(index + 1 for index, joined in enumerate(follows.tolist()) if not joined), len(positions)]
    groups = []
    for start, end in pairwise(starts):
        for size in _GROUP_TILES:
            while start + size <= end:
                groups.append((start, size))
                start += size
    return groups


def _groups_of(all_tiles: _Tiles, tiles: Tensor, num_key_tiles: int, block_size: int) -> QueryGroups:
    """Groups of the tiles [A, tiles a group], each over `num_key_tiles` key tiles."""
    key_tile, device = _key_tile(block_size), tiles.device
    positions = all_tiles.positions[tiles].flatten(1)  # [A, Q]
    last = positions.amax(dim=1)  # [A]
    key_positions = torch.arange(num_key_tiles * key_tile, device=device).view(num_key_tiles, key_tile)  # [D, S]
    # Past the end of a table nothing is visible: any block will do.
    entries = torch.arange(num_key_tiles * key_tile // block_size, device=device)
    entries = entries.clamp(max=all_tiles.block_tables.shape[1] - 1)
    return QueryGroups(
        rows=all_tiles.rows[tiles].flatten(1),
        real=positions >= 0,
        blocks=all_tiles.block_tables[tiles[:, 0]][:, entries],
        hidden=key_positions[:, None, None, None, None] > positions[None, :, None, None, :, None],
        unwritten=(key_positions[-1] > last.unsqueeze(1))[:, None, :, None],
    )


def _key_tile(block_size: int) -> int:
    """Keys of whole blocks, KEY_TILE or a little more, and a multiple of 4.

    With 8 rows a query tile, the elements of any score tensor are then a multiple of 32: none falls to the scalar tail
    of a vectorised loop, where exp has other bits.
    """
    blocks = -(-KEY_TILE // block_size)
    return (blocks + -blocks % (4 // math.gcd(block_size, 4))) * block_size
