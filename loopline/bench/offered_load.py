"""Requests that come at their own moments, whatever becomes of the earlier ones, and what became of each.

A moment is drawn beforehand (Poisson, of a seed) and times count from it, so a generator that is late, or a coordinator
that makes it wait, makes figures worse and not better. How late it was is itself a figure.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import grpc
import grpc.aio

from loopline.errors import OperatorError, Overloaded
from loopline.security import NO_CREDENTIALS, Credentials
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import ERROR_KEY, open_channel

_CHANNELS = 4
_DRAWN = 16  # answers of each length, in an order that repeats
_SEED = 5


class Fate(StrEnum):
    """What became of a request."""

    FINISHED = "finished"
    REFUSED = "refused"
    MISSED = "missed"  # it was let in and was not there by its deadline
    FAILED = "failed"


@dataclass(frozen=True)
class Asked:
    """One request. Moments are seconds of one clock; `why` is a failure's status."""

    due_s: float
    sent_s: float
    ended_s: float
    fate: Fate
    why: str = ""


class Asker:
    """Asks for answers of drawn lengths, `max_tokens` on average, so that they do not end all at once; prompts of
    `prompt_tokens` ids, one deadline."""

    def __init__(
        self,
        address: str,
        prompt_tokens: int,
        max_tokens: int,
        deadline_s: float,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        stub: Any = loopline_pb2_grpc.LooplineStub
        self._channels = [open_channel(address, credentials) for _ in range(_CHANNELS)]
        self._stubs = itertools.cycle([stub(channel) for channel in self._channels])
        self._deadline_s = deadline_s
        ids = [97 + index % 26 for index in range(prompt_tokens)]
        lengths = list(range(1, 2 * max_tokens)) * _DRAWN
        random.Random(_SEED).shuffle(lengths)
        self._messages = itertools.cycle(
            loopline_pb2.GenerateRequest(
                token_ids=loopline_pb2.TokenIds(ids=ids),
                sampling=loopline_pb2.SamplingParams(max_tokens=length, ignore_eos=True),
                deadline_s=deadline_s,
            )
            for length in lengths
        )

    async def ask(self, due_s: float) -> Asked:
        """One request to its end."""
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        fate, why = Fate.FINISHED, ""
        try:
            async for _ in next(self._stubs).Generate(next(self._messages)):
                pass
        except grpc.aio.AioRpcError as error:
            metadata: Any = error.trailing_metadata() or ()
            name = dict(metadata).get(ERROR_KEY)
            fate, why = Fate.FAILED, f"{error.code().name}: {error.details()}"
            if name == Overloaded.__name__:
                fate = Fate.REFUSED
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                fate = Fate.MISSED
        ended_s = loop.time()
        if fate is Fate.FINISHED and ended_s > due_s + self._deadline_s:
            fate = Fate.MISSED
        return Asked(due_s, sent_s, ended_s, fate, why)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)


async def offer(asker: Asker, rate: float, seconds: float) -> list[Asked]:
    """Ask `rate` times a second for so long, then wait for what was let in."""
    loop, draw = asyncio.get_running_loop(), random.Random(_SEED)
    begin_s = due_s = loop.time()
    tasks = []
    while (due_s := due_s + draw.expovariate(rate)) < begin_s + seconds:
        if due_s > loop.time():
            await asyncio.sleep(due_s - loop.time())
        tasks.append(asyncio.ensure_future(asker.ask(due_s)))
    return list(await asyncio.gather(*tasks))


async def find_capacity(asker: Asker, num_clients: int, seconds: float) -> float:
    """Requests a second of so many clients that ask without a pause; the first third of the time does not count.

    Raises OperatorError where none finished in what counts, with the last failure.
    """
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    ends: list[float] = []
    last_fate = "none ended"

    async def client() -> None:
        nonlocal last_fate
        while loop.time() < begin_s + seconds:
            asked = await asker.ask(loop.time())
            if asked.fate is Fate.FINISHED:
                ends.append(asked.ended_s)
            last_fate = f"the last one: {asked.fate}{asked.why and f', {asked.why}'}"

    await asyncio.gather(*(client() for _ in range(num_clients)))
    counted = [end_s for end_s in ends if begin_s + seconds / 3 < end_s <= begin_s + seconds]
    if not counted:
        raise OperatorError(
            f"no request finished in {seconds * 2 / 3:.3g} s, so there is nothing to measure; {last_fate}"
        )
    return len(counted) / (seconds * 2 / 3)


def figures(asked: Sequence[Asked], seconds: float, warm_s: float) -> dict[str, Any]:
    """Counts, and times in milliseconds. Throughput is of those that finished in time between `warm_s` and `seconds`
    after the first moment."""
    begin_s = min((one.due_s for one in asked), default=0.0)
    of = {fate: [one for one in asked if one.fate is fate] for fate in Fate}
    counted = [one for one in of[Fate.FINISHED] if begin_s + warm_s < one.ended_s <= begin_s + seconds]
    return {
        "offered": len(asked),
        "accepted": len(asked) - len(of[Fate.REFUSED]),
        "refused": len(of[Fate.REFUSED]),
        "finished_in_time": len(of[Fate.FINISHED]),
        "missed": len(of[Fate.MISSED]),
        "failed": len(of[Fate.FAILED]),
        "failures": sorted({one.why for one in of[Fate.FAILED]})[:5],
        "throughput_per_s": len(counted) / (seconds - warm_s),
        "refusal_ms": _spread(of[Fate.REFUSED], lambda one: one.ended_s - one.due_s),
        "refusal_since_sent_ms": _spread(of[Fate.REFUSED], lambda one: one.ended_s - one.sent_s),
        "answer_ms": _spread(of[Fate.FINISHED], lambda one: one.ended_s - one.due_s),
        "late_ms": _spread(asked, lambda one: one.sent_s - one.due_s),
    }


def _spread(asked: Sequence[Asked], seconds_of: Callable[[Asked], float]) -> dict[str, float] | None:
    return spread_ms([seconds_of(one) for one in asked])


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p99 and most, in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        "p50": 1000 * ordered[len(ordered) // 2],
        "p99": 1000 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "most": 1000 * ordered[-1],
    }


class CpuShare:
    """Part of one processor that this process took since it was made."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), time.process_time())

    def value(self) -> float:
        wall_s, cpu_s = (
            now - then for now, then in zip((time.monotonic(), time.process_time()), self._began, strict=True)
        )
        return cpu_s / wall_s if wall_s else 0.0
