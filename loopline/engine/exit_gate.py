"""From the exit gate's logits to the probability of each loop to be the last, for the requests that ask for it.

A model that stops at every loop t with probability sigmoid(gate_t), given that it came so far, ends with loop t with
the product of the earlier refusals and this one's consent; what is left after the others is the last loop's. The
source is Ouro's public modelling code; depth is fixed here, so this is reported and decides nothing.

Shape letters: S rows whose tokens are chosen, P of them that ask, T loops.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from loopline.engine.batch import ToDevice
from loopline.request import SamplingParams


@dataclass(frozen=True, eq=False)
class ExitLogits:
    """The gate's logits of rows that ask, all of one depth."""

    rows: tuple[int, ...]  # [P], of S
    logits: Tensor  # [P, T] float32


def asked_exit_logits(
    params: Sequence[SamplingParams], gates: Sequence[tuple[int, Tensor | None]], to_device: ToDevice
) -> tuple[ExitLogits, ...]:
    """Of S rows with these `params` those that ask. `gates`: how many rows each part of the step has, in order, and
    their logits [rows, T]; None: the gate was not evaluated."""
    found: list[ExitLogits] = []
    start = 0
    for count, logits in gates:
        asking = [row for row in range(count) if params[start + row].exit_probabilities]
        if asking and logits is not None:
            rows = tuple(start + row for row in asking)
            found.append(ExitLogits(rows, logits.index_select(0, to_device(np.array(asking, np.int64)))))
        start += count
    return tuple(found)


def exit_probabilities(logits: Sequence[float]) -> tuple[float, ...]:
    """The probability of each loop to be the last, from the gate's logit after each; the last one's is not used."""
    left = 1.0
    found = []
    for logit in logits[:-1]:
        found.append(left * _sigmoid(logit))
        left *= _sigmoid(-logit)
    return (*found, left)


def _sigmoid(x: float) -> float:
    """1 / (1 + e^-x), for any x."""
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)
