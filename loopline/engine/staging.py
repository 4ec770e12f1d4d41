"""Inputs on their way from the host to fixed buffers of a device, which captured graphs read."""

import torch
from torch import Tensor

_NUM_COPIES = 2


class Staging:
    """Pinned host buffers, two of each: while the device takes one step's inputs the host writes the next one's.

    Use: `open`, fill what it gives, copy it to the device without blocking, `sent`.
    """

    def __init__(self, sizes: tuple[tuple[int, torch.dtype], ...]) -> None:
        """(elements, dtype) of each buffer."""
        self._copies = [
            tuple(torch.empty(size, dtype=dtype, pin_memory=True) for size, dtype in sizes) for _ in range(_NUM_COPIES)
        ]
        self._taken: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's stubs leave it out
            for _ in range(_NUM_COPIES)
        ]
        self._turn = 0

    def open(self) -> tuple[Tensor, ...]:
        """The buffers to fill. Waits for their copy of two steps ago: long past, unless the host is far ahead."""
        self._taken[self._turn].synchronize()
        return self._copies[self._turn]

    def sent(self) -> None:
        """What was opened is on its way."""
        self._taken[self._turn].record()
        self._turn = (self._turn + 1) % _NUM_COPIES
