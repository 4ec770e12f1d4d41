"""Frozen slices of configuration, one per object that takes one. Standard library only, so that the engine runs without
pydantic; `loopline.config` validates a cluster YAML and makes these from it."""

import random
from dataclasses import dataclass

from loopline.security import NO_SECURITY, ClusterSecurity


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """How one worker fills its steps."""

    max_running: int = 32
    """Most requests that hold blocks at once."""
    max_waiting: int = 1024
    """Most requests that wait for blocks in this engine."""
    chunk_tokens: int = 256
    """Most prompt tokens of one request in one step; a multiple of the block size."""
    max_token_loops: int = 8192
    """Most token-loops (tokens x depth) in one step; one decode row per running request always fits, and one pass over
    prompts of the fewest rows beside them."""
    growth_share: float = 1.0
    """Share of a request's possible growth that is promised when it is let in. 1: whatever runs can finish. Below 1:
    more requests run at once, and the youngest are preempted and computed again when blocks run out."""
    max_passes: int = 8
    """How many younger requests may be let in before a first in line that does not fit."""
    prefill_tokens_per_loop: int | None = None
    """Most prompt tokens that each loop may carry in a step that also decodes; None: as many as its budget allows."""
    max_time_per_token_s: float | None = None
    """Seconds that a step which also decodes may take: it carries as many prompt tokens as measured costs allow, and at
    least one pass of the fewest rows. None: as long as it likes."""
    steps_ahead: int = 0
    """Steps that may be planned and submitted before the oldest is committed."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine: a model on a device, its arena and its scheduler."""

    model_path: str
    device: str = "cpu"
    dtype: str = "auto"
    """fp32, bf16, or auto: the checkpoint's own."""
    max_loops: int | None = None
    """Planes are laid out for this depth; None: the model's default."""
    block_size: int = 16
    """Tokens a block."""
    num_blocks: int | None = None
    """Blocks in the arena; None: as many as fit beside weights and workspace, up to `max_arena_bytes`."""
    memory_fraction: float = 0.8
    """CPU: share of free memory that the arena may have. CUDA: share of the memory free at start that weights,
    workspace and arena may have together."""
    max_arena_bytes: int | None = None
    load_format: str = "safetensors"
    """safetensors, or dummy: random weights of the geometry in config.json."""
    prefill: str = "auto"
    """How prompts are computed on CUDA. packed: all tokens of a step in one pass; per_row: each token as a decode row;
    auto: packed, if it agrees with per_row on fixed prompts at start."""
    exit_gate: bool = False
    """Evaluate the exit gate with every token, for requests that ask for its probabilities (Ouro)."""
    cuda_graphs: bool = True
    """Replay decode and prompt steps as CUDA graphs. Off: the same steps, kernel by kernel."""
    prefix_cache: str = "auto"
    """on, off, or auto: on for requests whose KV depends on tokens alone (`loopline.noise_key`)."""
    noise_key: str = "request"
    """What Huginn's noise is keyed by: request, its seed, or position, `noise_seed`."""
    noise_seed: int = 0
    """Unsigned 64 bits."""
    deterministic: bool = True
    """CPU: pad rows to tiles and use one torch thread, so that a row's result does not depend on its batch."""
    num_threads: int = 1
    """Torch threads on the CPU; more than one only with `deterministic` off."""
    scheduler: SchedulerSettings = SchedulerSettings()


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """The transport between prefill and decode workers."""

    backend: str = "nixl"
    """nixl, or none: the worker has no links."""
    error_mode: str = "auto"
    """UCX error handling of every link: peer, none, or auto: none where the arena is device memory, else peer."""
    ucx: tuple[tuple[str, str], ...] = ()
    """Extra UCX settings as (name, value), put into the environment before the agent is made."""
    poll_interval_s: float = 0.0003
    push_timeout_s: float = 30.0
    """A push that is not terminal by then has failed; its blocks stay quarantined."""
    in_flight_limit_bytes: int = 2 * 2**30
    """Most bytes that one prefill worker has posted and not seen end. One push may always go, however large."""
    peer_share: float = 0.5
    """Part of them that may be on their way to one decode worker, and of a prefill worker's running slots and blocks
    that may be for one of several."""
    max_push_bytes: int = 256 * 2**20
    """Most bytes of one push, if a block is not larger."""
    verify: str = "off"
    """digest: pushes carry a digest of their bytes, which the receiver checks; off: they carry none."""


def peer_slots(max_running: int, peer_share: float) -> int:
    """Requests that a prefill worker with several decode workers may run for one of them at once."""
    return max(1, int(max_running * peer_share))


def promised_tokens(tokens_now: int, tokens_max: int, growth_share: float) -> int:
    """Tokens that a worker keeps blocks for when it takes a request that has so many and may come to have so many."""
    return tokens_now + int((tokens_max - tokens_now) * growth_share + 0.5)


@dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """Something that a worker does wrong on purpose, for tests. `loopline.faults` says which kinds there are."""

    do: str
    at: int = 1
    """Which event of its kind, counted from 1; or where `state` is set, which handoff that enters it."""
    state: str = ""
    times: int = 1
    """How many events in a row."""
    seconds: float = 0.0
    """How long a delay lasts."""
    message: str = ""
    """The type of message that is meant."""
    rate: float = 0.0
    """Above 0: each event is met with this probability, and `at` and `times` mean nothing."""
    seed: int = 0
    """Of the draws where a rate is given."""
    prompt_token: int | None = None
    """Where set, whoever computes a request with this id in its prompt is met, and `at` and `times` mean nothing."""

    @property
    def is_lasting(self) -> bool:
        """Whether it is no matter of one moment, and goes on after a restart of its worker."""
        return self.rate > 0 or self.prompt_token is not None

    def is_due(self, number: int) -> bool:
        """Whether event `number` is met by it: the same answer whenever and in whatever order it is asked."""
        if self.rate:
            return random.Random(f"{self.seed} {self.do} {self.message} {number}").random() < self.rate
        return self.at <= number < self.at + self.times


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One worker process."""

    name: str
    role: str
    """prefill, decode or unified."""
    coordinator: str
    """HOST:PORT."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise: str = "127.0.0.1"
    """Address at which others reach it."""
    port: int = 0
    """0: any free port."""
    metrics_port: int | None = None
    """Where to answer scrapes, on `host`; 0: any free port, None: nowhere."""
    otlp_endpoint: str | None = None
    """URL that takes spans of requests; None: there are none."""
    cluster: str = "cluster"
    """The cluster's name, for these."""
    uuid: str = ""
    """Who the process is to others, fresh at every start; "": it draws one."""
    engine: EngineSettings
    transfer: TransferSettings = TransferSettings()
    connect_timeout_s: float = 10.0
    """How long to try to reach the coordinator, or to be let in by it, before giving up."""
    drain_limit_s: float = 10.0
    """How long a leaving worker may finish what runs, where the order to leave names no limit."""
    engine_timeout_s: float = 60.0
    """The process ends when its engine thread has stood still for this long."""
    quarantine_limit: float = 1.0
    """Part of the arena's blocks: with more of them in quarantine for `quarantine_patience_s` the worker drains, ends
    and asks to be started again. 1: never."""
    quarantine_patience_s: float = 13.0
    max_message_bytes: int = 16 * 2**20
    """Of gRPC, both ways."""
    security: ClusterSecurity = NO_SECURITY
    """What it shows to others and asks of them."""
    faults: tuple[FaultSettings, ...] = ()
    """What it does wrong on purpose."""
