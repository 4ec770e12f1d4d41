"""Whether a client that stops reading slows others down: turns in which all read, and turns in which one stops.

The one that stops has a window of 1 KiB, so that what it leaves unread stays with the coordinator and not in its own
buffers.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio

from loopline.bench.offered_load import spread_ms
from loopline.client.convert import error_of
from loopline.errors import NotRead, RequestTooLarge
from loopline.security import Credentials
from loopline.wire._generated.loopline.v1 import loopline_pb2, loopline_pb2_grpc
from loopline.wire.channel import ERROR_KEY, open_channel

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


async def measure_readers(
    address: str, credentials: Credentials, bench: Readers, say: Callable[[str], None]
) -> dict[str, Any]:
    """Milliseconds between two tokens of a reader, over all but the one that stops in its turns, and how often that was
    NotRead. Raises the errors of Client for what the others meet."""
    gaps: dict[str, list[float]] = {"all_read": [], "one_stops": []}
    medians: dict[str, list[float]] = {name: [] for name in gaps}
    left_unread, num_ended = [], 0
    for number in range(bench.rounds):
        for name, found in gaps.items():
            say(f"round {number + 1} of {bench.rounds}: {bench.readers} readers, {name.replace('_', ' ')}")
            try:
                own, unread, is_ended = await _turn(address, credentials, bench, stops=name == "one_stops")
            except grpc.aio.AioRpcError as error:
                raise error_of(error, address, True, too_large=RequestTooLarge) from error
            num_ended += is_ended
            found += own
            medians[name].append((spread_ms(own) or {}).get("p50", 0.0))
            left_unread += [unread] if name == "one_stops" else []
    return {
        **{f"{name}_ms": spread_ms(found) for name, found in gaps.items()},
        "medians_ms": medians,
        "readers": bench.readers,
        "tokens_after_the_pause": left_unread,
        "ended_as_not_read": num_ended,
    }


async def _turn(
    address: str, credentials: Credentials, bench: Readers, *, stops: bool
) -> tuple[list[float], int, bool]:
    """Gaps of the others in seconds, the tokens that waited for the one that stopped, and whether it was NotRead."""
    message = loopline_pb2.GenerateRequest(
        token_ids=loopline_pb2.TokenIds(ids=[97] * bench.prompt_tokens),
        sampling=loopline_pb2.SamplingParams(max_tokens=max(4, int(bench.pause_s / bench.step_s)), ignore_eos=True),
        deadline_s=4 * bench.pause_s + 30.0,
    )
    stub: Any = loopline_pb2_grpc.LooplineStub
    async with (
        open_channel(address, credentials) as channel,
        open_channel(address, credentials, extra_options=_NARROW) as narrow,
    ):
        go_on = asyncio.Event()
        first = asyncio.ensure_future(_read(stub(narrow).Generate(message), go_on if stops else None))
        others = [asyncio.ensure_future(_read(stub(channel).Generate(message))) for _ in range(bench.readers - 1)]
        gaps = [gap for own, *_ in await asyncio.gather(*others) for gap in own]
        go_on.set()
        _, after, is_ended = await first
    return gaps, after, is_ended


async def _read(call: Any, go_on: asyncio.Event | None = None) -> tuple[list[float], int, bool]:
    """Gaps between tokens, and the tokens that came after `go_on`, which is waited for after the first events, and
    whether the coordinator ended the request for that. Raises AioRpcError for any other failure."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    last_s, num_events, late = 0.0, 0, 0
    while True:
        try:
            event = await call.read()
        except grpc.aio.AioRpcError as error:
            metadata: Any = error.trailing_metadata() or ()
            if go_on is None or dict(metadata).get(ERROR_KEY) != NotRead.__name__:
                raise
            return gaps, late, True
        if event is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            return gaps, late, False
        num_tokens, now_s = len(event.chunk.tokens), loop.time()
        if num_tokens and last_s:
            gaps += [(now_s - last_s) / num_tokens] * num_tokens
        last_s = now_s if num_tokens else last_s
        num_events += 1
        late += num_tokens if num_events > _READ_FIRST else 0
        if go_on is not None and num_events == _READ_FIRST:
            await go_on.wait()
