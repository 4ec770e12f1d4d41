"""A long run of small requests against a cluster that goes wrong all the time: the faults, the load, who is killed,
what is watched. `tests/cluster/test_soak.py` says what must hold."""

import asyncio
import contextlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil

from loopline.client import Accepted, AsyncClient, Chunk, Event, WorkerInfo
from loopline.errors import DeadlineExceeded, WorkerLost
from loopline.settings import FaultSettings
from tests.support.cluster import Cluster

logger = logging.getLogger(__name__)
DEADLINE_S = 20.0
"""Of a request: what nobody says again costs all of it, and a busy machine is slow."""
MOST_IN_FLIGHT = 16
CANCELLED_PART = 0.1
CANCEL_WITHIN_S = 0.5
SETTLE_S = 60.0
"""Until a worker that was killed or stopped is ready again, on a busy machine."""
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
PAUSE_S = 0.1


# ---- what goes wrong -------------------------------------------------------------------------------------------------

_PUSHES: dict[str, dict[str, object]] = {
    "fail_push": {},
    "delay_push": {"seconds": 0.3},
    "fail_handle": {},
    "drop_push": {},
}
_NOTICES = ("drop_notice", "repeat_notice", "reorder_notices")
_MESSAGES = {
    "prefill": ("Prefilled", "RequestFailed", "StartPrefill", "Cancel"),
    "decode": ("Reserved", "Granted", "StepTokens", "RequestFailed", "Reserve", "Bind", "Cancel"),
}
"""Those of requests. What is said of workers (Pair, PeerGone) is said seldom: a swap would be its loss."""

_SPARED = 4
"""Events of each kind at the start of a process that no fault meets."""


def fault_entries(rate: float) -> list[dict[str, object]]:
    """The `faults` section: everything at one rate, with draws of its own for each worker."""
    entries: list[dict[str, object]] = []
    for number, (worker, role) in enumerate(ROLES.items()):
        own: list[dict[str, object]]
        if role == "prefill":
            own = [{"do": kind, "rate": rate, **extra} for kind, extra in _PUSHES.items()]
        else:
            own = [{"do": kind, "rate": rate} for kind in _NOTICES]
        for message in _MESSAGES[role]:
            own += [{"do": do, "message": message, "rate": rate} for do in ("repeat_message", "reorder_messages")]
        entries += [{"worker": worker, **entry, "seed": _seed(entry, number)} for entry in own]
    return entries


def _seed(entry: dict[str, Any], number: int) -> int:
    """One of the worker's own, whose draws let the token through that makes the cluster ready."""
    draws = (FaultSettings(**{**entry, "seed": seed}) for seed in itertools.count(number, len(ROLES)))
    return next(draw.seed for draw in draws if not any(draw.is_due(event) for event in range(1, _SPARED + 1)))


class Disturber:
    """Kills and stops workers, one at a time, each way in turn. Only the second worker of a role is its victim, so that
    the first one lives through the whole run."""

    _TURNS = (
        ("kill", "prefill-1"),
        ("stop", "decode-1"),
        ("kill", "decode-1"),
        ("stop", "prefill-1"),
        ("hang", "decode-1"),
        ("hang", "prefill-1"),
    )

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.done: Counter[str] = Counter()

    async def disturb(self) -> None:
        """Kill a worker, stop it until it is lost and wake it up, or stop it for good; back when it is ready again."""
        way, name = self._TURNS[self.done.total() % len(self._TURNS)]
        before = await self._when(name, lambda worker: worker.state == "ready")
        logger.info("%s %s (pid %d)", way, name, before.pid)
        process = psutil.Process(before.pid)
        if way == "kill":
            process.kill()
        else:
            process.suspend()
        if way == "stop":
            await self._when(name, lambda worker: worker.state == "lost")
            with contextlib.suppress(psutil.NoSuchProcess):  # the launcher may have been quicker
                process.resume()
        life = (before.uuid, before.epoch)
        await self._when(name, lambda worker: worker.state == "ready" and (worker.uuid, worker.epoch) != life)
        self.done[f"{way} {name}"] += 1

    async def _when(self, name: str, condition: Callable[[WorkerInfo], bool]) -> WorkerInfo:
        async with asyncio.timeout(SETTLE_S):
            while True:
                worker = (await asyncio.to_thread(self._cluster.workers)).get(name)
                if worker is not None and condition(worker):
                    return worker
                await asyncio.sleep(PAUSE_S)


# ---- the load --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A request and what a run without a cluster answers."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    expected: tuple[int, ...]
    loops: int | None = None  # the model's default


