"""What moving one prompt's KV to another process costs, by where its blocks lie and how many descriptors say so.

Arms take turns in every round, through the product's own transport seam, and each is checked once by a checksum of the
bytes that arrived. What a figure is worth is its ratio to `flat`, the same bytes as one descriptor, of the same run.
`loopline bench transfer` shows what `measure` gives; `transfer_peer` is the other process.
"""

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtransfer.agent import HandleState
from kvtransfer.commands import ConnectPeer, Event, PeerConnected
from kvtransfer.links import Links
from loopline.bench.device_time import error_text
from loopline.bench.host import machine
from loopline.bench.shapes import SHAPES
from loopline.bench.transfer_arms import PushTimes, TransferArm, make_arms
from loopline.bench.transfer_overlap import OVERLAP_TOKENS, measure_overlap
from loopline.bench.transfer_peer import start_message
from loopline.bench.transfer_side import Channel, Side, SideSettings
from loopline.clock import MonotonicClock
from loopline.engine.capacity import free_bytes
from loopline.errors import ConfigError, PeerLost, TransferError
from loopline.identity import Peer, RegionManifest, WorkerId
from loopline.kv.layout import KVLayout
from loopline.model_spec import load_model_spec
from loopline.settings import TransferSettings

BLOCK_SIZE = 16
TRANSPORTS = {"auto": (), "tcp": (("TLS", "tcp"), ("NET_DEVICES", "lo"))}
"""What `transport` puts into UCX's environment."""
_LOG = ("LOG_FILE", "stderr")  # standard output may be the report's alone
_ACK = "a message over a socket pair, sent by the target when it has taken the write's notice"
_SEED = 1
_MEMORY_SHARE = 0.5
_END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """What is moved, between what, and how often."""

    model: str
    """A checkpoint folder, of which config.json alone is read, or a name in `loopline.bench.shapes.SHAPES`."""
    tokens: int = 512
    """Of the prompt; its last block is moved whole."""
    transport: str = "auto"
    """auto: as UCX chooses; tcp: over the loopback device."""
    device: str = "cpu"
    """Of both arenas, or of the source's and the target's with a comma between."""
    rounds: int = 5
    scale: float | None = None
    """Share of the model's planes that is moved; None: as many as half of the free memory has room for."""
    overlap: bool = False
    """Also push chunks while later ones are computed."""
    compute_ms: float | None = None
    """What a chunk of the overlap is said to take; None: twice as long as its push takes."""


