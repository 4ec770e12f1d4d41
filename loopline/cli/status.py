"""`loopline status`: the workers of a running cluster, as its coordinator sees them."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loopline.cli.options import Address, Json, with_credentials
from loopline.cli.waiting import waits_of, wanted_of
from loopline.client import Client, ClusterStatus, Credentials, WorkerInfo
from loopline.identity import BudgetCounts, Cause

_FILE_WIDTH = 160  # of what is not a terminal


@with_credentials
def status(
    *,
    address: Address,
    credentials: Credentials,
    as_json: Json = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Fail if a worker's block counts do not add up, and name it.")
    ] = False,
) -> None:
    """Show the workers, their blocks and their handoffs."""
    with Client(address, credentials=credentials) as client:
        found = client.status()
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        console.print(_table(found))
        for line in details(found):
            console.print(line, markup=False, soft_wrap=True)
        serving = "serving" if found.serving else "not serving"
        console.print(
            f"{serving}; {found.running} running, {found.queued} queued; epoch {found.epoch}", highlight=False
        )
    faults = audit_faults(found) if audit else []
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if faults:
        raise typer.Exit(1)


def audit_faults(found: ClusterStatus) -> list[str]:
    """One line for each worker whose blocks do not add up."""
    faults = []
    for worker in found.workers:
        blocks = worker.blocks
        if not blocks.adds_up:
            total = blocks.free + blocks.held + blocks.cached + blocks.quarantined
            faults.append(
                f"{worker.name}: free {blocks.free} + held {blocks.held} + cached {blocks.cached} "
                f"+ quarantined {blocks.quarantined} = {total}, total {blocks.total}"
            )
    return faults


def _table(found: ClusterStatus) -> Table:
    table = Table("worker", "role", "state", "pid", "address", "running", "waiting", "blocks", box=SIMPLE)
    for worker in found.workers:
        counts = (str(worker.running), str(worker.waiting))
        table.add_row(worker.name, worker.role, worker.state, str(worker.pid), worker.address, *counts, _blocks(worker))
    return table


def details(found: ClusterStatus) -> Iterator[str]:
    """What the table has no room for, a line each: links, bytes in flight, corrupted pushes and handoffs; and what a
    worker waits for."""
    for worker in found.workers:
        for link in worker.links:
            rate = f"{link.bytes_per_s / 2**20:,.0f} MiB/s"
            mark = " (SLOW: under the configured floor)" if link.is_slow else ""
            yield f"{worker.name} to {link.peer}: {link.transport}, {rate} when it was warmed up{mark}"
        if worker.metrics_address:
            yield f"{worker.name}: metrics at http://{worker.metrics_address}/metrics"
        if worker.budget is not None:
            yield f"{worker.name}: {_budget(worker.budget)}"
        num_corrupted = worker.ignored.get(Cause.CORRUPTED, 0)
        if num_corrupted:
            yield f"{worker.name}: {num_corrupted} pushes arrived with other bytes than were sent"
        handoffs = ", ".join(f"{count} {state}" for state, count in worker.handoffs.items() if count)
        if handoffs:
            yield f"{worker.name} handoffs: {handoffs}"
    if (launcher := found.launcher) is not None:
        yield f"the launcher for {launcher.place} keeps {wanted_of(launcher)} workers"
    yield from waits_of(found)


def _budget(budget: BudgetCounts) -> str:
    words = f"in flight {_size(budget.in_flight_bytes)} of {_size(budget.limit_bytes)}, waited {budget.waited_s:.1f} s"
    waiting = f", {budget.num_waiting} pushes wait" if budget.num_waiting else ""
    return words + waiting


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def _blocks(worker: WorkerInfo) -> str:
    blocks = worker.blocks
    words = [f"{blocks.free} of {blocks.total} free"]
    words += [f"{getattr(blocks, name)} {name}" for name in ("held", "cached", "quarantined") if getattr(blocks, name)]
    return ", ".join(words)
