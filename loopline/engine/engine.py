"""One engine: model, arena, ledger, scheduler and runner, put together from settings and stepped from outside.

Single-threaded: whoever owns it calls everything from one thread. A step that raises costs the requests in it and
nothing else.
"""

import logging
from pathlib import Path

import torch

from loopline import PROTOCOL_VERSION
from loopline.clock import MonotonicClock
from loopline.engine.capacity import blocks_for_arena
from loopline.engine.runner import Runner, StateSource
from loopline.errors import ConfigError
from loopline.identity import Capacity, Fingerprint
from loopline.kv.arena import Arena, allocate_arena
from loopline.kv.layout import KVLayout
from loopline.kv.ledger import Ledger
from loopline.model import LoopedModel, initial_state, load_model
from loopline.model.weights import weights_digest
from loopline.model_spec import ModelSpec
from loopline.request import Limits
from loopline.sched.plan import StepOutcome
from loopline.sched.policy import RolePolicy
from loopline.sched.scheduler import Scheduler
from loopline.settings import EngineSettings

logger = logging.getLogger(__name__)
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Engine:
    """Owns its parts; `ledger` and `scheduler` are open to the worker that steps it."""

    def __init__(self, settings: EngineSettings, policy: RolePolicy, states: StateSource = initial_state) -> None:
        """Load the checkpoint and allocate the arena. Raises OperatorError kinds that say what to change.

        `states`: where Huginn's initial states come from, if they are given and not keyed by request seed and position.
        """
        _require_device(settings.device)
        if settings.device == "cpu":
            torch.set_num_threads(1 if settings.deterministic else settings.num_threads)
        self.settings = settings
        self._clock = MonotonicClock()
        self.model: LoopedModel = load_model(
            settings.model_path, settings.device, settings.dtype, deterministic=settings.deterministic
        )
        self.layout = engine_layout(self.model.spec, settings, _DTYPE_NAMES[self.model.dtype])
        num_blocks = blocks_for_arena(settings, self.layout, self.model.spec.context_tokens)
        self.arena: Arena = allocate_arena(self.layout, num_blocks, settings.device)
        self.ledger = Ledger(num_blocks, settings.block_size)
        self.scheduler = Scheduler(self.ledger, settings.scheduler, policy, self._prefix_parts())
        self._runner = Runner(self.model, self.arena, self.ledger, settings.device, states)
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
        )

    def fingerprint(self) -> Fingerprint:
        """What must be equal in every worker that this one shares KV with."""
        layout = self.layout
        return Fingerprint(
            (
                ("protocol", str(PROTOCOL_VERSION)),
                ("family", self.model.spec.family.value),
                ("weights", weights_digest(Path(self.settings.model_path))),
                ("compute_dtype", _DTYPE_NAMES[self.model.dtype]),
                ("kv_dtype", layout.dtype),
                ("block_size", str(layout.block_size)),
                ("planes", str(layout.num_planes)),
                ("max_loops", str(layout.max_loops)),
                ("kv_heads", str(layout.kv_heads)),
                ("head_dim", str(layout.head_dim)),
                ("initial_state", "request-keyed"),
                ("deterministic", str(self.settings.deterministic)),
            )
        )

    def step(self) -> StepOutcome | None:
        """Plan, compute and commit one step; None if there was nothing to compute."""
        plan = self.scheduler.plan()
        if plan is None:
            return None
        began_s = self._clock.now_s()
        try:
            result = self._runner.run(plan)
        except Exception as error:  # whatever it is, it is these requests' failure and not the engine's
            logger.exception("step %d failed; giving up its %d requests", plan.step, len(plan.request_ids))
            return self.scheduler.abandon(plan, f"step {plan.step} failed: {error!r}")
        prompt_loops = sum(run.num_tokens * run.params.loops for run in plan.runs)
        self.scheduler.meter.observe(plan.num_decode_rows > 0, prompt_loops, self._clock.now_s() - began_s)
        return self.scheduler.commit(plan, result)

    def _prefix_parts(self) -> tuple[str, ...] | None:
        """What makes KV equal besides tokens and depth; None: prefixes are not shared."""
        choice = self.settings.prefix_cache
        if choice == "off" or (choice == "auto" and self.model.uses_initial_state):
            return None
        if self.model.uses_initial_state:
            raise ConfigError(
                "prefix_cache is on, and Huginn's initial state is keyed by each request's seed: equal prefixes have "
                "different KV; allowed: off, auto"
            )
        return tuple(f"{name}={value}" for name, value in self.fingerprint().fields)


def engine_layout(spec: ModelSpec, settings: EngineSettings, dtype: str) -> KVLayout:
    """The KV layout of a model under these settings; the arena has the compute dtype."""
    return KVLayout.from_spec(spec, settings.max_loops or spec.default_loops, settings.block_size, dtype)


def _require_device(device: str) -> None:
    """Raise ConfigError that says what there is, unless `device` can be computed on here."""
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return
    num_gpus = torch.cuda.device_count()
    if kind != "cuda" or (index and not index.isdigit()) or int(index or 0) >= num_gpus:
        gpus = f", cuda:0 to cuda:{num_gpus - 1}" if num_gpus else " (this machine, or this build of torch, has no GPU)"
        raise ConfigError(f"device is {device}; allowed here: cpu{gpus}")