def measure(bench: TransferBench, command: str, say: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """All figures as one JSON object. An arm that fails has its error there, and the others their figures. `command`:
    what the report says it was asked by. `say` hears what is done next.

    Raises ConfigError for what cannot be measured at all, PeerError kinds where the two ends cannot be connected.
    """
    full, devices = _layout(bench), _devices(bench)
    num_blocks = full.blocks_for(bench.tokens)
    total = max(2 * num_blocks, full.blocks_for(OVERLAP_TOKENS) if bench.overlap else 0)
    layout = _scaled(full, _planes(bench, full, devices, total))
    say(f"two arenas of {total} blocks, {(total + 1) * layout.block_bytes / 2**30:.3g} GiB each")
    transfer = TransferSettings(ucx=(*TRANSPORTS[bench.transport], _LOG))
    source_settings, target_settings = (
        SideSettings(name=_agent_name(), layout=layout, num_blocks=total, device=device, transfer=transfer)
        for device in devices
    )
    with _other_process(target_settings) as (channel, ready):
        side = Side(source_settings, _SEED)
        with closing(side.agent):
            source = Source(side, channel)
            link = source.connect(target_settings.name, ready)
            say(f"connected over {link.transport}")
            arms = make_arms(side.region, source.target, num_blocks, 2 * layout.num_planes)
            _take_turns(source, arms, bench.rounds, say)
        overlap = _overlap(bench, side, channel, say) if bench.overlap else None
        with suppress(PeerLost):  # it may have gone before: then the figures say so
            channel.send({"do": "stop"})
    return {
        "machine": _machine(devices, command),
        "model": _model_figures(bench, full, layout, num_blocks),
        "link": {"asked": bench.transport, "transport": link.transport, "bytes_per_s": link.bytes_per_s, "ack": _ACK},
        "arms": _arm_figures(arms),
        "overlap": overlap,
    }


class Source:
    """This process's end: it connects as a prefill worker does, and pushes."""

    def __init__(self, side: Side, channel: Channel) -> None:
        self.side = side
        self.target: RegionManifest = side.region  # until it is connected
        self._channel = channel
        self._peer = ""
        self._num_pushes = 0

    def connect(self, name: str, ready: dict[str, Any]) -> PeerConnected:
        """Add the target and warm the link up. Raises TransferError with the reason where that fails."""
        self.target = RegionManifest(**ready["region"])
        self._peer = name
        events: list[Event] = []
        clock, timeout_s = MonotonicClock(), self.side.settings.transfer.push_timeout_s
        nobody = frozenset[str]().__contains__
        links = Links(self.side.agent, self.side.region, timeout_s, clock, events.append, nobody, nobody)
        worker = WorkerId(name.removeprefix(WorkerId("", 1).agent_name), 1)
        links.connect(ConnectPeer(Peer(worker, "target", "-"), bytes.fromhex(ready["metadata"]), self.target))
        self.side.heat()
        while not events:
            self._channel.take(self.side.wait_s())
            self.side.agent.take_notices()
            links.poll()
        if not isinstance(events[0], PeerConnected):
            raise TransferError(f"the two ends cannot be connected: {events[0]}")
        return events[0]

    def check(self, arm: TransferArm) -> None:
        """Push once, untimed, into cleared blocks, and compare what arrived."""
        self._channel.answer({"do": "clear", "blocks": arm.target_blocks}, "cleared")
        local, _ = arm.build()
        arm.num_descriptors, arm.num_bytes = len(local), local.num_bytes
        self.push(arm)
        arrived = self._channel.answer({"do": "digest", "blocks": arm.target_blocks}, "digest")
        arm.checksum_ok = arrived == self.side.digest(arm.source_blocks)
        if not arm.checksum_ok:
            raise TransferError("the bytes at the target are not those that were sent")

    def push_timed(self, arm: TransferArm) -> None:
        """Push, and keep the times."""
        arm.pushes.append(self.push(arm))

    def push(self, arm: TransferArm) -> PushTimes:
        """Build, post and wait: polls as the transfer thread does, and ends when the target has acknowledged and the
        handle is terminal. Raises TransferError where it failed or took too long."""
        self._num_pushes += 1
        notice = f"{arm.name} {self._num_pushes}".encode()
        begin_s = time.perf_counter()
        local, remote = arm.build()
        built_s = time.perf_counter()
        handle = self.side.agent.post_write(self._peer, local, remote, notice)
        posted_s = time.perf_counter()
        self.side.heat()
        acked_s, is_done = 0.0, False
        ends_s = posted_s + self.side.settings.transfer.push_timeout_s
        while not acked_s or not is_done:
            if any(message.get("arrived") == notice.hex() for message in self._channel.take(self.side.wait_s())):
                acked_s = time.perf_counter()
            self.side.agent.take_notices()
            status = self.side.agent.poll(handle)
            is_done = status.state is HandleState.DONE
            if status.state is HandleState.FAILED:
                raise TransferError(f"the write failed: {status.reason}")
            if time.perf_counter() > ends_s:
                raise TransferError(f"no end within {self.side.settings.transfer.push_timeout_s:g} s")
        self.side.agent.release(handle)
        return PushTimes(built_s - begin_s, posted_s - built_s, acked_s - built_s)


def _take_turns(source: Source, arms: list[TransferArm], rounds: int, say: Callable[[str], None]) -> None:
    """Check every arm, then let them push in turns."""
    say("checking that each arm's bytes arrive")
    for arm in arms:
        _guarded(arm, partial(source.check, arm))
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for arm in arms:
            _guarded(arm, partial(source.push_timed, arm))


def _guarded(arm: TransferArm, step: Callable[[], object]) -> None:
    if arm.error is None:
        try:
            step()
        except Exception as error:  # whatever it is, the other arms' figures stand
            arm.error = error_text(error)


def _overlap(bench: TransferBench, side: Side, channel: Channel, say: Callable[[str], None]) -> dict[str, Any]:
    try:
        return measure_overlap(side, channel, bench.rounds, bench.compute_ms, say)
    except Exception as error:  # whatever it is, the arms' figures stand
        return {"error": error_text(error)}


@contextmanager
def _other_process(settings: SideSettings) -> Iterator[tuple[Channel, dict[str, Any]]]:
    """The target's process, once its arena is registered, with its metadata and region. It ends with the context."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "loopline.bench.transfer_peer", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=2,  # what libraries print there is no part of a report
    )
    theirs.close()
    channel = Channel(ours)
    try:
        yield channel, channel.answer(start_message(settings), "ready")
    finally:
        channel.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- what is asked for


def _agent_name() -> str:
    return WorkerId(str(uuid.uuid4()), 1).agent_name


def _layout(bench: TransferBench) -> KVLayout:
    """The model's own layout. Raises OperatorError kinds for a model that cannot be read and values out of range."""
    if bench.model not in SHAPES and not Path(bench.model).is_dir():
        raise ConfigError(f"model is {bench.model!r}; allowed: a checkpoint folder, {', '.join(SHAPES)}")
    if bench.transport not in TRANSPORTS:
        raise ConfigError(f"transport is {bench.transport!r}; allowed: {', '.join(TRANSPORTS)}")
    if bench.tokens < 1 or bench.rounds < 1:
        raise ConfigError(f"tokens is {bench.tokens} and rounds {bench.rounds}; allowed: 1 and above")
    if bench.scale is not None and not 0 < bench.scale <= 1:
        raise ConfigError(f"scale is {bench.scale:g}; allowed: above 0, at most 1")
    spec = SHAPES[bench.model] if bench.model in SHAPES else load_model_spec(bench.model)
    return KVLayout.from_spec(spec, spec.default_loops, BLOCK_SIZE, spec.checkpoint_dtype)


def _devices(bench: TransferBench) -> tuple[str, str]:
    """Of source and target. Raises ConfigError for devices that are not here."""
    here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    names = ["cuda:0" if name == "cuda" else name for name in bench.device.split(",")]
    if len(names) > 2 or not set(names) <= set(here):
        raise ConfigError(f"device is {bench.device!r}; allowed here: one or two of {', '.join(here)}")
    return names[0], names[-1]


def _planes(bench: TransferBench, full: KVLayout, devices: tuple[str, str], total: int) -> int:
    """Planes to move. Raises ConfigError with the numbers where the arenas cannot fit."""
    plane_bytes = (total + 1) * full.block_size * full.plane_token_bytes
    room = min(free_bytes(device) for device in devices) // (2 if devices[0] == devices[1] else 1)
    if bench.scale is None:
        planes = min(full.num_planes, int(room * _MEMORY_SHARE) // plane_bytes)
    else:
        planes = max(1, round(bench.scale * full.num_planes))
    if planes < 1 or planes * plane_bytes > room:
        raise ConfigError(
            f"{max(1, planes)} of {full.num_planes} planes need {max(1, planes) * plane_bytes} bytes an arena, and "
            f"{room} are free; lower --scale or --tokens"
        )
    return planes


def _scaled(full: KVLayout, planes: int) -> KVLayout:
    """The layout with so many planes: blocks get smaller, a plane's piece of a block stays as large as it is."""
    if planes == full.num_planes:
        return full
    return replace(full, num_prelude=planes, num_recurrent=0, num_coda=0, max_loops=1)


# ---- what is reported


def _machine(devices: tuple[str, str], command: str) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(name) if name.startswith("cuda") else "host memory" for name in devices]
    ends = [f"{device} ({name})" for device, name in zip(devices, names, strict=True)]
    return machine() | {"torch": torch.__version__, "source": ends[0], "target": ends[1], "command": command}


def _model_figures(bench: TransferBench, full: KVLayout, moved: KVLayout, num_blocks: int) -> dict[str, Any]:
    is_scaled = moved.num_planes < full.num_planes
    return {
        "name": bench.model,
        "dtype": full.dtype,
        "planes": moved.num_planes,
        "model_planes": full.num_planes,
        "scaled": f"{moved.num_planes} of {full.num_planes} planes" if is_scaled else None,
        "block_size": full.block_size,
        "block_bytes": moved.block_bytes,
        "tokens": bench.tokens,
        "blocks": num_blocks,
    }


def _arm_figures(arms: list[TransferArm]) -> dict[str, Any]:
    """Every arm's figures, with the ratio of its time to that of `flat`."""
    figures = {arm.name: arm.report() for arm in arms}
    flat_ms = figures["flat"].get("total_ms")
    for one in figures.values():
        if flat_ms and "total_ms" in one:
            one["ratio"] = one["total_ms"] / flat_ms
    return figures
