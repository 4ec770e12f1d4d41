"""`python -m coordinator.child MODULE ARGUMENTS`: run a module as a process that does not outlive its launcher.

The process asks for that itself, first of all: code between a launcher's fork and the new program would have to run
beside the launcher's gRPC threads, and gRPC aborts a process that forks at the wrong moment.
"""

import ctypes
import runpy
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. The life pipe is gentler and works everywhere, but a
    stopped process does not read it, and one that is still loading reads it late. (One that is stopped before it gets
    here stays until it is let go on, and then ends by the pipe.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    die_with_parent()
    life = select.poll()
    life.register(int(sys.argv[-1]), select.POLLIN)  # the last argument that `processes.start_child` gives
    if life.poll(0):  # its end: the parent died before that could be asked for
        raise SystemExit("nothing is run: whoever started this process is gone")
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
