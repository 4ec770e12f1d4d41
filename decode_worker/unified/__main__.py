"""`python -m decode_worker.unified`: one unified worker process."""

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
