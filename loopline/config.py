"""A cluster's YAML file: schema, validation at load, and the slices that objects take from it.

`load_config` is the only reader of such a file. Whatever is wrong in it becomes one ConfigError that names the
file, the key, the value and what is allowed. No torch: the coordinator and the command line load this.
"""

import datetime
import logging
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from loopline.certificates import check_pair
from loopline.config_sections import (
    CoordinatorConfig,
    DecodeConfig,
    KVConfig,
    LauncherConfig,
    LimitsConfig,
    MembershipConfig,
    ModelConfig,
    PrefillConfig,
    RoutingConfig,
    Section,
    SecurityConfig,
    TelemetryConfig,
    Text,
    TransferConfig,
    WorkerGroup,
)
from loopline.errors import ConfigError
from loopline.faults import FaultList, check_workers, faults_of
from loopline.security import (
    MIN_TOKEN_CHARS,
    Access,
    ClusterSecurity,
    Credentials,
    is_loopback_host,
    is_open_to_others,
    read_client_tokens,
    read_tls,
    read_tokens,
)
from loopline.settings import EngineSettings, SchedulerSettings, TransferSettings, WorkerSettings

_LOG = logging.getLogger(__name__)
_PATTERNS = {
    r"^(cpu|cuda(:\d+)?)$": "cpu, cuda or cuda:N",
    r"^UCX_[A-Z0-9_]+$": "a name UCX_...",
    r"^https?://[^/\s]+$": "http://HOST:PORT or https://HOST:PORT",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}
_CROSS = "cross_check"
T = TypeVar("T")
PREFIX_CACHE = {"auto": "auto", True: "on", False: "off"}  # YAML 1.1 reads on and off as booleans


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
    security: SecurityConfig = SecurityConfig()
    """Who may call whom, and what others on the network can read."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and metrics."""
    faults: FaultList = Field(default_factory=list)
    """What workers do wrong on purpose, for tests."""

    @model_validator(mode="after")
    def _cross_checks(self) -> "ClusterConfig":
        for role in ("prefill", "decode"):
            for key, value, allowed in _group_faults(getattr(self, role), self.kv.block_size):
                context = {"key": f"{role}.{key}", "value": value, "allowed": allowed}
                raise PydanticCustomError(_CROSS, "{key} is {value}; allowed: {allowed}", context)
        for key, text, allowed in _security_faults(self):
            context = {"key": f"security.{key}", "value": text, "allowed": allowed}
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
            exit_gate=self.model.exit_gate,
            cuda_graphs=group.cuda_graphs,
            max_loops=self.model.max_loops,
            block_size=self.kv.block_size,
            prefix_cache=PREFIX_CACHE[self.kv.prefix_cache],
            noise_key=self.model.noise_key,
            noise_seed=self.model.noise_seed,
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
                prefill_tokens_per_loop=self.decode.prefill_share_tokens if role == "decode" else None,
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
            metrics_port=None if self.telemetry.metrics_port is None else 0,
            otlp_endpoint=self.telemetry.otlp_endpoint,
            cluster=self.name,
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
                verify=transfer.verify,
            ),
            drain_limit_s=self.membership.drain_limit_s,
            engine_timeout_s=_engine_timeout_s(self.membership, self._group(role).device),
            quarantine_limit=self.membership.quarantine_limit,
            quarantine_patience_s=self.membership.lease_s + self.membership.drain_limit_s,
            max_message_bytes=self.limits.max_message_bytes,
            faults=faults_of(self.faults, name),
        )

    def read_security(self, *, with_clients: bool = True) -> ClusterSecurity:
        """What a process of this cluster shows and asks for, read from the files. Raises ConfigError that names key and
        file.

        `with_clients`: read clients' tokens too, whose file is on the coordinator's machine only. Without them nothing
        may be served to clients: they would all be let in.
        """
        section = self.security
        tls = None
        if section.tls is not None:
            tls = _of_key("tls", read_tls, section.tls.ca_file, section.tls.cert_file, section.tls.key_file)
        if section.cluster_token_file is None:
            return ClusterSecurity(Credentials(tls), Access(tls, section.require_client_certificate))
        tokens = _of_key("cluster_token_file", read_tokens, section.cluster_token_file)
        clients = {}
        if section.client_tokens_file is not None and with_clients:
            clients = _of_key("client_tokens_file", read_client_tokens, section.client_tokens_file)
        for name in (name for name, token in clients.items() if token in tokens):
            raise ConfigError(f"security.client_tokens_file: {name!r} has the cluster's own token")
        access = Access(tls, section.require_client_certificate, tokens, clients)
        return ClusterSecurity(Credentials(tls, tokens[0]), access)

    def _group(self, role: str) -> WorkerGroup:
        if role == "prefill":
            return self.prefill
        if role == "decode":
            return self.decode
        raise ConfigError(f"role is {role!r}; allowed: prefill, decode")


def _engine_timeout_s(membership: MembershipConfig, device: str) -> float:
    if membership.engine_timeout_s is not None:
        return membership.engine_timeout_s
    return max(3.0, membership.lease_s) if device.startswith("cuda") else 60.0


def _steps_ahead(group: WorkerGroup) -> int:
    if group.steps_ahead is not None:
        return group.steps_ahead
    return 1 if group.device.startswith("cuda") else 0


