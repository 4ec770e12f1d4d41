"""Sessions against engines in this process: arms that differ in prefix caching, arena, way of prompts or host work.

Arms of one way of prompts share an engine, which starts over between runs, so that each run finds an empty cache and
the same graphs. `loopline bench session` and `burst` show what `measure` gives.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from loopline.bench import host
from loopline.bench.engine import machine
from loopline.bench.load_report import Collected, Watcher, turns_first_last
from loopline.bench.naive_core import NaiveLedger, NaiveScheduler
from loopline.bench.named_model import folder_of, spec_of
from loopline.bench.session_arms import (
    EngineArm,
    EngineLoad,
    arms_of,
    block_size_of,
    check_prefixes,
    further_settings,
    names_of,
    num_blocks,
    pairs_of,
)
from loopline.bench.sessions import Conversation, Trace
from loopline.bench.shapes import SHAPES
from loopline.bench.turn_figures import Limits, TurnDone
from loopline.engine.engine import Engine, require_device
from loopline.errors import ConfigError, InvariantBroken
from loopline.kv.ledger import Ledger
from loopline.model_spec import ModelSpec
from loopline.request import Request, SamplingParams
from loopline.sched.plan import StepOutcome
from loopline.sched.policy import UnifiedPolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import EngineSettings, SchedulerSettings

_COUNTED_TURNS = 2  # of each session, where calls are counted


def measure(load: EngineLoad, trace: Trace, limits: Limits, command: str, watch: Watcher) -> dict[str, Any]:
    """The report. Raises OperatorError kinds for what cannot run at all; an arm that fails has its error there."""
    arms = arms_of(load)
    spec, names = spec_of(load.model), names_of(arms)
    if trace.longest > spec.context_tokens:
        raise ConfigError(f"the longest conversation has {trace.longest} tokens; the context is {spec.context_tokens}")
    check_prefixes(load, spec)
    require_device(load.device)
    collected = Collected(names, limits)
    watch.total(load.rounds * len(arms) * trace.num_turns)
    with _engines(load, trace, spec, arms, watch) as engines:
        for number, index in turns_first_last(load.rounds, len(arms)):
            arm = arms[index]
            watch.say(f"round {number + 1} of {load.rounds}: {names[index]}")
            salt = f"round{number}"
            with collected.guarded(names[index]):
                engine = engines[arm.prefill]
                run = _start(engine, arm, trace, salt)
                turns = run.to_end(watch.turn_done)
                engine.ledger.audit()
                collected.take(names[index], turns, {"steps": run.num_steps, "step_ms": run.step_ms})
        calls = _count(load, trace, engines, dict(zip(names, arms, strict=True)), watch) if load.counts_calls else {}
    report: dict[str, Any] = {
        "machine": host.machine() | _device(load, command),
        "model": {"name": load.model, "loops": spec.default_loops, "dtype": load.dtype},
        "trace": dict(trace.made_by) | {"working_set_blocks": trace.working_set_blocks(block_size_of(load))},
    }
    return report | collected.report(pairs_of(arms, names)) | {"calls": calls}


# ---- one run


class SessionRun:
    """The sessions of a trace against one engine that has nothing else to do; in one thread."""

    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        salt: str,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`salt`: as for Conversation. `sleep` is called while all clients think."""
        self.num_steps = 0
        self._engine, self._seed = engine, trace.seed
        self._now_s, self._sleep = now_s, sleep
        vocab_size = engine.model.spec.vocab_size
        self._conversations = [Conversation(trace, one, vocab_size, salt) for one in trace.sessions]
        self._due = [(one.turns[0].wait_s, index) for index, one in enumerate(trace.sessions)]
        heapq.heapify(self._due)
        self._asked: dict[str, tuple[int, TurnDone, list[int]]] = {}  # by request id: session, turn so far, answer
        self._done: list[TurnDone] = []
        self._begin_s = self._end_s = 0.0

    @property
    def step_ms(self) -> float:
        """Of the time until the last step, for each step."""
        return 1e3 * self._end_s / max(1, self.num_steps)

    def to_end(
        self, turn_done: Callable[[], None] = lambda: None, step: Callable[[], StepOutcome | None] | None = None
    ) -> list[TurnDone]:
        """All turns, in the order of their ends. `step`: what to call for the engine's `step`. Where that raises, the
        engine is left without requests."""
        try:
            return self._to_end(turn_done, step or self._engine.step)
        except Exception:
            with suppress(Exception):  # of an engine that is broken; what broke it is raised
                self._give_up()
            raise

    def _to_end(self, turn_done: Callable[[], None], step: Callable[[], StepOutcome | None]) -> list[TurnDone]:
        self._begin_s = self._now_s()
        while self._due or self._asked:
            now_s = self._now_s() - self._begin_s
            while self._due and self._due[0][0] <= now_s:
                due_s, index = heapq.heappop(self._due)
                self._ask(index, due_s, turn_done)
            if not self._asked:
                if self._due:
                    self._sleep(max(0.0, self._due[0][0] - now_s))
                continue
            outcome = step()
            if outcome is None:
                raise InvariantBroken("requests are running and nothing can be computed")
            self.num_steps += 1
            self._end_s = self._now_s() - self._begin_s
            self._take(outcome, turn_done)
        self._empty()
        return self._done

    def _give_up(self) -> None:
        for name in self._asked:
            allocation = self._engine.scheduler.remove(name)
            if allocation is not None:
                self._engine.ledger.release(allocation)
        self._empty()

    def _empty(self) -> None:
        """Wait for steps that were planned ahead for requests that have ended."""
        while self._engine.scheduler.num_in_flight:
            self._engine.step()

    def _ask(self, index: int, due_s: float, turn_done: Callable[[], None]) -> None:
        conversation = self._conversations[index]
        turn, number = conversation.next_turn, conversation.num_asked
        if turn is None:
            raise InvariantBroken(f"session {conversation.session.name} is over and was to go on")
        prompt, name = conversation.ask(), f"{conversation.session.name}/{number}"
        loops = self._engine.layout.max_loops
        params = SamplingParams(max_tokens=turn.answer_tokens, seed=self._seed + index, loops=loops)
        done = TurnDone(session=conversation.session.name, turn=number, due_s=due_s, prompt_tokens=len(prompt))
        self._asked[name] = (index, done, [])
        cause = self._engine.scheduler.submit(Request(request_id=name, prompt_ids=prompt, params=params))
        if cause is not None:
            self._end(name, turn_done, error=f"refused: {cause.value}")

    def _take(self, outcome: StepOutcome, turn_done: Callable[[], None]) -> None:
        for chunk in outcome.chunks:
            index, done, answer = self._asked[chunk.request_id]
            self._asked[chunk.request_id] = (index, replace(done, cached_tokens=chunk.num_cached), answer)
        for row in outcome.rows:
            index, done, answer = self._asked[row.request_id]
            if row.token_id is not None:
                answer.append(row.token_id)
            if len(answer) == 1:
                self._asked[row.request_id] = (index, replace(done, first_s=self._end_s), answer)
            if row.finish is not None:
                self._end(row.request_id, turn_done)
        for lost in outcome.lost:
            self._engine.ledger.release(lost.allocation)
            self._end(lost.request_id, turn_done, error=lost.detail)

    def _end(self, name: str, turn_done: Callable[[], None], error: str = "") -> None:
        index, done, answer = self._asked.pop(name)
        conversation = self._conversations[index]
        self._done.append(replace(done, end_s=self._end_s, answer_ids=tuple(answer), error=error))
        turn_done()
        if error:
            conversation.give_up()
            return
        conversation.take(answer)
        if conversation.next_turn is not None:
            heapq.heappush(self._due, (self._end_s + conversation.next_turn.wait_s, index))


