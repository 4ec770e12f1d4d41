"""One engine: model, arena, ledger, scheduler and runner, put together from settings and stepped from outside.

Single-threaded: whoever owns it calls everything from one thread. A step that raises costs the requests in it and
nothing else.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from loopline import PROTOCOL_VERSION
from loopline.cache import cache_folder
from loopline.clock import Clock, MonotonicClock
from loopline.engine.assembly import build_parts, build_runner, memory_budget, require_plain_allocations
from loopline.engine.capacity import blocks_for_arena, free_bytes
from loopline.engine.forward import StateSource
from loopline.engine.runner import MOST_STEPS_AHEAD, Submitted
from loopline.engine.step_counts import StepCounts
from loopline.errors import ConfigError, InvariantBroken
from loopline.identity import Capacity, Fingerprint
from loopline.kv.arena import Arena, allocate_arena
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Ledger
from loopline.model import LoopedModel, load_model, random_model
from loopline.model.weights import weights_digest
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.noise_key import NoiseKey, check_prefix_cache, noise_fields
from loopline.request import Limits
from loopline.sched.plan import StepOutcome, StepPlan, StepResult
from loopline.sched.policy import RolePolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import EngineSettings

logger = logging.getLogger(__name__)
_ENDS_ENGINE = (torch.AcceleratorError, InvariantBroken)
"""After these nothing that the engine computes can be trusted: a device's error stays, a broken book stays broken."""
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Engine:
    """Owns its parts; `ledger` and `scheduler` are open to the worker that steps it.

    Up to `steps_ahead` plans are on the device beside the one that is waited for. Plans are committed in order.
    """

    def __init__(
        self,
        settings: EngineSettings,
        policy: RolePolicy,
        states: StateSource | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Load the checkpoint and allocate the arena. Raises OperatorError kinds that say what to change.

        `states`: where Huginn's initial states come from, if they are given and not drawn; no prefix is shared then.
        `clock`: what steps are timed by; by default the system's.
        """
        require_device(settings.device)
        _check(settings)
        if settings.device == "cpu":
            torch.set_num_threads(1 if settings.deterministic else settings.num_threads)
        else:
            require_plain_allocations()
            with suppress(OSError):  # no folder of ours: Triton's own
                os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
        self.settings = settings
        self._clock = clock or MonotonicClock()
        self.counts = StepCounts()
        self._use_device()
        free_at_start = free_bytes(settings.device)
        self.model: LoopedModel = _model(settings)
        self.layout = engine_layout(self.model.spec, settings, _DTYPE_NAMES[self.model.dtype])
        budget = 0 if settings.num_blocks else memory_budget(settings, self.model, self.layout, free_at_start)
        num_blocks = blocks_for_arena(settings, self.layout, self.model.spec.context_tokens, budget)
        self.arena: Arena = allocate_arena(self.layout, num_blocks, settings.device)
        self.ledger = Ledger(num_blocks, settings.block_size)
        parts = build_parts(settings, self.model, self.arena, self.ledger, states)
        self._runner = build_runner(settings, parts, self.ledger)
        self._shared, rows = self._prefix_group(states), self._runner.prompt_rows
        self.scheduler = Scheduler(self.ledger, settings.scheduler, policy, self._shared, rows)
        # Oldest first: a plan, its work or what kept it from being submitted, and when that was in seconds.
        self._in_flight: deque[tuple[StepPlan, Submitted | Exception, float]] = deque()
        self._last_end_s = self._clock.now_s()
        self._goes_on = False  # whether there was more to do when the last step ended
        logger.info("engine ready: %s, %d blocks of %d bytes", settings.model_path, num_blocks, self.layout.block_bytes)

    @property
    def limits(self) -> Limits:
        """What a request may ask of this engine alone."""
        return Limits(
            vocab_size=self.model.spec.vocab_size,
            context_tokens=self.model.spec.context_tokens,
            max_loops=self.layout.max_loops,
            arena_tokens=self.ledger.total_blocks * self.settings.block_size,
        )

    @property
    def capacity(self) -> Capacity:
        """What this engine can ever take."""
        return Capacity(
            block_size=self.settings.block_size,
            total_blocks=self.ledger.total_blocks,
            max_running=self.settings.scheduler.max_running,
            token_bytes=self.layout.token_bytes,
            growth_share=self.settings.scheduler.growth_share,
        )

    def fingerprint(self) -> Fingerprint:
        """What must be equal in every worker that this one shares KV with."""
        layout = self.layout
        return Fingerprint(
            (
                ("protocol", str(PROTOCOL_VERSION)),
                ("family", self.model.spec.family.value),
                ("weights", self._weights_name()),
                ("compute_dtype", _DTYPE_NAMES[self.model.dtype]),
                ("kv_dtype", layout.dtype),
                ("block_size", str(layout.block_size)),
                ("planes", str(layout.num_planes)),
                ("max_loops", str(layout.max_loops)),
                ("kv_heads", str(layout.kv_heads)),
                ("head_dim", str(layout.head_dim)),
                *noise_fields(self.model.spec, NoiseKey(self.settings.noise_key), self.settings.noise_seed),
                ("deterministic", str(self.settings.deterministic)),
            )
        )

    def start_over(
        self, policy: RolePolicy, ledger: Ledger, make_scheduler: Callable[..., Scheduler] = Scheduler
    ) -> None:
        """New books and a new scheduler over the same device and arena; nothing is cached any more. For benches, whose
        arms share a device. `ledger` may have fewer blocks than the arena; `make_scheduler` is called as Scheduler is.

        Raises InvariantBroken while anything runs or waits, and for blocks that the arena does not have.
        """
        if self._in_flight or self.scheduler.num_running or self.scheduler.num_waiting:
            raise InvariantBroken("an engine starts over while it has requests")
        if ledger.total_blocks > self.arena.num_blocks or ledger.block_size != self.settings.block_size:
            raise InvariantBroken(
                f"books of {ledger.total_blocks} blocks of {ledger.block_size} tokens for an arena of "
                f"{self.arena.num_blocks} of {self.settings.block_size}"
            )
        self.ledger = ledger
        rows = self._runner.prompt_rows
        self.scheduler = make_scheduler(ledger, self.settings.scheduler, policy, self._shared, rows)
        self._runner.use_ledger(ledger)

    def step(self) -> StepOutcome | None:
        """Submit what can be submitted, then wait for the oldest step and commit it; None if there was nothing."""
        self._use_device()
        while len(self._in_flight) <= self.settings.scheduler.steps_ahead and (plan := self.scheduler.plan()):
            began_s = self._clock.now_s()
            try:
                self._in_flight.append((plan, self._runner.submit(plan), began_s))
            except _ENDS_ENGINE:
                raise
            except Exception as error:  # whatever it is, it is these requests' failure and not the engine's
                self._in_flight.append((plan, error, began_s))
                break
        if not self._in_flight:
            self._goes_on = False
            return None
        plan, submitted, began_s = self._in_flight.popleft()
        if isinstance(submitted, Exception):
            return self._abandon(plan, submitted)
        try:
            result = self._runner.collect(submitted)
        except _ENDS_ENGINE:
            raise
        except Exception as error:
            return self._abandon(plan, error)
        return self._commit(plan, result, began_s)

    def _use_device(self) -> None:
        """Kernels are launched on the calling thread's current device, which need not be this engine's."""
        if self.settings.device.startswith("cuda"):
            torch.cuda.set_device(torch.device(self.settings.device).index or 0)

    def _commit(self, plan: StepPlan, result: StepResult, began_s: float) -> StepOutcome:
        now_s = self._clock.now_s()
        # A step that was queued behind another one began when that one ended.
        taken_s = now_s - max(began_s, self._last_end_s)
        # Whoever decodes waits from the end of a step to that of the next, whatever the host does in between.
        self.scheduler.share.observe(plan, now_s - self._last_end_s if self._goes_on else taken_s)
        outcome = self.scheduler.commit(plan, result)
        self._last_end_s, self._goes_on = now_s, self.scheduler.has_work
        self.counts.computed(plan, taken_s)
        return outcome

    def _abandon(self, plan: StepPlan, error: Exception) -> StepOutcome:
        self._runner.wait()  # what was queued of it may still write blocks that are about to be free
        self._last_end_s, self._goes_on = self._clock.now_s(), False
        self.counts.failed()
        logger.error("step %d failed; giving up its %d requests", plan.step, len(plan.request_ids), exc_info=error)
        return self.scheduler.abandon(plan, f"step {plan.step} failed: {error!r}")

    def _weights_name(self) -> str:
        """What stands for the weights in a fingerprint."""
        if self.settings.load_format == "dummy":
            return f"dummy:{self.settings.model_path}"
        return weights_digest(Path(self.settings.model_path))

    def _prefix_group(self, states: StateSource | None) -> Fingerprint | None:
        """What workers that share prefixes have in common; None: there are none."""
        spec, choice = self.model.spec, self.settings.prefix_cache
        check_prefix_cache(spec, choice, NoiseKey(self.settings.noise_key))
        has_given_states = states is not None and spec.uses_initial_state
        return None if choice == "off" or has_given_states else self.fingerprint()


def _model(settings: EngineSettings) -> LoopedModel:
    if settings.load_format == "dummy":
        spec = load_model_spec(settings.model_path)
        return random_model(spec, settings.device, settings.dtype, deterministic=settings.deterministic)
    return load_model(settings.model_path, settings.device, settings.dtype, deterministic=settings.deterministic)


def _check(settings: EngineSettings) -> None:
    """Raise ConfigError for a setting that nothing here knows."""
    for name, value, allowed in (
        ("prefill", settings.prefill, ("auto", "packed", "per_row")),
        ("load_format", settings.load_format, ("safetensors", "dummy")),
        ("prefix_cache", settings.prefix_cache, ("auto", "on", "off")),
        ("noise_key", settings.noise_key, tuple(NoiseKey)),
        ("steps_ahead", settings.scheduler.steps_ahead, range(MOST_STEPS_AHEAD + 1)),
    ):
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def engine_layout(spec: ModelSpec, settings: EngineSettings, dtype: str) -> KVLayout:
    """The KV layout of a model under these settings; the arena has the compute dtype."""
    return KVLayout.from_spec(spec, settings.max_loops or spec.default_loops, settings.block_size, dtype)


def require_device(device: str) -> None:
    """Raise ConfigError that says what there is, unless `device` can be computed on here."""
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return
    num_gpus = torch.cuda.device_count()
    if kind != "cuda" or (index and not index.isdigit()) or int(index or 0) >= num_gpus:
        gpus = f", cuda:0 to cuda:{num_gpus - 1}" if num_gpus else " (this machine, or this build of torch, has no GPU)"
        raise ConfigError(f"device is {device}; allowed here: cpu{gpus}")
