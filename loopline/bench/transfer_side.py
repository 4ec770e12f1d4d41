"""One end of the transfer bench: an arena, its agent, the line to the other process, and polling as often as the
transfer thread polls. `loopline.bench.transfer` and `transfer_peer` each have one; what is pushed is decided there."""

import hashlib
import json
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.region import ArenaSpan, RegisteredRegion
from kvtransfer.transfer_thread import HOT_S, HOT_WAIT_S
from loopline.clock import MonotonicClock
from loopline.errors import PeerLost, TransferError
from loopline.kv.arena import Arena, allocate_arena
from loopline.kv.layout import KVLayout
from loopline.settings import TransferSettings

DEADLINE_S = 60.0
"""How long the other process may take to answer."""
_READ_BYTES = 1 << 20


class Channel:
    """JSON objects over a socket pair, one a line. A message with a key `error` is raised, not returned."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._rest = b""
        self._heard: list[dict[str, Any]] = []

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises PeerLost when the other process is gone."""
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"the other process is gone: {error}") from error

    def take(self, wait_s: float) -> list[dict[str, Any]]:
        """What has come, at the latest after `wait_s`. Raises PeerLost when the other process is gone, TransferError
        with what it says went wrong there."""
        if not self._heard and select.select([self._line], [], [], wait_s)[0]:
            try:
                data = self._line.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise PeerLost("the other process is gone")
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._heard = [json.loads(line) for line in lines]
        messages, self._heard = self._heard, []
        for message in messages:
            if "error" in message:
                raise TransferError(f"the other process says: {message['error']}")
        return messages

    def answer(self, message: Mapping[str, Any], wanted: str, deadline_s: float = DEADLINE_S) -> Any:
        """Send a message and return the value that comes under the key `wanted`; other messages are left out. Raises
        as `take` does, and TransferError when nothing comes in time."""
        self.send(message)
        clock = MonotonicClock()
        ends_s = clock.now_s() + deadline_s
        while clock.now_s() < ends_s:
            for heard in self.take(0.1):
                if wanted in heard:
                    return heard[wanted]
        raise TransferError(f"the other process did not answer within {deadline_s:g} s")

    def close(self) -> None:
        self._line.close()


@dataclass(frozen=True, kw_only=True)
class SideSettings:
    """What an end is made of."""

    name: str
    """The agent's; never used twice."""
    layout: KVLayout
    num_blocks: int
    device: str
    transfer: TransferSettings


class Side:
    """An arena of random bytes that an agent has registered.

    Invariant: one thread makes, uses and closes the agent. Polled hard for a while after `heat`, and else at the
    interval of the settings, as the transfer thread does.
    """

    def __init__(self, settings: SideSettings, seed: int) -> None:
        """Raises ConfigError where the arena cannot be had, TransferError where it cannot be registered."""
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.settings = settings
        self.arena = allocate_arena(settings.layout, settings.num_blocks, settings.device)
        _bytes_of(self.arena).view(torch.int64).random_(generator=torch.Generator(device).manual_seed(seed))
        self._synchronize()
        self.span = span_of(self.arena)
        self.agent = NixlAgent(settings.name, settings.transfer, self.span.memory_kind)
        self.region = RegisteredRegion(self.agent, self.span).manifest
        self._clock = MonotonicClock()
        self._hot_until_s = 0.0

    def heat(self) -> None:
        """Something was posted or has come."""
        self._hot_until_s = self._clock.now_s() + HOT_S

    def wait_s(self) -> float:
        """How long to wait for other things before the next poll, in seconds."""
        is_hot = self._clock.now_s() < self._hot_until_s
        return HOT_WAIT_S if is_hot else self.settings.transfer.poll_interval_s

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros into blocks."""
        rows = _bytes_of(self.arena)
        for block in blocks:
            rows[block].zero_()
        self._synchronize()

    def digest(self, blocks: Sequence[int]) -> str:
        """Of the blocks' bytes, in the order given."""
        rows = _bytes_of(self.arena)
        self._synchronize()
        digest = hashlib.blake2b(digest_size=16)
        for block in blocks:
            digest.update(rows[block].cpu().numpy().data)
        return digest.hexdigest()

    def _synchronize(self) -> None:
        if self.arena.tensor.is_cuda:
            torch.cuda.synchronize(self.arena.tensor.device)


def span_of(arena: Arena) -> ArenaSpan:
    """Where the arena lies, as a worker says it."""
    return ArenaSpan(
        base_address=arena.base_address,
        block_bytes=arena.layout.block_bytes,
        num_blocks=arena.num_blocks,
        null_block=arena.null_block,
        memory_kind="VRAM" if arena.tensor.is_cuda else "DRAM",
        device_id=arena.tensor.device.index or 0,
    )


def _bytes_of(arena: Arena) -> torch.Tensor:
    """[num_blocks + 1, block_bytes] uint8, the same memory."""
    return arena.tensor.view(arena.num_blocks + 1, -1).view(torch.uint8)
