"""`python -m decode_worker`: one decode worker process."""

import sys
from collections.abc import Sequence

from decode_worker.policy import DecodePolicy
from decode_worker.worker import build_role
from loopline.errors import OperatorError
from loopline.process import leave
from loopline.worker.main import parse_worker_arguments
from loopline.worker.runtime import EXIT_OPERATOR, run_worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain or a stop, 2 for what the operator must mend."""
    try:
        parsed = parse_worker_arguments("decode", arguments)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_OPERATOR
    return run_worker(parsed.settings, DecodePolicy(), build_role, parsed.life_fd)


if __name__ == "__main__":
    leave(main())
