"""The sections of a cluster's YAML file, one class each: keys, types, bounds and defaults.

`loopline.config` puts them together, reads the file and words the faults.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from loopline.intake import MAX_DEADLINE_S
from loopline.schema_words import Words, cross_fault

Count = Annotated[int, Field(ge=1)]
Number = Annotated[int, Field(ge=0)]
MOST_WORKERS = 1000  # of a role: more is a slip of the finger
Replicas = Annotated[int, Field(ge=0, le=MOST_WORKERS)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
MessageBytes = Annotated[int, Field(ge=65536, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), Words("cpu, cuda or cuda:N")]
Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+$"), Words("http://HOST:PORT or https://HOST:PORT")]
UcxName = Annotated[str, Field(pattern=r"^UCX_[A-Z0-9_]+$"), Words("UCX_NAME")]
RayAddress = Annotated[str, Field(pattern=r"^(auto|local|[^/\s]+:\d+)$"), Words("auto, local or HOST:PORT")]
Amount = Annotated[float, Field(gt=0)]
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
LabelSelector = Annotated[
    str,
    Field(pattern=rf"^!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))$"),
    Words("A, !A, in(A,B) or !in(A,B), where A and B are letters, digits and -_. (quote numbers)"),
]


def _off(value: object) -> object:
    """YAML 1.1 reads off as a boolean."""
    return "off" if value is False else value


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
    noise_key: Literal["request", "position"] = "request"
    """What Huginn's noise is keyed by, besides position and channel. request: the request's seed; position: noise_seed,
    so that equal tokens have equal KV and prefixes can be shared."""
    noise_seed: Annotated[int, Field(ge=0, le=2**64 - 1)] = 0
    """The cluster's seed, where noise_key is position."""
    exit_gate: bool = False
    """Evaluate the exit gate with every token (Ouro), so that requests may ask for exit_probabilities."""


class KVConfig(Section):
    """The paged KV store; the same for every worker."""

    block_size: Count = 16
    """Tokens a block."""
    prefix_cache: Literal["auto", True, False] = "auto"
    """Whether workers keep the KV of prompts and answers and find it again. auto: where KV depends on tokens alone
    (Ouro; Huginn with noise_key position, or from zeros); true: the same, and for Huginn with noise_key request an
    error."""


class CoordinatorConfig(Section):
    """The front door."""

    host: Text = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """Port to listen on; 0: any free one."""
    queue_limit: Count = 1024
    """Most requests that wait; past it a request is refused with a retry hint."""
    unread_tokens: Annotated[int, Field(ge=64)] = 4096
    """Most tokens of an answer that are kept for a client that does not read; past it the request is ended."""
    default_deadline_s: Seconds = 120.0
    """Deadline of a request that brought none."""


class WorkerGroup(Section):
    """What workers of every role have."""

    replicas: Replicas = 1
    """Workers of this role that the launcher starts. 0 of both prefill and decode where there are unified ones, which
    is the default of a file that has a section unified and neither of these two."""
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
    """Most token-loops (tokens x depth) in one step; tokens that are being generated run in any case, and beside them
    the smallest pass over prompts."""
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
    prefill_share_tokens: Count = 64
    """Most prompt tokens that each loop of a step carries beside tokens that are being generated: of prompts that a
    decode worker computes itself, and of preempted answers."""
    max_time_per_token_s: Seconds | None = None
    """How long an answer may wait for its next token because of such prompts: each step carries as many of their tokens
    as measured costs allow, up to prefill_share_tokens; null: always up to prefill_share_tokens."""


class UnifiedConfig(DecodeConfig):
    """Workers that take whole requests: they compute the prompt and generate the answer."""

    replicas: Replicas = 0
    """Workers of this role that the launcher starts."""
    prefill_share_tokens: Count = 256
    """Most prompt tokens that each loop of a step carries beside tokens that are being generated, of all requests
    together; larger than a decode worker's, because there is no other worker that computes prompts."""


