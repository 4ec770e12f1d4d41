"""Matrix products, in two kinds: plain ones, and ones whose rows have the same bits in every batch.

A library picks another kernel at another number of rows, and with it another order of summation: float32 products of 1,
2 or 3 rows differ in their last bits from the same rows inside 8 (measured: MKL on AVX2). `InvariantProducts` therefore
cuts every product into pieces of a few fixed sizes, and uses a size only after it has seen, on this machine and at this
shape, that rows keep their bits in it. Nothing is assumed about the library. Holds for one torch thread.

Shape letters: N rows, K in features, M out features; B matrices of a batch, R rows of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

UNIT = 8
"""The smallest piece: rows of a product, or matrices of a batch of products. Inputs are padded to a multiple of it."""
PIECES = (128, 32, UNIT)
"""Sizes of pieces in rows, largest first, each a multiple of the next."""
BATCH_PIECES = (32, UNIT)
"""The same in matrices of a batch."""
ONE_BY_ONE = (1,)
"""The sizes where even a piece of UNIT does not keep bits: slow, and right by construction."""

Product = Callable[[Tensor, Tensor], Tensor]
Case = tuple[object, ...]
BatchedCut = tuple[int, tuple[int, ...]]  # rows of each matrix at a time, sizes of pieces of the batch


class Products(Protocol):
    """The two products that a forward pass is made of."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        ...

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by [B, K, M]: [B, R, M]."""
        ...

    def bmm_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by the rows of [B, M, K]: [B, R, M]."""
        ...


class PlainProducts:
    """The library's products as they are: fastest, and a row's last bits may depend on its batch."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        return functional.linear(x, weight)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by [B, K, M]: [B, R, M]."""
        return torch.bmm(a, b)

    def bmm_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by the rows of [B, M, K]: [B, R, M]."""
        return torch.bmm(a, b.mT)


@dataclass(frozen=True)
class InvariantProducts:
    """Products in which the bits of a row depend on that row and its right-hand side alone.

    How a shape is cut is found at its first use and never changes afterwards.
    """

    sizes: dict[Case, tuple[int, ...]] = field(default_factory=dict)
    batched_cuts: dict[Case, BatchedCut] = field(default_factory=dict)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[N, K] by the rows of [M, K]: [N, M]."""
        case: Case = ("linear", weight.dtype, weight.shape)
        if case not in self.sizes:
            self.sizes[case] = _linear_sizes(weight)
        x = x.contiguous()
        return _in_pieces(lambda rows, _: functional.linear(rows, weight), x, x, self.sizes[case])

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by [B, K, M]: [B, R, M]."""
        return self._batched("bmm", torch.bmm, a, b)

    def bmm_transposed(self, a: Tensor, b: Tensor) -> Tensor:
        """[B, R, K] by the rows of [B, M, K]: [B, R, M]."""
        return self._batched("bmm_transposed", _bmm_transposed, a, b)

    def _batched(self, name: str, product: Product, a: Tensor, b: Tensor) -> Tensor:
        case: Case = (name, a.dtype, a.shape[1:], b.shape[1:])
        if case not in self.batched_cuts:
            self.batched_cuts[case] = _batched_cut(product, a, b)
        rows, sizes = self.batched_cuts[case]
        return _in_pieces(_by_rows(product, rows), a.contiguous(), b.contiguous(), sizes)


def _bmm_transposed(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b.mT)


def _by_rows(product: Product, num_rows: int) -> Product:
    """A batched product done for `num_rows` rows of the left-hand matrices at a time."""

    def cut(a: Tensor, b: Tensor) -> Tensor:
        if a.shape[1] <= num_rows:
            return product(a, b)
        return torch.cat([product(rows.contiguous(), b) for rows in torch.split(a, num_rows, dim=1)], dim=1)

    return cut


def _linear_sizes(weight: Tensor) -> tuple[int, ...]:
    """Piece sizes in which rows by a weight of this shape keep their bits."""
    probe = _random(weight.shape, like=weight)
    rows = _random((PIECES[0], weight.shape[1]), like=weight)

    def product(x: Tensor, _: Tensor) -> Tensor:
        return functional.linear(x, probe)

    expected = _in_pieces(product, rows, rows, (UNIT,))
    for shift in range(1, UNIT):
        moved = rows[:UNIT].roll(shift, 0)
        if not torch.equal(product(moved, moved), expected[:UNIT].roll(shift, 0)):
            return ONE_BY_ONE
    return _sizes_that_keep(PIECES, product, rows, rows, expected)


def _batched_cut(product: Product, a: Tensor, b: Tensor) -> BatchedCut:
    """How matrices of these shapes may be multiplied so that every row has its bits of a piece of UNIT x UNIT rows."""
    num_rows = a.shape[1]
    left, right = _random((BATCH_PIECES[0], *a.shape[1:]), like=a), _random((BATCH_PIECES[0], *b.shape[1:]), like=b)
    expected = _in_pieces(_by_rows(product, UNIT), left, right, (UNIT,))
    few, rights = left[:UNIT, :UNIT].contiguous(), right[:UNIT]
    for shift in range(1, min(UNIT, num_rows)):
        moved = product(few.roll((shift, shift), (0, 1)), rights.roll(shift, 0))
        if not torch.equal(moved, expected[:UNIT, :UNIT].roll((shift, shift), (0, 1))):
            return 1, ONE_BY_ONE
    whole = _sizes_that_keep(BATCH_PIECES, product, left, right, expected)
    if whole:
        return num_rows, whole
    return UNIT, _sizes_that_keep(BATCH_PIECES, _by_rows(product, UNIT), left, right, expected)


def _sizes_that_keep(
    sizes: tuple[int, ...], product: Product, a: Tensor, b: Tensor, expected: Tensor
) -> tuple[int, ...]:
    """Those of `sizes` whose pieces compute `expected`, bit for bit."""
    return tuple(size for size in sizes if torch.equal(_in_pieces(product, a, b, (size,)), expected))


def _in_pieces(product: Product, a: Tensor, b: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`product` of consecutive pieces along the first axis, each as large as `sizes` (descending) allows."""
    count = a.shape[0]
    smallest = sizes[-1]
    missing = -count % smallest
    if missing:
        a, b = (torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) for x in (a, b))
    parts = []
    start = 0
    for size in sizes:
        while start + size <= count + missing:
            parts.append(product(a[start : start + size], b[start : start + size]))
            start += size
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Normal values from a fixed seed, in the dtype and on the device of `like`."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
