"""`python -m prefill_worker`: one prefill worker process."""

from collections.abc import Sequence
from functools import partial

from loopline.process import leave
from loopline.worker.main import worker_main
from prefill_worker.policy import PrefillPolicy
from prefill_worker.worker import build_role


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to leave; the exit status."""
    policy = PrefillPolicy()
    return worker_main("prefill", policy, partial(build_role, gate=policy.gate), arguments)


if __name__ == "__main__":
    leave(main())
