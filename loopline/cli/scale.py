"""`loopline scale`: have a running cluster's launcher keep another number of workers."""

import sys
from typing import Annotated

import typer

from loopline.cli.options import Address, Timeout, Wait, with_credentials
from loopline.cli.waiting import is_settled, wait_for, wanted_of
from loopline.client import ClusterStatus, Credentials
from loopline.client.operator import Operator
from loopline.identity import Role
from loopline.launcher_messages import WorkerCounts


@with_credentials
def scale(
    *,
    address: Address,
    credentials: Credentials,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers to keep.", show_default=False)] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers to keep.", show_default=False)] = None,
    unified: Annotated[int | None, typer.Option(min=0, help="Unified workers to keep.", show_default=False)] = None,
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Start or drain workers until there are so many of each role."""
    if prefill is None and decode is None and unified is None:
        raise typer.BadParameter("give --prefill, --decode, --unified or several of them")
    with Operator(address, credentials=credentials) as operator:
        scaled = operator.scale(prefill=prefill, decode=decode, unified=unified)
        counts = WorkerCounts.by_role(lambda role: getattr(scaled, role))
        for role in Role:
            before, after = getattr(scaled, f"{role}_before"), counts.of(role)
            if before or after or role is not Role.UNIFIED:
                sys.stdout.write(f"{role}: {before} -> {after}\n")
        sys.stdout.flush()
        for role in (Role.PREFILL, Role.DECODE) if not counts.unified else ():
            if not counts.of(role):
                sys.stderr.write(f"the launcher keeps no {role} worker now: without one requests wait\n")

        def is_done(status: ClusterStatus) -> bool:
            launcher = status.launcher
            return launcher is not None and wanted_of(launcher) == counts and is_settled(status)

        if wait:
            wait_for(operator, is_done, f"{counts} workers, all ready", timeout)
