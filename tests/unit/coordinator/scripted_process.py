"""A scripted worker as a process of its own, started as real ones are. `--name` gives the role."""

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass, field

from loopline.identity import Role
from tests.unit.coordinator.builders import heartbeat
from tests.unit.coordinator.cluster import ScriptedWorker

BEAT_S = 0.1


@dataclass
class Place:
    """A process with no other worker in it."""

    address: str
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--name", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    options = parser.parse_args()
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(options.life_fd, gone.set)
    role = Role.PREFILL if options.name.startswith("prefill") else Role.DECODE
    worker = ScriptedWorker(
        options.name,
        role,
        Place(options.coordinator),
        pid=os.getpid(),
        uuid=options.uuid,
        host=options.host,
        decodes_when_bound=True,
    )
    while not gone.is_set() and not worker.ended.is_set():
        if worker.coordinator_epoch:
            await worker.send(heartbeat())
        try:
            async with asyncio.timeout(BEAT_S):
                await gone.wait()
        except TimeoutError:
            continue
    await worker.die()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
