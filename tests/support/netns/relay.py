"""A cable of two TAP devices with a program between them: what one end sends the other one gets, after a delay and not
always. It does what netem does, on kernels that lack it.

`python -m tests.support.netns.relay NEAR FAR SEED` makes two devices of these names, says so in a line, and forwards
Ethernet frames until its standard input ends. A device may be moved into another namespace meanwhile. Each line of its
input is the JSON of an `Impairment`, of both directions; each is answered by a line with the frames that were lost so
far. `Relay` is its other end.
"""

import fcntl
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tests.support.netns.impairment import Impairment, Line

_ROOT = Path(__file__).parents[3]
_TUNSETIFF = 0x400454CA
_IFF_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME_BYTES = 65536
_BATCH = 64  # frames from one side before the other one is looked at


class Relay:
    """A running relay process with its two devices, `near` and `far`."""

    def __init__(self, near: str, far: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.support.netns.relay", near, far, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, text=True)
        assert self._line() == "up", "the relay does not start"

    def set(self, impairment: Impairment) -> int:
        """In force when this returns, in both directions; the frames lost until now."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(impairment)) + "\n")
        stdin.flush()
        return int(self._line())

    def close(self) -> None:
        """End the process, and its devices with it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.close()
        self._process.wait()
        stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class _Cable:
    """Two devices and the two lines between them."""

    def __init__(self, names: tuple[str, str], seed: int) -> None:
        self._devices = [_open_tap(name) for name in names]
        self._lines = [Line(seed), Line(seed + 1)]  # by where frames come in
        self._commands = b""
        self._selector = selectors.DefaultSelector()
        for device in self._devices:
            self._selector.register(device, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        os.set_blocking(sys.stdin.fileno(), False)

    def run(self) -> None:
        """Until the end of standard input."""
        while True:
            due = [due_s for line in self._lines if (due_s := line.next_s()) is not None]
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is sys.stdin:
                    if not self._read_commands(sys.stdin):
                        return
                else:
                    self._read_frames(self._devices.index(key.fd))
            now_s = time.monotonic()
            for line, device in zip(self._lines, reversed(self._devices), strict=True):
                for frame in line.take(now_s):
                    _send(device, frame)

    def _read_frames(self, side: int) -> None:
        for _ in range(_BATCH):
            try:
                frame = os.read(self._devices[side], _FRAME_BYTES)
            except (BlockingIOError, OSError):  # no more of them, or the device is down
                return
            self._lines[side].put(frame, time.monotonic())

    def _read_commands(self, stdin: IO[str]) -> bool:
        """False at the end of the input."""
        read = os.read(stdin.fileno(), _FRAME_BYTES)
        self._commands += read
        *lines, self._commands = self._commands.split(b"\n")
        for text in lines:
            for line in self._lines:
                line.impairment = Impairment(**json.loads(text))
            sys.stdout.write(f"{sum(line.num_lost for line in self._lines)}\n")
            sys.stdout.flush()
        return bool(read)


def _open_tap(name: str) -> int:
    """A new TAP device, which lives as long as its file is open here, in whichever namespace it is."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_WITHOUT_HEADER))
    return device


def _send(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError:  # the device is down, or its queue is full: lost
        return


def main() -> None:
    near, far, seed = sys.argv[1:]
    cable = _Cable((near, far), int(seed))
    sys.stdout.write("up\n")
    sys.stdout.flush()
    cable.run()


if __name__ == "__main__":
    main()
