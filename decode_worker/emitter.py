"""Sends what steps gave to the coordinator: one message per step with all its rows, never one per token."""

from collections.abc import Callable

from loopline.messages import StepTokens, TokenRow, WorkerMessage


class Emitter:
    """Invariant: rows leave in the order in which they were added."""

    def __init__(self, send: Callable[[WorkerMessage], None]) -> None:
        self._send = send

    def emit(self, step: int, rows: tuple[TokenRow, ...]) -> None:
        """Send the rows of one step; nothing if there are none."""
        if rows:
            self._send(StepTokens(step, rows))
