"""A storm: many long answers at once, while workers are killed and stopped. Here the blows and how their losses are
timed, and the streams; `tests/cluster/test_storm.py` says what must hold."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from loopline.client import AsyncClient, Chunk, Finished, WorkerInfo
from loopline.identity import WorkerId
from tests.support.soak import Case

logger = logging.getLogger(__name__)
POLL_S = 0.05
SETTLE_S = 60.0
"""Until a role has two ready workers again, and until a lost worker is seen to be lost, on a busy machine."""
STREAM_S = 400.0
"""Deadline of an answer: many wait for a long time before they begin."""


# ---- blows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blow:
    """`kill` (SIGKILL), `stop` (SIGSTOP, left to the launcher) or `wake` (SIGSTOP until the worker is lost)."""

    way: str
    role: str


BLOWS = (
    Blow("kill", "decode"),
    Blow("stop", "prefill"),
    Blow("kill", "prefill"),
    Blow("wake", "decode"),
    Blow("stop", "decode"),
    Blow("wake", "prefill"),
)


@dataclass
class Losses:
    """What was done, and the seconds from each blow until the coordinator's status showed the loss."""

    done: Counter[str] = field(default_factory=Counter)
    seen_after_s: dict[str, list[float]] = field(default_factory=dict)

    def note(self, blow: Blow, seen_after_s: float) -> None:
        self.done[f"{blow.way} {blow.role}"] += 1
        self.seen_after_s.setdefault("kill" if blow.way == "kill" else "stop", []).append(seen_after_s)

    @property
    def most_s(self) -> float:
        return max(itertools.chain.from_iterable(self.seen_after_s.values()))


class Striker:
    """Strikes one worker after the other. Only where another worker of the role is ready to go on."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.losses = Losses()

    async def strike(self, count: int, every_s: float) -> None:
        """`count` blows, each `every_s` after the one before, or as soon as it may come then."""
        began_s = time.monotonic()
        for number, blow in enumerate(itertools.islice(itertools.cycle(BLOWS), count)):
            await asyncio.sleep(max(0.0, began_s + (number + 1) * every_s - time.monotonic()))  # the storm's own pace
            await self._strike(blow)

    async def _strike(self, blow: Blow) -> None:
        victim = await self._victim(blow.role)
        process = psutil.Process(victim.pid)
        struck_s = time.monotonic()
        if blow.way == "kill":
            process.kill()
        else:
            process.suspend()
        logger.info("%s %s (pid %d), %d running", blow.way, victim.name, victim.pid, victim.running)
        await self._when(lambda workers: is_lost(workers, victim), f"{victim.name} is lost")
        self.losses.note(blow, time.monotonic() - struck_s)
        if blow.way == "wake":
            with contextlib.suppress(psutil.NoSuchProcess):  # the launcher may have been quicker
                process.resume()

    async def _victim(self, role: str) -> WorkerInfo:
        """The busiest of two or more ready workers of the role."""

        def ready(workers: Sequence[WorkerInfo]) -> list[WorkerInfo]:
            return [worker for worker in workers if worker.role == role and worker.state == "ready"]

        workers = await self._when(lambda workers: len(ready(workers)) >= 2, f"two ready {role} workers")
        return max(ready(workers), key=lambda worker: worker.running)

    async def _when(self, condition: Callable[[Sequence[WorkerInfo]], bool], what: str) -> Sequence[WorkerInfo]:
        end_s = time.monotonic() + SETTLE_S
        while True:
            status = await self._client.status()
            if condition(status.workers):
                return status.workers
            assert time.monotonic() < end_s, f"not within {SETTLE_S:g} s: {what}; status: {status}"
            await asyncio.sleep(POLL_S)


def is_lost(workers: Sequence[WorkerInfo], before: WorkerInfo) -> bool:
    """Whether nobody counts on that life of the worker any more."""
    life = WorkerId(before.uuid, before.epoch)
    return not any(WorkerId(worker.uuid, worker.epoch) == life and worker.state != "lost" for worker in workers)


# ---- streams ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the streams."""

    whole: int = 0
    tokens: int = 0
    recovered: int = 0
    """Answers that more than one attempt's workers had a part in."""
    slowest_pause_s: float = 0.0
    """Between two chunks of one answer."""
    wrong: list[str] = field(default_factory=list)


class Streams:
    """So many answers at once, and after each the next one, until `end`; those that run then are read to their ends."""

    def __init__(self, client: AsyncClient, cases: Sequence[Case]) -> None:
        self._client = client
        self._cases: Iterator[Case] = itertools.cycle(cases)
        self._is_over = False
        self.tally = Tally()

    async def run(self, count: int) -> None:
        """Raises what a client raises of any stream."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._one_after_another())

    def end(self) -> None:
        """Begin no further stream."""
        self._is_over = True

    async def _one_after_another(self) -> None:
        while not self._is_over:
            await self._read(next(self._cases))

    async def _read(self, case: Case) -> None:
        got: list[int] = []
        last_s: float | None = None
        events = self._client.generate(
            case.prompt,
            deadline_s=STREAM_S,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            temperature=case.temperature,
            seed=case.seed,
            loops=case.loops,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Chunk):
                    now_s = time.monotonic()
                    if last_s is not None:
                        self.tally.slowest_pause_s = max(self.tally.slowest_pause_s, now_s - last_s)
                    last_s = now_s
                    got += [token.id for token in event.tokens]
                elif isinstance(event, Finished):
                    self.tally.whole += 1
                    self.tally.recovered += bool(event.route.earlier)
        self.tally.tokens += len(got)
        if tuple(got) != case.expected:
            at = next((i for i, (a, b) in enumerate(zip(got, case.expected, strict=False)) if a != b), len(got))
            self.tally.wrong.append(f"{len(got)} tokens, other ones from token {at} on: {case.prompt[:8]}...")
