"""The transfer bench's other process: it owns the target arena, polls, and says what has arrived. Run as
`python -m loopline.bench.transfer_peer FD` by `loopline.bench.transfer`; FD is one end of a socket pair.

Messages in, one JSON object a line, and the key under which the answer comes: `start` (`ready`), `clear` (`cleared`),
`digest` (`digest`), `thread` (`endpoint`), `expect` (`expecting`, and `complete` once those pushes have arrived),
`stop`. Unasked: `arrived`, for each write's notice. It ends with its line.
"""

import socket
import sys
from dataclasses import asdict
from typing import Any

from kvtransfer.commands import Event, PushArrived, TransferThreadFailed
from kvtransfer.links import WARM_UP_NOTICE
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.transfer_thread import NoticeCodec, TransferThread
from loopline.bench.transfer_side import Channel, Side, SideSettings
from loopline.clock import MonotonicClock
from loopline.errors import InvariantBroken, LooplineError, PeerLost
from loopline.kv.layout import KVLayout
from loopline.process import leave
from loopline.settings import TransferSettings
from loopline.wire.convert import decode_push_notice, encode_push_notice

CODEC = NoticeCodec(encode_push_notice, decode_push_notice)
_SEED = 2
_IDLE_S = 60.0


class _Arrivals:
    """The transfer thread's events: says when a generation's pushes are complete."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lacked: dict[int, set[int]] = {}  # generation -> sequence numbers

    def expect(self, generation: int, seqs: list[int]) -> None:
        """Before any of them is posted."""
        self._lacked = {generation: set(seqs)}

    def take(self, event: Event) -> None:
        """In the transfer thread."""
        if isinstance(event, TransferThreadFailed):
            self._channel.send({"error": event.error})
        elif isinstance(event, PushArrived):
            generation = event.notice.key.generation
            lacked = self._lacked.get(generation, set())
            lacked.discard(event.notice.range.seq)
            if not lacked and self._lacked.pop(generation, None) is not None:
                self._channel.send({"complete": generation})


class _Target:
    """Answers the other process: first with an agent of its own, after `thread` by a transfer thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._side: Side | None = None
        self._arrivals = _Arrivals(channel)
        self._thread: TransferThread | None = None

    def serve(self) -> None:
        """Until `stop`. Raises PeerLost when the line ends."""
        while True:
            polled = None if self._thread is not None else self._side
            for message in self._channel.take(_IDLE_S if polled is None else polled.wait_s()):
                if message["do"] == "stop":
                    self._stop()
                    return
                self._channel.send(self._answer(message))
            if polled is not None and self._thread is None:
                self._poll(polled)

    def _poll(self, side: Side) -> None:
        for _, notice in side.agent.take_notices():
            side.heat()
            if notice != WARM_UP_NOTICE:
                self._channel.send({"arrived": notice.hex()})

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "start":
            self._side = side = Side(_side_settings(message), _SEED)
            return {"ready": {"metadata": side.agent.metadata().hex(), "region": asdict(side.region)}}
        if self._side is None:
            raise InvariantBroken("the first message is start")
        match message["do"]:
            case "clear":
                self._side.clear(message["blocks"])
                return {"cleared": True}
            case "digest":
                return {"digest": self._side.digest(message["blocks"])}
            case "thread":
                return {"endpoint": self._start_thread(self._side, message["name"])}
            case "expect":
                self._arrivals.expect(message["generation"], message["seqs"])
                return {"expecting": message["generation"]}
        raise InvariantBroken(f"no such message: {message['do']}")

    def _start_thread(self, side: Side, name: str) -> dict[str, Any]:
        side.agent.close()
        transfer = side.settings.transfer
        self._thread = TransferThread(
            lambda: NixlAgent(name, transfer, side.span.memory_kind),
            side.span,
            settings=transfer,
            codec=CODEC,
            clock=MonotonicClock(),
            on_event=self._arrivals.take,
        )
        endpoint = self._thread.start()
        return {"metadata": endpoint.metadata.hex(), "region": asdict(endpoint.region)}

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        elif self._side is not None:
            self._side.agent.close()


def start_message(settings: SideSettings) -> dict[str, Any]:
    """What `start` says."""
    return {"do": "start"} | asdict(settings)


def _side_settings(message: dict[str, Any]) -> SideSettings:
    transfer = message["transfer"]
    return SideSettings(
        name=message["name"],
        layout=KVLayout(**message["layout"]),
        num_blocks=message["num_blocks"],
        device=message["device"],
        transfer=TransferSettings(**transfer | {"ucx": tuple((name, value) for name, value in transfer["ucx"])}),
    )


def main() -> None:
    """Serve on the socket whose descriptor is the argument."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        _Target(channel).serve()
    except PeerLost:  # whoever asked is gone
        leave(1)
    except (LooplineError, RuntimeError) as error:  # of the arena, the device or the transport
        channel.send({"error": f"{type(error).__name__}: {error}"})
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
