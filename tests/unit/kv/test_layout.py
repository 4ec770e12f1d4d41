"""Planes and bytes of both models' real geometries."""

from dataclasses import replace

import pytest

from loopline.errors import ConfigError
from loopline.kv.arena import allocate_arena
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Ledger

OURO = KVLayout(
    num_prelude=0, num_recurrent=24, num_coda=0, max_loops=4, block_size=16, kv_heads=16, head_dim=128, dtype="bf16"
)
HUGINN = KVLayout(
    num_prelude=2, num_recurrent=4, num_coda=2, max_loops=32, block_size=16, kv_heads=55, head_dim=96, dtype="bf16"
)


def test_bytes_of_the_public_models() -> None:
    assert (OURO.num_planes, OURO.token_bytes) == (96, 786_432)
    assert OURO.block_bytes == 12 * 2**20
    assert (HUGINN.num_planes, HUGINN.token_bytes) == (132, 2_787_840)
    assert HUGINN.unpacked_token_bytes / HUGINN.token_bytes > 1.88
    assert OURO.unpacked_token_bytes == OURO.token_bytes


@pytest.mark.parametrize("layout", [OURO, HUGINN])
def test_every_plane_has_one_owner(layout: KVLayout) -> None:
    recurrent = range(layout.num_prelude, layout.num_prelude + layout.num_recurrent)
    last = layout.num_prelude + layout.num_recurrent + layout.num_coda
    outside = [layer for layer in range(last) if layer not in recurrent]
    planes = [layout.plane(0, layer) for layer in outside]
    planes += [layout.plane(loop, layer) for loop in range(layout.max_loops) for layer in recurrent]
    assert sorted(planes) == list(range(layout.num_planes))
    assert planes == list(range(layout.num_planes)), "order: prelude, coda, then loop by loop"


def test_wrong_planes_are_refused() -> None:
    for loop, layer in ((4, 0), (-1, 0), (0, 24), (0, -1)):
        with pytest.raises(ValueError, match="allowed"):
            OURO.plane(loop, layer)
    with pytest.raises(ValueError, match="outside the recurrent block"):
        HUGINN.plane(1, 0)


def test_an_arena_is_one_range_of_blocks() -> None:
    layout = KVLayout(
        num_prelude=1, num_recurrent=2, num_coda=1, max_loops=3, block_size=4, kv_heads=2, head_dim=8, dtype="fp32"
    )
    arena = allocate_arena(layout, 5, "cpu")
    assert arena.null_block == 5
    assert arena.tensor.is_contiguous()
    assert arena.tensor[3].data_ptr() == arena.base_address + 3 * layout.block_bytes
    assert arena.tensor.numel() * 4 == arena.num_bytes == 6 * layout.block_bytes


def test_an_arena_that_cannot_be_had_says_how_large_it_was() -> None:
    with pytest.raises(ConfigError, match=r"\d+ bytes.*lower num_blocks"):
        allocate_arena(HUGINN, 2**30, "cpu")


def test_huginns_packed_arena_holds_almost_twice_the_tokens() -> None:
    """Two real arenas of the same bytes, filled until nothing more fits."""
    packed = replace(HUGINN, block_size=1)
    unpacked = replace(packed, num_prelude=0, num_recurrent=8, num_coda=0)
    assert unpacked.token_bytes == packed.unpacked_token_bytes
    budget = 256 * 2**20
    tokens = []
    for layout in (packed, unpacked):
        arena = allocate_arena(layout, budget // layout.block_bytes - 1, "cpu")
        assert arena.num_bytes <= budget
        ledger = Ledger(arena.num_blocks, layout.block_size)
        held = 0
        while ledger.reserve(1, 1) is not None:
            held += 1
        ledger.audit()
        tokens.append(held)
    assert tokens[0] / tokens[1] >= 1.88
