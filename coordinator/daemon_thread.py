"""A thread for calls of which one may never come back.

Threads of an executor are joined when the interpreter ends, so one that hangs would keep the process. This one goes
with it.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThread:
    """Makes one call after the other, all in the same thread. For one event loop."""

    def __init__(self, name: str) -> None:
        """It begins with the first call."""
        self._name = name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._has_begun = False

    def call(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        """What it returns or raises, after the calls before it. Cancelled before its turn it is not made."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        answer: Future[T] = Future()
        self._calls.put(lambda: _answer(answer, function, arguments))
        waiting = asyncio.wrap_future(answer)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody wants it any more
        return waiting

    def end(self) -> None:
        """After the calls that there are. Nobody waits for that."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _answer(answer: "Future[T]", function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    with contextlib.suppress(RuntimeError, InvalidStateError):  # whoever asked has ended its loop meanwhile
        try:
            result = function(*arguments)
        except BaseException as error:
            answer.set_exception(error)
        else:
            answer.set_result(result)