class TransferConfig(Section):
    """How KV moves from prefill to decode workers."""

    backend: Literal["nixl"] = "nixl"
    """The transport."""
    error_mode: Literal["auto", "peer", "none"] = "auto"
    """UCX error handling of every link. peer: a lost peer is seen at once; none: UCX may use all its transports; auto:
    none for a worker on CUDA, else peer."""
    ucx: dict[UcxName, str] = Field(default_factory=dict)
    """Extra UCX settings, UCX_NAME: value, set in each worker before its agent starts."""
    poll_interval_s: Seconds = 0.0003
    """Pause of the transfer thread between polls that found nothing; eight times as long after ten quiet seconds."""
    push_timeout_s: Seconds = 30.0
    """A push that is not done by then has failed; a fetch waits no longer either."""
    in_flight_limit_bytes: Count = 2 * 2**30
    """Most bytes on their way from one prefill worker; past it no new chunk is begun."""
    peer_share: Fraction = 0.5
    """Part of those bytes that may be on their way to one decode worker; and where a prefill worker has several, part
    of its running slots and blocks that may be for one of them."""
    rate_floor_bytes_per_s: Count | None = None
    """A link whose warm-up was slower is used, with a warning that names it; null: no floor."""
    max_push_bytes: Count = 256 * 2**20
    """Most bytes of one push, if a block is not larger."""
    verify: Annotated[Literal["off", "digest"], BeforeValidator(_off)] = "off"
    """digest: each push carries a digest of its bytes, and one that arrives with others fails its handoff; for
    debugging."""


class MembershipConfig(Section):
    """Who belongs to the cluster, and how workers leave it."""

    lease_s: Seconds = 3.0
    """A worker that was not heard of for this long is lost."""
    drain_limit_s: Seconds = 10.0
    """How long running requests may take to finish when the process that has them is told to leave."""
    reply_timeout_s: Seconds = 5.0
    """A worker that goes on working for this long, and neither answers nor knows of what it was given, has lost it: the
    request starts again."""
    engine_timeout_s: Seconds | None = None
    """A worker whose engine stands still for this long ends, and is started again. Longer than any step may take; null:
    60 on a CPU; on CUDA, where steps are short, lease_s but at least 3."""
    quarantine_limit: Fraction = 0.5
    """Part of a worker's blocks: where more of them are in quarantine for longer than lease_s + drain_limit_s, the
    worker drains, ends with status 3 and is started again."""


class LauncherConfig(Section):
    """Who starts the workers."""

    kind: Literal["local", "ray"] = "local"
    """local: processes on this machine; ray: on the nodes of a Ray cluster, which needs the extra `ray`."""
    host: Text = "127.0.0.1"
    """local: this machine's address at which the workers that it starts listen and are reached by other workers."""
    address: RayAddress = "auto"
    """ray: the Ray cluster that this machine is a node of (auto), the one with its head at HOST:PORT, or one that is
    started on this machine and ends with the launch (local)."""
    prefill_placement: Literal["pack", "spread"] = "pack"
    """ray: whether prefill workers share as few nodes as possible. Decode workers are always spread."""
    prefill_resources: dict[str, Amount] = Field(default_factory=dict)
    """ray: custom resources that each prefill worker takes of its node, besides its CPUs and its GPU."""
    decode_resources: dict[str, Amount] = Field(default_factory=dict)
    """ray: the same of each decode or unified worker."""
    prefill_labels: dict[str, LabelSelector] = Field(default_factory=dict)
    """ray: labels that the node of a prefill worker must have."""
    decode_labels: dict[str, LabelSelector] = Field(default_factory=dict)
    """ray: the same for decode and unified workers."""
    restart: Literal["always", "never"] = "always"
    """Whether a process that ended by itself is started again."""
    rebalance: Annotated[Literal["off", "auto"], BeforeValidator(_off)] = "off"
    """auto: a worker is moved from one role to the other when that one has long been what requests wait for."""
    rebalance_patience_s: Annotated[float, Field(ge=1, le=MAX_DEADLINE_S)] = 30.0
    """How long that is. The next move comes four times as long after it at the earliest."""

    @model_validator(mode="after")
    def _of_this_kind(self) -> "LauncherConfig":
        own = {"host"} if self.kind == "local" else _RAY_KEYS
        for key in sorted((self.model_fields_set & (_RAY_KEYS | {"host"})) - own):
            kind = "ray" if self.kind == "local" else "local"
            raise cross_fault(f"launcher.{key}", getattr(self, key), f"only with launcher.kind: {kind}")
        return self