@dataclass(frozen=True)
class _NoSharing(UnifiedPolicy):
    """No prefix is found or left."""

    shares_prefixes: bool = False


def _start(engine: Engine, arm: EngineArm, trace: Trace, salt: str) -> SessionRun:
    """A run with empty books of the arm's kind and size."""
    naive, block_size = arm.host == "naive", engine.settings.block_size
    ledger = (NaiveLedger if naive else Ledger)(num_blocks(arm, trace, block_size), block_size)
    policy = UnifiedPolicy() if arm.prefix_cache == "on" else _NoSharing()
    engine.start_over(policy, ledger, NaiveScheduler if naive else Scheduler)
    return SessionRun(engine, trace, salt)


def _count(
    load: EngineLoad, trace: Trace, engines: Mapping[str, Engine], arms: Mapping[str, EngineArm], watch: Watcher
) -> dict[str, Any]:
    """Calls of each arm's steps over the first turns, by Python and of built-in functions; it takes its time."""
    figures = {}
    short = trace.first_turns(_COUNTED_TURNS)
    for name, arm in arms.items():
        watch.say(f"counting calls: {name}")
        counts: Counter[CodeType | None] = Counter()
        engine = engines[arm.prefill]
        run = _start(engine, arm, short, "counted")
        turns = run.to_end(step=lambda engine=engine, counts=counts: host.count_calls(engine.step, counts))  # type: ignore[misc]
        built_in, tokens = counts[None], sum(len(one.answer_ids) for one in turns)
        python = counts.total() - built_in
        figures[name] = {
            "steps": run.num_steps,
            "answer_tokens": tokens,
            "python_calls_per_step": python / run.num_steps,
            "python_calls_per_token": python / tokens,
            "built_in_calls_per_step": built_in / run.num_steps,
        }
    return figures


