"""`python -m decode_worker.unified`: one process that takes whole requests.

A unified worker is a decode worker to which every prompt is local: reservations, ends, drains and recovery are the
same, and nobody is ever bound to write here. What differs is the engine's slice of the configuration (the section
`unified`) and that no network transport is opened.
"""

from collections.abc import Sequence

from decode_worker.worker import build_role
from loopline.process import leave
from loopline.sched.policy import UnifiedPolicy
from loopline.worker.main import worker_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to leave; the exit status."""
    return worker_main("unified", UnifiedPolicy(), build_role, arguments)


if __name__ == "__main__":
    leave(main())