@dataclass
class Tally:
    """How requests ended: right, cancelled, or by the name of the error; how many tokens those with an error had; and
    what must never happen."""

    ends: Counter[str] = field(default_factory=Counter)
    cut_after: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, end: str, case: Case, got: Sequence[int], is_whole: bool) -> None:
        self.ends[end] += 1
        expected = case.expected if is_whole else case.expected[: len(got)]
        if tuple(got) != expected:
            self.wrong.append(f"{end}: {tuple(got)} of {case}")


class Load:
    """`count` requests, so many in flight at once."""

    def __init__(self, cluster: Cluster, cases: Sequence[Case], count: int, seed: int) -> None:
        generator = random.Random(seed)
        limits = [
            generator.uniform(0.0, CANCEL_WITHIN_S) if generator.random() < CANCELLED_PART else None
            for _ in range(count)
        ]
        self._work: Iterator[tuple[Case, float | None]] = iter([(generator.choice(cases), limit) for limit in limits])
        self._address = cluster.address
        self._count = count
        self.tally = Tally()

    @property
    def num_ended(self) -> int:
        return self.tally.ends.total()

    @property
    def is_over(self) -> bool:
        return self.num_ended >= self._count

    async def run(self) -> None:
        async with AsyncClient(self._address) as client, asyncio.TaskGroup() as tasks:
            for _ in range(MOST_IN_FLIGHT):
                tasks.create_task(self._ask_in_turn(client))

    async def _ask_in_turn(self, client: AsyncClient) -> None:
        for case, limit_s in self._work:
            await self._ask(client, case, limit_s)

    async def _ask(self, client: AsyncClient, case: Case, limit_s: float | None) -> None:
        """One request to its end, whatever it is; an error that is not one of a request's ends is raised."""
        got: list[int] = []
        end = "no end"
        accepted = ""
        try:
            async with asyncio.timeout(limit_s), contextlib.aclosing(self._events(client, case)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        got += [token.id for token in event.tokens]
                    elif isinstance(event, Accepted):
                        accepted = event.request_id
                    else:
                        end = "right"
        except TimeoutError:
            end = "cancelled"
        except (DeadlineExceeded, WorkerLost) as error:
            end = type(error).__name__
            self.tally.cut_after[len(got)] += 1
            if f"; {len(got)} tokens were delivered" not in str(error):
                self.tally.wrong.append(f"{len(got)} tokens came, and the error says: {error}")
            logger.info("%s after %d tokens: %s", accepted, len(got), error)
        self.tally.note(end, case, got, is_whole=end in ("right", "no end"))

    def _events(self, client: AsyncClient, case: Case) -> AsyncGenerator[Event, None]:
        return client.generate(
            case.prompt,
            deadline_s=DEADLINE_S,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            temperature=case.temperature,
            seed=case.seed,
        )


# ---- what is watched -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What a process takes up at one moment."""

    rss_bytes: int
    num_fds: int
    num_threads: int


class Watch:
    """Samples of every process of a cluster, over the whole run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._samples: dict[int, list[Sample]] = {}
        self._names: dict[int, str] = {}
        self._rounds = 0

    def look(self) -> None:
        self._rounds += 1
        is_first = not self._samples
        for process in (psutil.Process(self._cluster.process.pid), *self._cluster.descendants()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
                sample = Sample(process.memory_info().rss, process.num_fds(), process.num_threads())
                if is_first:
                    self._names[process.pid], self._samples[process.pid] = name_of(process), []
                if process.pid in self._samples:
                    self._samples[process.pid].append(sample)

    def growth(self) -> dict[str, Sample]:
        """By process that had loaded at the first look and was there at half of all looks or more: the median of its
        last quarter less that of its first."""
        grown: dict[str, Sample] = {}
        for pid, samples in self._samples.items():
            if 2 * len(samples) < self._rounds or len(samples) < 4:
                continue
            first, last = samples[: len(samples) // 4], samples[-(len(samples) // 4) :]
            grown[f"{self._names[pid]} ({pid})"] = Sample(
                *(
                    int(median(getattr(s, key) for s in last) - median(getattr(s, key) for s in first))
                    for key in ("rss_bytes", "num_fds", "num_threads")
                )
            )
        return grown


def name_of(process: psutil.Process) -> str:
    """The worker's name, or what the process is."""
    words = process.cmdline()
    if "--name" in words:
        return words[words.index("--name") + 1]
    return "coordinator" if "coordinator" in words else "launcher"