# ---- engines


@contextmanager
def _engines(
    load: EngineLoad, trace: Trace, spec: ModelSpec, arms: Sequence[EngineArm], watch: Watcher
) -> Iterator[dict[str, Engine]]:
    """An engine for each way of prompts, each with room for its largest arm, and warm."""
    with folder_of(load.model) as folder:
        engines = {}
        for mode in dict.fromkeys(arm.prefill for arm in arms):
            watch.say(f"an engine, prompts {mode}")
            most_blocks = max(num_blocks(arm, trace, block_size_of(load)) for arm in arms if arm.prefill == mode)
            settings = _settings(load, trace, spec, str(folder), mode)
            engines[mode] = Engine(replace(settings, num_blocks=most_blocks), UnifiedPolicy())
            SessionRun(engines[mode], trace.first_turns(1), "warm-up").to_end()
        yield engines


def _settings(load: EngineLoad, trace: Trace, spec: ModelSpec, folder: str, prefill: str) -> EngineSettings:
    max_running = load.max_running or len(trace.sessions)
    scheduler = SchedulerSettings(
        max_running=max_running,
        max_waiting=len(trace.sessions),
        chunk_tokens=load.chunk_tokens,
        max_token_loops=(load.step_tokens + max_running) * spec.default_loops,
        steps_ahead=1 if load.device.startswith("cuda") else 0,
    )
    settings = EngineSettings(
        model_path=folder,
        device=load.device,
        dtype=load.dtype,
        max_loops=spec.default_loops,
        prefill=prefill,
        prefix_cache="on" if "on" in load.prefix_cache else "off",
        load_format="dummy" if load.random_weights or load.model in SHAPES else "safetensors",
        scheduler=scheduler,
    )
    return replace(settings, **further_settings(load.settings))


def _device(load: EngineLoad, command: str) -> dict[str, Any]:
    """What computes; a CPU is named by the host's own entry."""
    found = machine(torch.device(load.device), command)
    return {name: value for name, value in found.items() if name != "device" or load.device != "cpu"}
