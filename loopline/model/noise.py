"""Huginn's initial state as a pure function of (seed, position, channel), so that a token's state does not depend on
its batch, its chunk or the worker that computes it.

The distribution is the public code's: a normal of standard deviation sqrt(2 / 5E), cut at three deviations, times
sqrt(E). It is drawn by table: 16 bits of a Philox word pick one of 65,536 equally likely quantiles.

Shape letters: N rows of a batch, E width.
"""

import functools
import math
from statistics import NormalDist

import torch
from torch import Tensor

from kernels.ops import Ops

TABLE_BITS = 16
_CUT = 3.0
_STD = math.sqrt(2.0 / 5.0)  # of the uncut normal, times sqrt(E): the same at every width


@functools.cache
def quantile_table(device: torch.device) -> Tensor:
    """Float32 [65536], ascending: the state's value at the middle of each of 65,536 equal shares of probability."""
    normal = NormalDist()
    half = 1 << (TABLE_BITS - 1)
    inside = normal.cdf(_CUT) - 0.5
    upper = [normal.inv_cdf(0.5 + inside * (index + 0.5) / half) * _STD for index in range(half)]
    positive = torch.tensor(upper, dtype=torch.float64).float()
    return torch.cat((-positive.flip(0), positive)).to(device)


def initial_state(ops: Ops, seeds: Tensor, positions: Tensor, zeros: Tensor, like: Tensor) -> Tensor:
    """State [N, E] before loop 0, in the dtype of `like` [N, E], of rows with seeds [N] (bits of an unsigned 64-bit
    number) at positions [N], both int64.

    Rows where zeros [N] (bool) is true are all zero.
    """
    return ops.initial_state(seeds, positions, zeros, quantile_table(seeds.device), like)