_RAY_KEYS = {key for key, field in LauncherConfig.model_fields.items() if (field.description or "").startswith("ray:")}


class RoutingConfig(Section):
    """Which workers run a request."""

    policy: Literal["least_work", "power_of_two", "prefix_aware", "session_affinity"] = "least_work"
    """least_work: the workers with the least work, in token-loops; power_of_two: the better of two that are drawn;
    prefix_aware: what a worker would have to compute, with what it has cached, and its work; session_affinity: the
    worker of the session's last turn."""
    load_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """prefix_aware: how much a token-loop of a worker's other work counts against one that is computed for the request
    itself."""
    prefix_source: Literal["auto", "local", "recompute", "fetch"] = "auto"
    """How a prompt's KV gets to the chosen decode worker. local: that worker computes what it lacks; recompute: a
    prefill worker computes what is not in its own cache, and pushes what the decode worker lacks; fetch: it first
    fetches what the decode worker has and it lacks; auto: of recompute, fetch and, below local_prefill_below_tokens,
    local, the one that is estimated to be fastest. A unified worker computes every prompt itself, whatever this is."""
    local_prefill_below_tokens: Number = 0
    """auto: only prompts of which the chosen decode worker lacks fewer tokens may be computed by that worker itself; 0:
    none."""


class TelemetryConfig(Section):
    """What processes say of themselves."""

    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line with the request's internal id as a field."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least serious lines that are written."""
    metrics_port: Port | None = None
    """Port at which the coordinator serves Prometheus metrics at /metrics, on coordinator.host, and at /targets the
    list of all processes that do: each worker serves its own at any free port. null: none anywhere, 0: any free one,
    named in its log."""
    otlp_endpoint: Url | None = None
    """Where every process sends traces of requests, by OTLP over gRPC: http://HOST:PORT, https:// for TLS; needs the
    extra `otel`. null: nowhere."""


class CapacityConfig(Section):
    """What `loopline check` plans for. Nothing else reads it."""

    profile: Text | None = None
    """Hardware of the workers: a profile that comes along, or a file relative to the YAML file. null: h200 for workers
    on CUDA, cpu for others."""
    link: Text | None = None
    """The profile's link that KV takes from worker to worker. null: by devices, launcher and UCX settings."""


class LimitsConfig(Section):
    """Bounds on messages."""

    max_message_bytes: MessageBytes = 16 * 2**20
    """Largest gRPC message, both ways."""


class TlsConfig(Section):
    """Certificates of the cluster's processes."""

    ca_file: Text
    """PEM certificate of the authority that every process's certificate must be of."""
    cert_file: Text
    """PEM certificate of this process, for servers and clients, with the names at which it is reached."""
    key_file: Text
    """Its PEM private key, without a password."""


class SecurityConfig(Section):
    """Who may call whom, and what others on the network can read."""

    tls: TlsConfig | None = None
    """Files of TLS on every gRPC port, relative to the YAML file. Workers' ports ask for a certificate of the same
    authority too. null: plain text."""
    require_client_certificate: bool = False
    """Whether the coordinator's port asks every caller, clients too, for a certificate of the authority."""
    cluster_token_file: Text | None = None
    """File with the token of those who may control the cluster, relative to the YAML file. null: everybody may."""
    client_tokens_file: Text | None = None
    """File with lines NAME: TOKEN of those who may ask for answers, relative to the YAML file. null: everybody may."""
