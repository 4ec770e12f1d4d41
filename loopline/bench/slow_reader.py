"""Whether a client that stops reading slows others down: turns in which all read, and turns in which one stops.

The one that stops has a window of 1 KiB, so that what it leaves unread stays with the coordinator and not in its own
buffers.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio

from loopline.bench.offered_load import spread_ms
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import channel_options

_NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
_READ_FIRST = 2  # events


class Readers(Protocol):
    """What of a bench is needed."""

    @property
    def readers(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def pause_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...


async def measure_readers(address: str, bench: Readers, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds between two tokens of a reader, over all but the one that stops in its turns."""
    gaps: dict[str, list[float]] = {"all_read": [], "one_stops": []}
    medians: dict[str, list[float]] = {name: [] for name in gaps}
    left_unread = []
    for number in range(bench.rounds):
        for name, found in gaps.items():
            say(f"round {number + 1} of {bench.rounds}: {bench.readers} readers, {name.replace('_', ' ')}")
            own, unread = await _turn(address, bench, stops=name == "one_stops")
            found += own
            medians[name].append((spread_ms(own) or {}).get("p50", 0.0))
            left_unread += [unread] if name == "one_stops" else []
    return {
        **{f"{name}_ms": spread_ms(found) for name, found in gaps.items()},
        "medians_ms": medians,
        "readers": bench.readers,
        "tokens_after_the_pause": left_unread,
    }


async def _turn(address: str, bench: Readers, *, stops: bool) -> tuple[list[float], int]:
    """Gaps of the others in seconds, and the tokens that waited for the one that stopped."""
    message = loopline_pb2.GenerateRequest(
        token_ids=loopline_pb2.TokenIds(ids=[97] * bench.prompt_tokens),
        sampling=loopline_pb2.SamplingParams(max_tokens=max(4, int(bench.pause_s / bench.step_s)), ignore_eos=True),
        deadline_s=4 * bench.pause_s + 30.0,
    )
    stub: Any = loopline_pb2_grpc.LooplineStub
    plain: Any = channel_options()
    async with (
        grpc.aio.insecure_channel(address, options=plain) as channel,
        grpc.aio.insecure_channel(address, options=[*plain, *_NARROW]) as narrow,
    ):
        go_on = asyncio.Event()
        first = asyncio.ensure_future(_read(stub(narrow).Generate(message), go_on if stops else None))
        others = [asyncio.ensure_future(_read(stub(channel).Generate(message))) for _ in range(bench.readers - 1)]
        gaps = [gap for own, _ in await asyncio.gather(*others) for gap in own]
        go_on.set()
        _, after = await first
    return gaps, after


async def _read(call: Any, go_on: asyncio.Event | None = None) -> tuple[list[float], int]:
    """Gaps between tokens, and the tokens that came after `go_on`, which is waited for after the first events."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    last_s, num_events, late = 0.0, 0, 0
    while (event := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        num_tokens, now_s = len(event.chunk.tokens), loop.time()
        if num_tokens and last_s:
            gaps += [(now_s - last_s) / num_tokens] * num_tokens
        last_s = now_s if num_tokens else last_s
        num_events += 1
        late += num_tokens if num_events > _READ_FIRST else 0
        if go_on is not None and num_events == _READ_FIRST:
            await go_on.wait()
    return gaps, late
