"""`python -m coordinator.forkserver FD MODULE...`: a process that has loaded what workers need, and forks to start one.

Loading it takes seconds of a processor, a fork milliseconds: a worker that was lost is back sooner, and workers of one
machine share the memory of what they have loaded. Orders come over the socket FD from the launcher
(`coordinator.forking`), one packet each, with the descriptors of a log, of a life pipe and of a go pipe.

What is forked is the launcher's own child, not this process's: the launcher is the nearest subreaper, a process in
between ends at once, and the kernel hands its child over. So this process's end is nobody's loss. It runs nothing
before the launcher, which watches it by then, has written to the go pipe: that pipe's end without a word means that
the order was given up, and it ends too.

It starts no thread, and forks only while it has none: nothing is in the middle of anything then. Devices, gRPC and NIXL
are for the workers to start.
"""

import gc
import json
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from setproctitle import setproctitle

from coordinator.child import die_with_parent

MOST_BYTES = 1 << 16
GO = b"g"
_NUM_FDS = 3
Stamps = dict[str, tuple[int, int]]


def main() -> None:
    die_with_parent()
    launcher, server = os.getppid(), socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        _load(module)
    loaded = _stamps()
    gc.collect()
    gc.freeze()  # what is shared should stay so
    while True:
        packet, fds, _, _ = socket.recv_fds(server, MOST_BYTES, _NUM_FDS)
        if not packet:
            return
        try:
            answer = _carry_out(json.loads(packet), fds, launcher, loaded)
        except OSError as error:  # processes or descriptors are short for a moment: the next order may be carried out
            answer = {"refused": f"the machine refuses: {error}"}
        for fd in fds:
            os.close(fd)
        server.send(json.dumps(answer).encode())


def _load(module: str) -> None:
    """All that `python -m module` imports, without what it does."""
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    name = f"{module}.__main__" if is_package else module
    import_module(name)
    del sys.modules[name]  # it will be run


def _carry_out(order: dict[str, Any], fds: Sequence[int], launcher: int, loaded: Stamps) -> dict[str, Any]:
    """The new process's id, or why there is none. Raises OSError where the machine has too little of something."""
    if len(fds) != _NUM_FDS:
        return {"refused": f"{len(fds)} descriptors of {_NUM_FDS} have come through"}
    if len(os.listdir("/proc/self/task")) > 1:
        return {"refused": "what was loaded has started threads"}
    if _stamps() != loaded:
        return {"refused": "the code on disk is no longer what was loaded"}
    read_fd, write_fd = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(read_fd)
        os.close(write_fd)
        raise
    if between == 0:
        try:
            pid = os.fork()
            if pid == 0:
                _become(order["module"], order["arguments"], fds, launcher)
            os.write(write_fd, str(pid).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        told = pipe.read()
    os.waitpid(between, 0)
    return {"pid": int(told)} if told else {"refused": "the machine forks no more"}


def _become(module: str, arguments: Sequence[str], fds: Sequence[int], launcher: int) -> NoReturn:
    """Run the module as a process of the launcher's, with a session and a log of its own."""
    status = 1
    try:
        log_fd, life_fd, go_fd = fds
        _close_all_but(fds)
        if os.read(go_fd, 1) != GO:
            raise SystemExit(f"{module} is not run: its launcher has given the order up")
        os.close(go_fd)
        os.setsid()
        null_fd = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null_fd), (1, log_fd), (2, log_fd)):
            os.dup2(source, target)
        os.close(null_fd)
        os.close(log_fd)
        die_with_parent()
        if os.getppid() != launcher:
            raise ProcessLookupError(f"launcher {launcher} is gone")
        sys.argv = [module, *arguments, "--life-fd", str(life_fd)]
        setproctitle(" ".join((sys.executable, "-m", *sys.argv)))
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _close_all_but(fds: Sequence[int]) -> None:
    """Of the descriptors behind the standard ones: the fork server's own."""
    first = 3
    for fd in (*sorted(fds), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, fd)
        first = fd + 1


def _stamps() -> Stamps:
    """Time and size of every file that code was loaded from."""
    found: Stamps = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.isabs(path):
            try:
                file = os.stat(path)
            except OSError:
                continue
            found[path] = (file.st_mtime_ns, file.st_size)
    return found


if __name__ == "__main__":
    main()
