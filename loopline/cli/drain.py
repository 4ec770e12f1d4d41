"""`loopline drain` and `loopline rolling-restart`: one worker leaves in order, or all of them in turn."""

import sys
from typing import Annotated

import typer

from loopline.cli.options import Address, Timeout, Wait, with_credentials
from loopline.cli.waiting import has_gone, has_successor, is_settled, wait_for
from loopline.client.operator import DrainOrdered, Operator
from loopline.errors import OperatorError
from loopline.security import Credentials

Limit = Annotated[
    float | None,
    typer.Option(
        "--limit",
        metavar="S",
        min=0,
        help="Seconds to finish in; the configuration's if not given.",
        show_default=False,
    ),
]


@with_credentials
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's name.", show_default=False)],
    *,
    address: Address,
    credentials: Credentials,
    limit: Limit = None,
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Have one worker take nothing new, finish what it has and leave. Its launcher starts it again."""
    with Operator(address, credentials=credentials) as operator:
        ordered = operator.drain(worker, limit_s=limit)
        _say(worker, ordered)
        if wait:
            _wait_drained(operator, worker, ordered, timeout)


@with_credentials
def rolling_restart(
    *, address: Address, credentials: Credentials, limit: Limit = None, timeout: Timeout = 600.0
) -> None:
    """Drain every worker of the launcher in turn, each once the one before it is ready again."""
    with Operator(address, credentials=credentials) as operator:
        launcher = operator.status().launcher
        if launcher is None:
            raise OperatorError("no launcher is attached to this coordinator, so nobody would start workers again")
        if not launcher.restarts:
            raise OperatorError("launcher.restart is never: a worker that left would not be started again")
        for name in (worker.name for worker in launcher.workers if not worker.leaving):
            status = wait_for(operator, is_settled, f"every worker is ready, before {name} drains", timeout)
            if status.launcher is None or all(worker.name != name for worker in status.launcher.workers):
                sys.stdout.write(f"{name} is no longer kept\n")
                continue
            ordered = operator.drain(name, limit_s=limit)
            _say(name, ordered)
            _wait_drained(operator, name, ordered, timeout)
        wait_for(operator, is_settled, "every worker is ready", timeout)


def _say(worker: str, ordered: DrainOrdered) -> None:
    then = "its launcher starts it again" if ordered.returns else "nobody starts it again"
    sys.stdout.write(f"{worker} drains for at most {ordered.limit_s:g} s; {then}\n")
    sys.stdout.flush()


def _wait_drained(operator: Operator, worker: str, ordered: DrainOrdered, timeout_s: float) -> None:
    """Until it is gone and, where it returns, its successor is ready."""
    uuid = ordered.uuid
    wait_for(operator, lambda status: has_gone(status, uuid), f"{worker} leaves", timeout_s)
    if ordered.returns:
        wait_for(operator, lambda status: has_successor(status, worker, uuid), f"{worker} is ready again", timeout_s)
        sys.stdout.write(f"{worker} is ready again\n")
    else:
        sys.stdout.write(f"{worker} has left\n")
    sys.stdout.flush()
