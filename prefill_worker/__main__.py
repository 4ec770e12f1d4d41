"""`python -m prefill_worker`: one prefill worker process."""

import sys
from collections.abc import Sequence

from loopline.errors import OperatorError
from loopline.process import leave
from loopline.worker.main import parse_worker_arguments
from loopline.worker.runtime import EXIT_OPERATOR, run_worker
from prefill_worker.policy import PrefillPolicy
from prefill_worker.worker import build_role


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain or a stop, 2 for what the operator must mend."""
    try:
        parsed = parse_worker_arguments("prefill", arguments)
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_OPERATOR
    return run_worker(parsed.settings, PrefillPolicy(), build_role, parsed.life_fd)


if __name__ == "__main__":
    leave(main())
