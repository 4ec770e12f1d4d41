"""What a request costs the coordinator, in lines of Python that run, with few and with many others in the queue."""

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from coordinator.dispatcher import Dispatcher
from coordinator.reply_watch import ReplyWatch
from loopline.identity import HandoffKey, Role
from loopline.messages import PairReady, Reserve
from loopline.request import FinishReason, Limits, Request, SamplingParams
from tests.unit.coordinator.builders import (
    VirtualClock,
    granted,
    heartbeat,
    peer,
    prefilled,
    register,
    request,
    reserved,
    row,
    step,
)

PREFILL, DECODE = peer("prefill-0"), peer("decode-0")


def lines_of(work: Callable[[], None]) -> int:
    """Lines of Python that `work` ran, however deep, loops in full."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class Bench:
    """A dispatcher with a pair of workers that takes one request at a time; placing is done when the test says."""

    def __init__(self, num_queued: int) -> None:
        self.dispatcher = Dispatcher(
            clock=VirtualClock(),
            epoch=1,
            lease_s=1e6,
            reply_timeout_s=1e6,
            peer_share=1.0,
            queue_limit=10**6,
            unread_tokens=10,
            limits=Limits(vocab_size=1000, context_tokens=1000, max_loops=4, arena_tokens=1000),
            probe_params=SamplingParams(max_tokens=2),
            probe_token_id=0,
        )
        self.dispatcher.join(register("prefill-0", Role.PREFILL))
        self.commands = self.dispatcher.join(register("decode-0", Role.DECODE, max_running=1))
        self.say(DECODE, heartbeat())
        self.say(PREFILL, heartbeat(), PairReady(DECODE.worker, "scripted", 1e9))
        self.number = 0
        self.submit(num_queued)

    def say(self, who: Any, *messages: Any) -> None:
        for message in messages:
            self.dispatcher.on_message(who.worker, message, 1)

    def submit(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.dispatcher.submit(request(f"r{self.number}", max_tokens=2), 1e6, None, self.number % 3)

    async def place(self) -> None:
        placing = asyncio.ensure_future(self.dispatcher.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        placing.cancel()

    async def serve_one(self) -> None:
        """The request that the decode worker was given, to its end."""
        await self.place()
        reserve = self.given(Reserve)
        await self.finish(reserve.key, reserve.request)

    async def finish(self, key: HandoffKey, given: Request) -> None:
        request_id, position = key.request_id, given.num_known_tokens
        self.say(DECODE, reserved(request_id))
        await self.place()
        self.say(DECODE, granted(request_id, PREFILL))
        self.say(PREFILL, prefilled(row(request_id, position, 7)))
        self.say(DECODE, step(row(request_id, position + 1, 7, finish=FinishReason.LENGTH)))
        await self.place()

    def given(self, kind: type) -> Any:
        assert not isinstance(self.commands, tuple)
        return [message for message in self.commands._messages if isinstance(message, kind)][-1]  # type: ignore[union-attr]


def cost_of(num_queued: int) -> int:
    """Lines for one request to come, one to be served, and one to leave, with a look for what was lost."""
    loop = asyncio.new_event_loop()

    async def prepare() -> Bench:
        bench = Bench(num_queued)
        await bench.serve_one()  # the probe
        await bench.serve_one()
        return bench

    try:
        bench = loop.run_until_complete(prepare())
        watch = bench.dispatcher._reply_watch
        assert isinstance(watch, ReplyWatch)

        async def work() -> None:
            bench.submit(1)
            await bench.serve_one()
            bench.dispatcher.cancel(f"r{bench.number}")
            watch._on_time()
            bench.dispatcher.backlog()
            assert bench.dispatcher.num_running == 1

        return lines_of(lambda: loop.run_until_complete(work()))
    finally:
        loop.close()


def test_a_request_costs_no_more_where_many_wait() -> None:
    few, many = cost_of(10), cost_of(10_000)
    assert few > 300
    assert many <= 1.1 * few
