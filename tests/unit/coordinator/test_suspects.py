"""A request that ends its prefill worker, time and again, with others that are given to it at the same time."""

import asyncio
from dataclasses import dataclass, field

import grpc

from coordinator.tracker import MAX_FRUITLESS_ATTEMPTS
from loopline.messages import StartPrefill
from tests.unit.coordinator.cluster import ScriptedCluster, ScriptedWorker, token_at, until
from tests.unit.coordinator.test_service import Answer, message, run

SLOTS = 4
NUM_OTHERS = 10
"""Of which each end takes three more."""
CRASHES = b"!"


@dataclass
class Crashes:
    """A worker that ends with a prompt that has the byte, when others fill its slots, and joins again."""

    cluster: ScriptedCluster
    count: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def crash(self, worker: ScriptedWorker, command: StartPrefill) -> bool:
        if CRASHES[0] not in command.request.prompt_ids:
            return False
        await until(lambda: self._num_given(worker) == SLOTS, "others share the worker")
        self.count += 1
        self.tasks.append(asyncio.create_task(self._replace(worker)))
        return True

    def attach(self, name: str, epoch: int) -> None:
        self.cluster.attach(name, epoch=epoch, max_running=SLOTS, crash=self.crash)

    def _num_given(self, worker: ScriptedWorker) -> int:
        view = self.cluster.dispatcher.snapshot().find(worker.worker)
        return len(view.assigned) if view is not None else 0

    async def _replace(self, worker: ScriptedWorker) -> None:
        await worker.die()
        self.attach(worker.name, worker.epoch + 1)


def test_those_that_share_a_worker_with_a_request_that_ends_it_are_answered() -> None:
    async def script(cluster: ScriptedCluster) -> None:
        crashes = Crashes(cluster)
        cluster.attach("decode-0", max_running=16)
        await until(lambda: len(cluster.dispatcher.snapshot().workers) == 1, "it has joined")
        crashing = Answer(cluster, message(text=b"he" + CRASHES + b"lo"))
        await until(lambda: cluster.dispatcher.num_queued == 1, "it is the first")
        others = [Answer(cluster, message(text=b"hello")) for _ in range(NUM_OTHERS)]
        await until(lambda: cluster.dispatcher.num_queued == 1 + NUM_OTHERS, "all wait")
        crashes.attach("prefill-0", epoch=1)
        code, details = await crashing.status()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert details.startswith("given up after 3 attempts that brought no token of a decode worker"), details
        for other in others:
            await other.whole()
            assert other.ids == [token_at(position) for position in range(5, 9)], other.failure
        assert crashes.count == MAX_FRUITLESS_ATTEMPTS
        await asyncio.gather(*crashes.tasks)

    run(script, queue_limit=1 + NUM_OTHERS)
