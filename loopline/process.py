"""Small things that every process of a cluster does the same way: say where it listens, notice that its parent is
gone.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn


def write_json_by_rename(path: str | Path, value: Mapping[str, object]) -> None:
    """Write a JSON file so that a reader sees all of it or nothing."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(value) + "\n", encoding="utf-8")
    draft.replace(target)


def watch_life_pipe(loop: asyncio.AbstractEventLoop, fd: int, on_end: Callable[[], None]) -> None:
    """Call `on_end` once when the other end of the pipe `fd` is closed: the parent that held it is gone."""

    def readable() -> None:
        if not os.read(fd, 64):
            loop.remove_reader(fd)
            on_end()

    loop.add_reader(fd, readable)


def on_terminate(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call on SIGTERM and on SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)


def settle_heap() -> None:
    """To be called when a process has started up: what it has made so far stays, and the garbage collector need not
    walk it again and again, which stops every thread for some 70 ms."""
    gc.collect()
    gc.freeze()


def leave(status: int) -> NoReturn:
    """End a worker process at once: with torch and UCX loaded, the interpreter's own teardown takes seconds, in which
    the process would still seem alive. Everything of ours has been closed before."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
