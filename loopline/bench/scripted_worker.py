"""A worker process without a model: it speaks to the coordinator as real workers do, and takes a given time for a step.

`python -m loopline.bench.scripted_worker`, which a launcher starts in place of a worker; `--name` gives the role. Its
slots and blocks are those of the configuration; a decode step takes LOOPLINE_SCRIPTED_STEP_S seconds (0.02) however
many rows it has, a prompt none. Tokens spell the alphabet from their position on, so whoever computes them computes the
same. No KV exists, and no two workers talk: a decode worker begins when it is bound.
"""

import argparse
import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from loopline.config import ClusterConfig, load_config
from loopline.identity import (
    BlockCounts,
    BlockRun,
    Capacity,
    Fingerprint,
    HandoffKey,
    Peer,
    Role,
    WorkerId,
    WorkerLoad,
)
from loopline.messages import (
    Bind,
    Cancel,
    CoordinatorMessage,
    Drain,
    Granted,
    HandoffStats,
    Heartbeat,
    Pair,
    PairReady,
    Prefilled,
    Register,
    Reserve,
    Reserved,
    StartPrefill,
    StepTokens,
    TokenRow,
    Welcome,
    WorkerMessage,
)
from loopline.process import on_terminate, watch_life_pipe
from loopline.request import FinishReason, Request
from loopline.wire import convert
from loopline.wire._generated.loopline.v1 import cluster_pb2_grpc
from loopline.wire.channel import open_channel

STEP_VARIABLE = "LOOPLINE_SCRIPTED_STEP_S"
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_BEATS = 3  # in a lease
_BLOCKS = 1 << 16  # where the configuration names no number
_FINGERPRINT = Fingerprint((("weights", "scripted"),))
_STATS = HandoffStats(pushes=1, descriptors=1, num_bytes=0, transport="scripted", prefill_s=0.0)


def token_at(position: int) -> int:
    """The token at a position, whoever computes it."""
    return _LETTERS[position % len(_LETTERS)]


def make_row(request: Request, position: int) -> TokenRow:
    """What a step gives for a request; its last token ends it."""
    is_last = position - len(request.prompt_ids) + 1 >= request.params.max_tokens
    finish = FinishReason.LENGTH if is_last else None
    return TokenRow(request.request_id, request.attempt, position, token_at(position), request.params.loops, finish)


@dataclass
class _Held:
    """A request on a decode worker. `position` 0: it has blocks and does not run yet."""

    key: HandoffKey
    request: Request
    position: int = 0


@dataclass
class Script:
    """What a worker does with each message, without the stream: messages in, messages out."""

    worker: WorkerId
    is_draining: bool = False
    held: dict[str, _Held] = field(default_factory=dict)
    step: int = 0

    def obey(self, message: CoordinatorMessage) -> list[WorkerMessage]:
        """The answers to one message."""
        match message:
            case Pair(decode):
                return [PairReady(decode.worker, "scripted", 1e9)]
            case Reserve(key, request):
                self.held[key.request_id] = _Held(key, request)
                return [Reserved(key)]
            case Bind(key, writer):
                held = self.held.get(key.request_id)
                if held is None or held.key != key:
                    return []
                held.position = held.request.num_known_tokens
                return [Granted(key, writer.worker, 0, (BlockRun(0, 1),))]
            case StartPrefill(key, request):
                return [Prefilled(key, request.attempt, make_row(request, request.num_known_tokens), _STATS)]
            case Cancel(key):
                self.held.pop(key.request_id, None)
            case Drain():
                self.is_draining = True
            case _:
                pass
        return []

    def run_step(self) -> list[WorkerMessage]:
        """One token of every request that runs."""
        rows = []
        for held in [one for one in self.held.values() if one.position]:
            rows.append(make_row(held.request, held.position))
            held.position += 1
            if rows[-1].finish is not None:
                del self.held[held.key.request_id]
        if not rows:
            return []
        self.step += 1
        return [StepTokens(self.step, tuple(rows))]

    def heartbeat(self, total_blocks: int) -> Heartbeat:
        blocks = BlockCounts(free=total_blocks, held=0, cached=0, quarantined=0, total=total_blocks)
        known = tuple(held.key for held in self.held.values())
        busy = any(held.position for held in self.held.values())
        load = WorkerLoad(self.step, busy, len(known), 0, 0, 0, blocks, handoffs=(), ignored=(), known=known)
        return Heartbeat(load, self.is_draining)


class Process:
    """The stream to the coordinator, and the clock."""

    def __init__(self, options: argparse.Namespace, config: ClusterConfig) -> None:
        self._role = Role.PREFILL if options.name.startswith("prefill") else Role.DECODE
        group = config.prefill if self._role is Role.PREFILL else config.decode
        self._blocks = group.num_blocks or _BLOCKS
        self._lease_s = config.membership.lease_s
        self._script = Script(WorkerId(options.uuid, 1))
        capacity = Capacity(
            block_size=config.kv.block_size, total_blocks=self._blocks, max_running=group.max_running, token_bytes=1024
        )
        peer = Peer(self._script.worker, options.name, f"{options.host}:{options.name}")
        self._register = Register(peer, self._role, os.getpid(), _FINGERPRINT, capacity)
        self._channel = open_channel(options.coordinator)
        stub: Any = cluster_pb2_grpc.ClusterStub
        self._call = stub(self._channel).Attach()
        self._one_writer = asyncio.Lock()
        self._epoch = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, the end of the stream, or a drain with nothing left."""
        step_s = float(os.environ.get(STEP_VARIABLE, "0.02"))
        ends = [self._read(), self._beat(), self._steps(step_s), self._wait(stop)]
        tasks = [asyncio.ensure_future(end) for end in ends]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self._call.cancel()
        await self._channel.close(None)

    async def _wait(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def _send(self, messages: list[WorkerMessage]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with self._one_writer:
                for message in messages:
                    await self._call.write(convert.wrap_worker_message(message, self._epoch))

    async def _read(self) -> None:
        await self._send([self._register])
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (envelope := await self._call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                message, epoch = convert.unwrap_coordinator_message(envelope)
                if isinstance(message, Welcome):
                    self._epoch = epoch
                    await self._send([self._script.heartbeat(self._blocks)])
                await self._send(self._script.obey(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _BEATS)
            if self._epoch:
                await self._send([self._script.heartbeat(self._blocks)])
            if self._script.is_draining and not self._script.held:
                return

    async def _steps(self, step_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            await self._send(self._script.run_step())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    for name in ("--name", "--coordinator", "--uuid"):
        parser.add_argument(name, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--life-fd", type=int)
    options = parser.parse_args()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_terminate(loop, stop.set)
    if options.life_fd is not None:
        watch_life_pipe(loop, options.life_fd, stop.set)
    await Process(options, load_config(options.config, with_clients=False)).run(stop)


if __name__ == "__main__":
    asyncio.run(main())
