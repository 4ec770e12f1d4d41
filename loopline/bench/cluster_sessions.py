"""Sessions against clusters: arms are addresses of running ones, or configurations, of which each is launched anew for
its turn and stopped after it, so that no arm's processes take another's processor.

`loopline bench session` and `burst` show what `measure` gives.
"""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from coordinator.launcher import Launcher
from loopline.bench.host import machine
from loopline.bench.load_report import Collected, Watcher, turns_first_last
from loopline.bench.sessions import Conversation, Trace
from loopline.bench.turn_figures import Limits, TurnDone
from loopline.client import AsyncClient
from loopline.client.records import Chunk, Finished, ModelInfo
from loopline.config import load_config, resolve_paths
from loopline.errors import ConfigError, LooplineError, OperatorError
from loopline.security import NO_CREDENTIALS, Credentials

_SERVING_S = 180.0  # of a cluster that is launched
_ANSWER_S = 20.0  # of one that runs
_IDLE_S = 120.0
_IDLE_POLL_S = 0.1
_WARM_TOKENS = 4


@dataclass(frozen=True)
class ClusterArm:
    """One cluster: a running one at `address`, or that of the file `config`."""

    name: str
    address: str | None = None
    config: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterLoad:
    """Which clusters, and how often each has its turn."""

    arms: tuple[ClusterArm, ...]
    rounds: int = 2
    deadline_s: float = 600.0
    """Of every request."""
    seed: int = 0
    """Of every request: what is drawn is drawn alike in all arms."""


async def measure(
    load: ClusterLoad,
    trace: Trace,
    limits: Limits,
    command: str,
    watch: Watcher,
    credentials: Credentials = NO_CREDENTIALS,
) -> dict[str, Any]:
    """The report. `credentials`: to show to clusters with an address; one that is launched has its own. A turn of an
    arm that fails has its error in the report, and an arm whose cluster did not come to serve has no further turn.
    Arms of one running cluster are asked other tokens each. Raises OperatorError kinds where nothing can run at all."""
    names = [arm.name for arm in load.arms]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"arms are {', '.join(names) or 'none'}; allowed: one or more, each with a name of its own")
    for arm in load.arms:
        if arm.config is not None:
            load_config(arm.config)  # before anything runs
    collected = Collected(names, limits)
    watch.total(load.rounds * len(names) * trace.num_turns)
    watch.say("looking for the clusters that run")
    workers = await _workers_of_running(load, trace, credentials, collected)
    first_of = shared_clusters(workers)
    lost = {arm.name for arm in load.arms if arm.address is not None and arm.name not in workers}
    once = secrets.token_hex(4)  # a cluster that runs may have cached what an earlier call asked
    for number, index in turns_first_last(load.rounds, len(names)):
        arm = load.arms[index]
        if arm.name in lost:
            continue
        watch.say(f"round {number + 1} of {load.rounds}: {arm.name}")
        salt = f"{once}/round{number}" + (f"/{arm.name}" if arm.name in first_of else "")
        with collected.guarded(arm.name):
            lost.add(arm.name)  # until it serves
            async with _served(arm, credentials) as client:
                lost.remove(arm.name)
                turns = await run_sessions(client, trace, salt, load, watch.turn_done)
            collected.take(arm.name, turns)
    report: dict[str, Any] = {
        "machine": machine() | {"command": command},
        "clusters": [
            {
                "name": arm.name,
                "address": arm.address,
                "config": arm.config and str(arm.config),
                "same_as": first_of.get(arm.name),
            }
            for arm in load.arms
        ],
        "trace": dict(trace.made_by),
        "notes": _notes(trace, workers, first_of),
    }
    return report | collected.report([(names[0], name) for name in names[1:]], asked_apart=first_of)


