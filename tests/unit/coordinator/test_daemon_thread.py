"""Calls in a thread of their own, of which one may hang."""

import asyncio
import gc
import threading

import pytest

from coordinator.daemon_thread import DaemonThread
from tests.unit.coordinator.cluster import WAIT_S


def test_calls_are_made_in_turn_in_one_thread_that_keeps_no_process() -> None:
    async def main() -> None:
        thread = DaemonThread("calls")
        began, go = threading.Event(), threading.Event()

        def first() -> threading.Thread:
            began.set()
            go.wait()
            return threading.current_thread()

        one, two = thread.call(first), thread.call(threading.current_thread)
        never = thread.call(lambda: pytest.fail("it was cancelled before its turn"))
        failing = thread.call(int, "no number")
        await asyncio.to_thread(began.wait, WAIT_S)
        never.cancel()
        go.set()
        used = await one
        assert used is await two and used.daemon and used.name == "calls"
        with pytest.raises(ValueError, match="no number"):
            await failing
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        thread.call(int, "no number, and nobody asks")
        await thread.call(threading.current_thread)
        gc.collect()
        assert not complaints
        thread.end()
        await asyncio.to_thread(used.join, WAIT_S)
        assert not used.is_alive()

    asyncio.run(main())


def test_an_answer_that_comes_after_the_end_of_its_loop_is_lost_in_silence() -> None:
    thread, go = DaemonThread("calls"), threading.Event()

    async def ask() -> None:
        hanging = thread.call(go.wait)
        hanging.cancel()

    async def last() -> threading.Thread:
        return await thread.call(threading.current_thread)

    asyncio.run(ask())
    go.set()
    assert asyncio.run(last()).is_alive()
    thread.end()
