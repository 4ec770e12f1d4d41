"""`loopline scale`: have a running cluster's launcher keep another number of workers."""

import sys
from typing import Annotated

import typer

from loopline.cli.options import Address, Timeout, Wait, with_credentials
from loopline.cli.waiting import is_settled, wait_for
from loopline.client import ClusterStatus, Credentials
from loopline.client.operator import Operator


@with_credentials
def scale(
    *,
    address: Address,
    credentials: Credentials,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers to keep.", show_default=False)] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers to keep.", show_default=False)] = None,
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Start or drain workers until there are so many of each role."""
    if prefill is None and decode is None:
        raise typer.BadParameter("give --prefill, --decode or both")
    with Operator(address, credentials=credentials) as operator:
        scaled = operator.scale(prefill=prefill, decode=decode)
        counts = (scaled.prefill, scaled.decode)
        sys.stdout.write(f"prefill: {scaled.prefill_before} -> {scaled.prefill}\n")
        sys.stdout.write(f"decode: {scaled.decode_before} -> {scaled.decode}\n")
        sys.stdout.flush()
        for role, count in (("prefill", scaled.prefill), ("decode", scaled.decode)):
            if count == 0:
                sys.stderr.write(f"the launcher keeps no {role} worker now: without one requests wait\n")

        def is_done(status: ClusterStatus) -> bool:
            launcher = status.launcher
            return launcher is not None and (launcher.prefill, launcher.decode) == counts and is_settled(status)

        if wait:
            wait_for(operator, is_done, f"{counts[0]} prefill and {counts[1]} decode workers, all ready", timeout)
