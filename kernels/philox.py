"""Philox4x32-10 in plain int64 tensors: a counter-based generator, so that a draw depends on its key alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. A draw here is named by
(seed, position, purpose, column); who draws it, in which batch and on which device, does not matter.

Shape letters: R rows, W columns. Words are 32-bit values in int64 tensors.
"""

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a draw is for; draws for different purposes share no counter."""

    SAMPLING = 1
    INITIAL_STATE = 2


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of the bijection; every tensor holds words, and their shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two words wraps around int64, which keeps its 64 bits.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(second) ^ c1 ^ k0, second & _WORD, _high(first) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, purpose: int, num_columns: int) -> Tensor:
    """Words [R, W] of seeds [R] (the bits of an unsigned 64-bit number) at positions [R]; all int64.

    Key (seed low, seed high), counter (column // 4, position low, position high, purpose), word column % 4.
    """
    groups = torch.arange(-(-num_columns // 4), device=seeds.device).unsqueeze(0)  # [1, W / 4]
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)  # [R, 1]
    counter = (groups, positions & _WORD, _high(positions), torch.full_like(positions, purpose))
    words = philox_4x32(counter, (seeds & _WORD, _high(seeds)))
    return torch.stack(words, dim=-1).flatten(1)[:, :num_columns]


def _high(value: Tensor) -> Tensor:
    """The upper 32 of 64 bits."""
    return (value >> 32) & _WORD