def _group_faults(group: WorkerGroup, block_size: int) -> Iterator[tuple[str, int, str]]:
    if group.chunk_tokens % block_size:
        yield "chunk_tokens", group.chunk_tokens, f"a multiple of kv.block_size ({block_size})"
    if group.num_threads > 1 and group.deterministic:
        yield "num_threads", group.num_threads, "1, or more with deterministic: false"


def _security_faults(config: ClusterConfig) -> Iterator[tuple[str, str, str]]:
    section = config.security
    if section.require_client_certificate and section.tls is None:
        yield "require_client_certificate", "true", "false without security.tls"
    if section.client_tokens_file is not None and section.cluster_token_file is None:
        yield "client_tokens_file", "set", "only with security.cluster_token_file, which the launcher itself needs"
    if section.cluster_token_file is not None and section.tls is None:
        for key, host in (("coordinator.host", config.coordinator.host), ("launcher.host", config.launcher.host)):
            if not is_loopback_host(host):
                yield "tls", "null", f"that only where all is on loopback, or others read the tokens; {key} is {host}"


def _of_key(key: str, read: Callable[..., T], *files: str) -> T:
    try:
        return read(*files)
    except ConfigError as error:
        raise ConfigError(f"security.{key}: {error}") from error


def _check_secrets(config: ClusterConfig, now: datetime.datetime, with_clients: bool) -> None:
    """What is wrong with the files of the section `security`. A secret that others can read is warned of."""
    security, section = config.read_security(with_clients=with_clients), config.security
    secret = [section.cluster_token_file, section.client_tokens_file if with_clients else None]
    if section.tls is not None:
        tls, files = security.credentials.tls, section.tls
        assert tls is not None
        _of_key("tls", partial(check_pair, tls, now=now), files.ca_file, files.cert_file, files.key_file)
        secret.append(files.key_file)
    for file in secret:
        if file is not None and is_open_to_others(file):
            _LOG.warning("%s can be read or written by other users here; it should be its owner's only", file)


def resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of a YAML file in `folder` absolute; what is no path is left for the schema to name.
    Raises ConfigError for one that leads nowhere."""
    security = raw.get("security")
    tls = security.get("tls") if isinstance(security, dict) else None
    places: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (raw.get("model"), ("path",)),
        (security, ("cluster_token_file", "client_tokens_file")),
        (tls, ("ca_file", "cert_file", "key_file")),
    )
    for section, keys in places:
        for key in keys if isinstance(section, dict) else ():
            if isinstance(section.get(key), str) and section[key]:
                try:
                    section[key] = str((folder / Path(section[key]).expanduser()).resolve())
                except (RuntimeError, ValueError, OSError):  # of no user, through a link to itself, with a NUL
                    raise ConfigError(f"{key} names no path that can be followed") from None  # it may be a secret


def load_config(path: str | Path, *, with_clients: bool = True) -> ClusterConfig:
    """Read and check a cluster YAML and the files of its section `security`, the one with clients' tokens only
    `with_clients`. Raises ConfigError; it does not open the checkpoint folder."""
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
        held = "text" if isinstance(raw, str) else repr(raw)  # text may be that of a file of secrets
        raise ConfigError(f"{file}: holds {held}; allowed: a mapping with the keys {_keys(ClusterConfig)}")
    raw.setdefault("name", file.stem)
    try:
        resolve_paths(raw, file.resolve().parent)
        config = ClusterConfig.model_validate(raw)
        _check_secrets(config, datetime.datetime.now(datetime.UTC), with_clients)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(f"{file}: {_fault_text(fault['loc'], fault)}") from None  # its own text may hold a secret
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return config


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, except that a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"{_shown(key.value)} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What the library's constructors raise of a value such as `2024-99-99` is a fault of the file too."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(None, None, f"not a value of the type {kind}", node.start_mark) from None


def _shown(key: str) -> str:
    """A key for people; one as long as a token may be one, in the wrong place."""
    return f"the key {key!r}" if len(key) < MIN_TOKEN_CHARS else f"a key of {len(key)} characters"


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not YAML: {error}"


def _fault_text(loc: tuple[int | str, ...], fault: Any) -> str:
    if fault["type"] == _CROSS:
        return str(fault["msg"])
    parts = [str(part) for part in loc if part != "[key]"]
    key = ".".join(parts)
    section, name = _section_of(loc)
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        shown = ".".join([*parts[:-1], parts[-1] if len(parts[-1]) < MIN_TOKEN_CHARS else _shown(parts[-1])])
        return f"{shown}: no such key; allowed: {_keys(section)}"
    if fault["type"] == "missing":
        return f"{key} is missing; needed: {_allowed(section, name)}"
    value = f"of type {type(fault['input']).__name__}" if loc[0] == "security" else repr(fault["input"])
    return f"{key} is {value}; allowed: {_allowed(section, name)}"


def _section_of(loc: tuple[int | str, ...]) -> tuple[type[Section], str]:
    """The schema class that a fault's location lies in, and the field's name there."""
    section: type[Section] = ClusterConfig
    for depth, part in enumerate(loc):
        field = section.model_fields.get(str(part))
        inner = _without_null(field.annotation) if field is not None else None
        if depth + 1 == len(loc) or not (isinstance(inner, type) and issubclass(inner, Section)):
            return section, str(part)
        section = inner
    return section, ""


def _without_null(annotation: Any) -> Any:
    """X of `X | None`, else the annotation itself."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and typing.get_origin(annotation) is types.UnionType else annotation


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
        return " or ".join(str(arg).lower() if isinstance(arg, bool) else str(arg) for arg in args)
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
