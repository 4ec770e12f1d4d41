"""A cluster's YAML file: schema, validation at load, and the slices that objects take from it.

`load_config` is the only reader of such a file. Whatever is wrong in it becomes one ConfigError that names the
file, the key, the value and what is allowed. No torch: the coordinator and the command line load this.
"""

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from loopline.errors import ConfigError
from loopline.faults import FaultList, check_workers, faults_of
from loopline.intake import MAX_DEADLINE_S
from loopline.settings import EngineSettings, SchedulerSettings, TransferSettings, WorkerSettings

Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
MessageBytes = Annotated[int, Field(ge=65536, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
UcxName = Annotated[str, Field(pattern=r"^UCX_[A-Z0-9_]+$")]
_PATTERNS = {r"^(cpu|cuda(:\d+)?)$": "cpu, cuda or cuda:N", r"^UCX_[A-Z0-9_]+$": "a name UCX_..."}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}
_CROSS = "cross_check"
_PREFIX_CACHE = {"auto": "auto", True: "on", False: "off"}  # YAML 1.1 reads on and off as booleans


class Section(BaseModel):
    """One mapping of the YAML: frozen, no unknown keys, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """Which checkpoint is served, and how."""

    path: Text
    """Checkpoint folder; relative to the YAML file."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Compute and KV dtype; auto: the checkpoint's own."""
    max_loops: Count | None = None
    """Most loops a request may ask for; KV is laid out for it. null: the model's default."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights of the geometry in config.json, to measure without a checkpoint's weights."""
    prefill: Literal["auto", "packed", "per_row"] = "auto"
    """How prompts are computed on CUDA. packed: all tokens of a step in one pass; per_row: each token as a decode row;
    auto: packed, if it agrees with per_row on fixed prompts at start."""
    initial_state: Literal["noise", "zeros"] = "noise"
    """Huginn's state before the first loop where a request names none."""


class KVConfig(Section):
    """The paged KV store; the same for every worker."""

    block_size: Count = 16
    """Tokens a block."""
    prefix_cache: Literal["auto", True, False] = "auto"
    """Whether prefill workers keep prompts' KV and find it again. auto: where KV depends on tokens alone (Ouro)."""


class CoordinatorConfig(Section):
    """The front door."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """Port to listen on; 0: any free one."""
    queue_limit: Count = 1024
    """Most requests that wait; past it a request is refused with a retry hint."""
    default_deadline_s: Seconds = 120.0
    """Deadline of a request that brought none."""


class WorkerGroup(Section):
    """What prefill and decode workers both have."""

    replicas: Count = 1
    """Workers of this role that the launcher starts."""
    device: Device = "cpu"
    """Where the worker computes and keeps its KV."""
    num_blocks: Count | None = None
    """Blocks in each worker's arena; null: what fits."""
    memory_fraction: Fraction = 0.8
    """Where num_blocks is null: on a CPU the part of free memory that an arena may take; on CUDA the part of the
    memory free at start that weights, workspace and arena may take together."""
    max_arena_bytes: Count | None = None
    """Most bytes of an arena where num_blocks is null; null: no further limit."""
    max_running: Count = 32
    """Most requests that hold blocks of one worker at once."""
    max_waiting: Count = 1024
    """Most requests that wait for blocks in one worker."""
    chunk_tokens: Count = 256
    """Most prompt tokens of one request in one step; a multiple of kv.block_size."""
    max_token_loops: Count = 8192
    """Most token-loops (tokens x depth) in one step."""
    deterministic: bool = True
    """On the CPU: a token's result depends neither on its batch nor on where it was computed."""
    num_threads: Count = 1
    """Threads of a CPU worker; more than 1 only where deterministic is false."""
    cuda_graphs: bool = True
    """On CUDA: replay decode and prompt steps as graphs; false: launch their kernels one by one."""
    steps_ahead: Literal[0, 1] | None = None
    """Steps that are planned and queued before the oldest one is waited for; null: 1 on CUDA, 0 on a CPU."""


class PrefillConfig(WorkerGroup):
    """Workers that compute prompts."""

    max_running: Count = 4
    """Most requests that hold blocks of one worker at once."""


class DecodeConfig(WorkerGroup):
    """Workers that generate tokens."""

    growth_share: Share = 1.0
    """Part of an answer's possible growth that is promised when it is let in; below 1 more answers run at once, and the
    youngest may be preempted and computed again."""


class TransferConfig(Section):
    """How KV moves from prefill to decode workers."""

    backend: Literal["nixl"] = "nixl"
    """The transport."""
    error_mode: Literal["peer", "none"] = "peer"
    """UCX error handling of every link: peer sees a lost peer at once."""
    ucx: dict[UcxName, str] = Field(default_factory=dict)
    """Extra UCX settings, UCX_NAME: value, set in each worker before its agent starts."""
    poll_interval_s: Seconds = 0.0003
    """Pause of the transfer thread between polls that found nothing; eight times as long after ten quiet seconds."""
    push_timeout_s: Seconds = 30.0
    """A push that is not done by then has failed."""
    in_flight_limit_bytes: Count = 2 * 2**30
    """Most bytes on their way from one prefill worker; past it no new chunk is begun."""
    peer_share: Fraction = 0.5
    """Part of those bytes that may be on their way to one decode worker."""
    max_push_bytes: Count = 256 * 2**20
    """Most bytes of one push, if a block is not larger."""


class MembershipConfig(Section):
    """Who belongs to the cluster, and how workers leave it."""

    lease_s: Seconds = 3.0
    """A worker that was not heard of for this long is lost."""
    drain_limit_s: Seconds = 10.0
    """How long running requests may take to finish when the process that has them is told to leave."""


class LauncherConfig(Section):
    """Who starts the workers."""

    kind: Literal["local"] = "local"
    """local: processes on this machine."""
    host: Text = "127.0.0.1"
    """This machine's address at which the workers that it starts listen and are reached by other workers."""
    restart: Literal["always", "never"] = "always"
    """Whether a worker that ended by itself is started again."""


class RoutingConfig(Section):
    """Which workers run a request."""

    policy: Literal["least_work"] = "least_work"
    """least_work: the workers with the least queued work, in token-loops."""
    local_prefill_below_tokens: Literal[0] = 0
    """Prompts with fewer uncached tokens are prefilled on the decode worker itself; 0, the only value yet: none."""


class LimitsConfig(Section):
    """Bounds on messages."""

    max_message_bytes: MessageBytes = 16 * 2**20
    """Largest gRPC message, both ways."""


class ClusterConfig(Section):
    """One cluster: a checkpoint and the processes that serve it."""

    name: Text = "cluster"
    """The cluster's name in logs; by default the file's name without its ending."""
    model: ModelConfig
    """Which checkpoint is served, and how."""
    kv: KVConfig = KVConfig()
    """The paged KV store."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The front door."""
    prefill: PrefillConfig = PrefillConfig()
    """Workers that compute prompts."""
    decode: DecodeConfig = DecodeConfig()
    """Workers that generate tokens."""
    transfer: TransferConfig = TransferConfig()
    """How KV moves between them."""
    membership: MembershipConfig = MembershipConfig()
    """Who belongs to the cluster."""
    launcher: LauncherConfig = LauncherConfig()
    """Who starts the workers."""
    routing: RoutingConfig = RoutingConfig()
    """Which workers run a request."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds on messages."""
    faults: FaultList = []
    """What workers do wrong on purpose, for tests."""

    @model_validator(mode="after")
    def _cross_checks(self) -> "ClusterConfig":
        for role in ("prefill", "decode"):
            for key, value, allowed in _group_faults(getattr(self, role), self.kv.block_size):
                context = {"key": f"{role}.{key}", "value": value, "allowed": allowed}
                raise PydanticCustomError(_CROSS, "{key} is {value}; allowed: {allowed}", context)
        check_workers(self.faults, {"prefill": self.prefill.replicas, "decode": self.decode.replicas})
        return self

    def engine_settings(self, role: str) -> EngineSettings:
        """The engine's slice for one role ("prefill" or "decode")."""
        group = self._group(role)
        return EngineSettings(
            model_path=self.model.path,
            device=group.device,
            dtype=self.model.dtype,
            load_format=self.model.load_format,
            prefill=self.model.prefill,
            cuda_graphs=group.cuda_graphs,
            max_loops=self.model.max_loops,
            block_size=self.kv.block_size,
            prefix_cache=_PREFIX_CACHE[self.kv.prefix_cache],
            num_blocks=group.num_blocks,
            memory_fraction=group.memory_fraction,
            max_arena_bytes=group.max_arena_bytes,
            deterministic=group.deterministic,
            num_threads=group.num_threads,
            scheduler=SchedulerSettings(
                max_running=group.max_running,
                max_waiting=group.max_waiting,
                chunk_tokens=group.chunk_tokens,
                max_token_loops=group.max_token_loops,
                steps_ahead=_steps_ahead(group),
                growth_share=self.decode.growth_share if role == "decode" else 1.0,
            ),
        )

    def worker_settings(
        self, role: str, name: str, coordinator: str, port: int = 0, *, host: str = "127.0.0.1"
    ) -> WorkerSettings:
        """Everything that one worker process needs. `coordinator` is HOST:PORT; `host` is where the worker listens."""
        transfer = self.transfer
        return WorkerSettings(
            name=name,
            role=role,
            coordinator=coordinator,
            host=host,
            port=port,
            engine=self.engine_settings(role),
            transfer=TransferSettings(
                backend=transfer.backend,
                error_mode=transfer.error_mode,
                ucx=tuple(sorted(transfer.ucx.items())),
                poll_interval_s=transfer.poll_interval_s,
                push_timeout_s=transfer.push_timeout_s,
                in_flight_limit_bytes=transfer.in_flight_limit_bytes,
                peer_share=transfer.peer_share,
                max_push_bytes=transfer.max_push_bytes,
            ),
            drain_limit_s=self.membership.drain_limit_s,
            faults=faults_of(self.faults, name),
        )

    def _group(self, role: str) -> WorkerGroup:
        if role == "prefill":
            return self.prefill
        if role == "decode":
            return self.decode
        raise ConfigError(f"role is {role!r}; allowed: prefill, decode")


def _steps_ahead(group: WorkerGroup) -> int:
    if group.steps_ahead is not None:
        return group.steps_ahead
    return 1 if group.device.startswith("cuda") else 0


def _group_faults(group: WorkerGroup, block_size: int) -> Iterator[tuple[str, int, str]]:
    if group.chunk_tokens % block_size:
        yield "chunk_tokens", group.chunk_tokens, f"a multiple of kv.block_size ({block_size})"
    if group.num_threads > 1 and group.deterministic:
        yield "num_threads", group.num_threads, "1, or more with deterministic: false"


def load_config(path: str | Path) -> ClusterConfig:
    """Read and check a cluster YAML. Raises ConfigError; it does not open the checkpoint folder."""
    file = Path(path)
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {_yaml_fault(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds {raw!r}; allowed: a mapping with the keys {_keys(ClusterConfig)}")
    raw.setdefault("name", file.stem)
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("path"), str) and model["path"]:
        model["path"] = str((file.resolve().parent / Path(model["path"]).expanduser()).resolve())
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"{file}: {_fault_text(fault['loc'], fault)}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, except that a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not YAML: {error}"


def _fault_text(loc: tuple[int | str, ...], fault: Any) -> str:
    if fault["type"] == _CROSS:
        return str(fault["msg"])
    key = ".".join(str(part) for part in loc if part != "[key]")
    section, name = _section_of(loc)
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: no such key; allowed: {_keys(section)}"
    if fault["type"] == "missing":
        return f"{key} is missing; needed: {_allowed(section, name)}"
    return f"{key} is {fault['input']!r}; allowed: {_allowed(section, name)}"


def _section_of(loc: tuple[int | str, ...]) -> tuple[type[Section], str]:
    """The schema class that a fault's location lies in, and the field's name there."""
    section: type[Section] = ClusterConfig
    for depth, part in enumerate(loc):
        field = section.model_fields.get(str(part))
        inner = field.annotation if field is not None else None
        if depth + 1 == len(loc) or not (isinstance(inner, type) and issubclass(inner, Section)):
            return section, str(part)
        section = inner
    return section, ""


def _keys(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


def _allowed(section: type[Section], name: str) -> str:
    field = section.model_fields[name]
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, constraints: list[Any]) -> str:
    """What a key of this type may hold, in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _describe(args[0], [item for info in args[1:] if isinstance(info, FieldInfo) for item in info.metadata])
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else _describe(arg, constraints) for arg in args)
    if origin is Literal:
        return " or ".join(args)
    if origin is dict:
        return "a mapping of UCX_NAME to text (quote numbers)"
    if issubclass(annotation, Section):
        return f"a mapping with the keys {_keys(annotation)}"
    pattern = next((item.pattern for item in constraints if getattr(item, "pattern", None)), None)
    if pattern is not None:
        return _PATTERNS[pattern]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[annotation]
    return words + "".join(
        f", {_BOUNDS[key]} {getattr(item, key)}" for item in constraints for key in _BOUNDS if hasattr(item, key)
    )