def shared_clusters(workers: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Which arms have the cluster of an earlier one, and of which; `workers`: the UUIDs of each arm's, arms in their
    order. Clusters with a worker in common are one."""
    first_of: dict[str, str] = {}
    for name, own in workers.items():
        earlier = (other for other in workers if other not in first_of and workers[other] & own)
        if (first := next(earlier, name)) != name:
            first_of[name] = first
    return first_of


def _notes(trace: Trace, workers: Mapping[str, frozenset[str]], first_of: Mapping[str, str]) -> list[str]:
    """What a reader of the figures must know."""
    notes = [
        f"{name} is the cluster of {first}: it is asked other tokens, so that it finds nothing of {first} cached, and "
        "its answers are not compared"
        for name, first in first_of.items()
    ]
    if workers and not trace.system_tokens and any(one.turns[0].token_ids is not None for one in trace.sessions):
        notes.append(
            "the trace names tokens that conversations begin with: they are the same in every run, and a cluster that "
            "runs may have them cached of an earlier one"
        )
    return notes


async def _workers_of_running(
    load: ClusterLoad, trace: Trace, credentials: Credentials, collected: Collected
) -> dict[str, frozenset[str]]:
    """The UUIDs of the workers of arms with an address, looked up at once; an arm that does not serve is left out and
    has its error in `collected`. Raises ConfigError as `run_sessions` does."""

    async def look(name: str, address: str) -> tuple[str, frozenset[str]] | None:
        with collected.guarded(name):
            async with AsyncClient(address, credentials=credentials) as client:
                await client.wait_serving(_ANSWER_S)
                _check_context(trace, await client.model())
                return name, frozenset(worker.uuid for worker in (await client.status()).workers)
        return None

    running = [(arm.name, arm.address) for arm in load.arms if arm.address is not None]
    found = await asyncio.gather(*(look(name, address) for name, address in running))
    return dict(one for one in found if one is not None)


def _check_context(trace: Trace, model: ModelInfo) -> None:
    if trace.longest > model.context_tokens:
        raise ConfigError(f"the longest conversation has {trace.longest} tokens; the context is {model.context_tokens}")


async def run_sessions(
    client: AsyncClient, trace: Trace, salt: str, load: ClusterLoad, turn_done: Callable[[], None] = lambda: None
) -> list[TurnDone]:
    """All sessions at once, each its turns one after the other; in the order of their ends. A session ends with a turn
    that fails. Raises ConfigError where the model's context is too short."""
    model = await client.model()
    _check_context(trace, model)
    runner = _Runner(client, load, model.vocab_size, turn_done)
    await asyncio.gather(
        *(runner.run(Conversation(trace, one, model.vocab_size, salt), salt) for one in trace.sessions)
    )
    return runner.done


class _Runner:
    """Asks for whole sessions; times count from when it was made."""

    def __init__(self, client: AsyncClient, load: ClusterLoad, vocab_size: int, turn_done: Callable[[], None]) -> None:
        self.done: list[TurnDone] = []
        self._client, self._load, self._vocab_size = client, load, vocab_size
        self._turn_done = turn_done
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()

    async def run(self, conversation: Conversation, salt: str) -> None:
        """One session to its end, or to a turn that failed."""
        ended_s = 0.0
        while (turn := conversation.next_turn) is not None:
            due_s = ended_s + turn.wait_s
            if (left_s := due_s - self._now_s()) > 0:
                await asyncio.sleep(left_s)  # the client thinks
            number, prompt = conversation.num_asked, conversation.ask()
            asked = TurnDone(session=conversation.session.name, turn=number, due_s=due_s, prompt_tokens=len(prompt))
            done = await self._ask(asked, prompt, turn.answer_tokens, f"{salt}/{conversation.session.name}")
            self.done.append(done)
            self._turn_done()
            if done.error:
                return
            conversation.take(done.answer_ids)
            ended_s = done.end_s

    async def _ask(self, asked: TurnDone, prompt: Sequence[int], answer_tokens: int, session: str) -> TurnDone:
        answer: list[int] = []
        first_s, finished = 0.0, None
        events = self._client.generate(
            prompt,
            max_tokens=answer_tokens,
            ignore_eos=True,
            session=session,
            seed=self._load.seed,
            deadline_s=self._load.deadline_s,
        )
        try:
            async with contextlib.aclosing(events) as answers:
                async for event in answers:
                    if isinstance(event, Chunk):
                        first_s = first_s or self._now_s()
                        answer += [token.id for token in event.tokens]
                    elif isinstance(event, Finished):
                        finished = event
        except LooplineError as error:
            return replace(asked, end_s=self._now_s(), error=f"{type(error).__name__}: {error}")
        done = replace(asked, first_s=first_s, end_s=self._now_s(), answer_ids=tuple(answer))
        if finished is None or len(answer) < answer_tokens:
            reason = "no end" if finished is None else finished.reason.value
            return replace(done, error=f"{len(answer)} of {answer_tokens} tokens, {reason}")
        route, handoff = finished.route, finished.handoff
        return replace(
            done,
            cached_tokens=finished.usage.cached_tokens,
            route=f"{route.prefill} {route.decode}",
            prefix_source=route.prefix_source,
            handoff_bytes=0 if handoff is None else handoff.num_bytes,
            fetched_bytes=0 if handoff is None else handoff.fetched_bytes,
        )

    def _now_s(self) -> float:
        return self._loop.time() - self._begin_s


@asynccontextmanager
async def _served(arm: ClusterArm, credentials: Credentials) -> AsyncIterator[AsyncClient]:
    """A client of the arm's cluster, which has answered and has nothing to do."""
    async with AsyncExitStack() as stack:
        address = arm.address
        if arm.config is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loopline-bench-")))
            launcher = Launcher(_with_any_port(arm.config, folder), run_dir=folder / "run", port=0)
            await stack.enter_async_context(launcher)
            await launcher.wait_serving(_SERVING_S)
            address, credentials = launcher.address, launcher.credentials
        if address is None:
            raise ConfigError(f"arm {arm.name} has neither an address nor a configuration")
        client = await stack.enter_async_context(AsyncClient(address, credentials=credentials))
        await client.wait_serving(_ANSWER_S)
        await client.complete([1] * _WARM_TOKENS, max_tokens=_WARM_TOKENS, ignore_eos=True)
        await _until_idle(client, arm.name)
        yield client


async def _until_idle(client: AsyncClient, name: str) -> None:
    """Until nothing waits or runs. Raises OperatorError where something still does after a while."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _IDLE_S
    while (status := await client.status()).queued or status.running:
        if loop.time() >= end_s:
            held = f"{status.queued} requests wait and {status.running} run"
            raise OperatorError(f"{name}: {held} for {_IDLE_S:g} s; does somebody else use the cluster?")
        await asyncio.sleep(_IDLE_POLL_S)  # back-off


def _with_any_port(config: Path, folder: Path) -> Path:
    """The same cluster on any free port, and quiet; paths hold from `folder`."""
    sections = yaml.safe_load(config.read_text(encoding="utf-8"))
    resolve_paths(sections, config.resolve().parent)
    sections["coordinator"] = {**(sections.get("coordinator") or {}), "port": 0}
    sections["telemetry"] = {**(sections.get("telemetry") or {}), "log_level": "warning"}
    path = folder / config.name
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path
