"""Philox against the published vectors of its authors' library (Random123, kat_vectors)."""

import pytest
import torch

from kernels.philox import Purpose, philox_4x32, random_words

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in words(counter))
    k0, k1 = (torch.tensor(word) for word in words(key))
    assert [int(word) for word in philox_4x32((c0, c1, c2, c3), (k0, k1))] == words(expected)


def test_a_word_is_named_by_seed_position_purpose_and_column() -> None:
    seed, position, column = 0x299F31D0A4093822, (7 << 32) + 5, 6
    drawn = random_words(torch.tensor([seed]), torch.tensor([position]), Purpose.SAMPLING, 9)
    assert drawn.shape == (1, 9)
    counter = (torch.tensor(column // 4), torch.tensor(5), torch.tensor(7), torch.tensor(int(Purpose.SAMPLING)))
    expected = philox_4x32(counter, (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))[column % 4]
    assert int(drawn[0, column]) == int(expected)


def test_rows_and_widths_do_not_matter() -> None:
    seeds = torch.tensor([1, -1, 2**62, 1])  # -1 holds the bits of 2^64 - 1
    positions = torch.tensor([0, 3, 2**33, 1])
    all_words = random_words(seeds, positions, Purpose.SAMPLING, 64)
    for row in range(4):
        alone = random_words(seeds[row : row + 1], positions[row : row + 1], Purpose.SAMPLING, 10)
        assert torch.equal(alone[0], all_words[row, :10])
    assert all_words.min() >= 0
    assert all_words.max() < 2**32
    assert len({tuple(row) for row in all_words.tolist()}) == 4


def test_purposes_share_nothing() -> None:
    seed, position = torch.tensor([9]), torch.tensor([4])
    drawn = [random_words(seed, position, purpose, 32) for purpose in Purpose]
    assert not torch.isin(drawn[0], drawn[1]).any()
