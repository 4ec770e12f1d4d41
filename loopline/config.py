"""A cluster's YAML file: schema, validation at load, and the slices that objects take from it.

`load_config` is the only reader of such a file. Whatever is wrong in it becomes one ConfigError that names the
file, the key, the value and what is allowed. No torch: the coordinator and the command line load this.
"""

import datetime
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from loopline.certificates import check_pair
from loopline.config_sections import (
    CapacityConfig,
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
    UnifiedConfig,
    WorkerGroup,
)
from loopline.errors import ConfigError
from loopline.faults import FaultList, check_workers, faults_of
from loopline.hosts import clean_host, is_every_host
from loopline.identity import Role
from loopline.schema_words import cross_fault, fault_text, key_text, keys_of, shown
from loopline.security import (
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
_NOTHING_TO_POLL_S = 1.0
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
    unified: UnifiedConfig = UnifiedConfig()
    """Workers that take whole requests."""
    transfer: TransferConfig = TransferConfig()
    """How KV moves between them."""
    membership: MembershipConfig = MembershipConfig()
    """Who belongs to the cluster."""
    launcher: LauncherConfig = LauncherConfig()
    """Who starts the workers."""
    routing: RoutingConfig = RoutingConfig()
    """Which workers run a request."""
    capacity: CapacityConfig = CapacityConfig()
    """What `loopline check` plans for."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds on messages."""
    security: SecurityConfig = SecurityConfig()
    """Who may call whom, and what others on the network can read."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Logs and metrics."""
    faults: FaultList = Field(default_factory=list)
    """What workers do wrong on purpose, for tests."""

    @model_validator(mode="before")
    @classmethod
    def _only_unified(cls, raw: Any) -> Any:
        """Who names unified workers and no others has no others."""
        if isinstance(raw, dict) and raw.get("unified") and not raw.keys() & {"prefill", "decode"}:
            return {**raw, "prefill": {"replicas": 0}, "decode": {"replicas": 0}}
        return raw

    @model_validator(mode="after")
    def _cross_checks(self) -> "ClusterConfig":
        for key, value, allowed in _cross_faults(self):
            raise cross_fault(key, value, allowed)
        check_workers(self.faults, {role: self.group(role).replicas for role in Role})
        return self

    def engine_settings(self, role: str) -> EngineSettings:
        """The engine's slice for one role ("prefill", "decode" or "unified")."""
        group = self.group(role)
        share = group if isinstance(group, DecodeConfig) else None
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
                growth_share=1.0 if share is None else share.growth_share,
                prefill_tokens_per_loop=None if share is None else share.prefill_share_tokens,
                max_time_per_token_s=None if share is None else share.max_time_per_token_s,
            ),
        )

    def worker_settings(
        self, role: str, name: str, coordinator: str, port: int = 0, *, host: str = "127.0.0.1"
    ) -> WorkerSettings:
        """Everything that one worker process needs. `coordinator` is HOST:PORT; `host` is where the worker listens
        and is reached."""
        transfer = self.transfer
        return WorkerSettings(
            name=name,
            role=role,
            coordinator=coordinator,
            host=host,
            advertise=host,
            port=port,
            metrics_port=None if self.telemetry.metrics_port is None else 0,
            otlp_endpoint=self.telemetry.otlp_endpoint,
            cluster=self.name,
            engine=self.engine_settings(role),
            transfer=TransferSettings(
                backend="none" if role == Role.UNIFIED else transfer.backend,
                error_mode=transfer.error_mode,
                ucx=tuple(sorted(transfer.ucx.items())),
                poll_interval_s=_NOTHING_TO_POLL_S if role == Role.UNIFIED else transfer.poll_interval_s,
                push_timeout_s=transfer.push_timeout_s,
                in_flight_limit_bytes=transfer.in_flight_limit_bytes,
                peer_share=transfer.peer_share,
                max_push_bytes=transfer.max_push_bytes,
                verify=transfer.verify,
            ),
            drain_limit_s=self.membership.drain_limit_s,
            engine_timeout_s=_engine_timeout_s(self.membership, self.group(role).device),
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

    def require_reachable_workers(self) -> None:
        """To be asked before workers are launched on this machine. Raises ConfigError where they would be on loopback,
        and the coordinator at an address for other machines: workers of those could join, but never reach these."""
        coordinator, launcher = self.coordinator.host, self.launcher.host
        is_here = is_loopback_host(coordinator) or is_every_host(coordinator)
        if self.launcher.kind == "local" and is_loopback_host(launcher) and not is_here:
            raise ConfigError(
                f"launcher.host is {launcher}; allowed: an address that other machines reach, as they do "
                f"coordinator.host, {coordinator}; or a coordinator.host of 127.0.0.1 or 0.0.0.0"
            )

    def group(self, role: str) -> WorkerGroup:
        """The section of one role's workers. Raises ConfigError where there is no such role."""
        if role not in set(Role):
            raise ConfigError(f"role is {role!r}; allowed: {', '.join(Role)}")
        group: WorkerGroup = getattr(self, role)
        return group


def _engine_timeout_s(membership: MembershipConfig, device: str) -> float:
    if membership.engine_timeout_s is not None:
        return membership.engine_timeout_s
    return max(3.0, membership.lease_s) if device.startswith("cuda") else 60.0


def _steps_ahead(group: WorkerGroup) -> int:
    usual = 1 if group.device.startswith("cuda") else 0
    return usual if group.steps_ahead is None else group.steps_ahead


def _cross_faults(config: ClusterConfig) -> Iterator[tuple[str, object, str]]:
    """(key, value, what is allowed) of keys that do not fit each other."""
    yield from _replica_faults(config)
    for role in Role:
        for key, value, allowed in _group_faults(config.group(role), config.kv.block_size):
            yield f"{role}.{key}", value, allowed
    for key, text, allowed in _security_faults(config):
        yield f"security.{key}", text, allowed
    yield from _host_faults(config)


def _host_faults(config: ClusterConfig) -> Iterator[tuple[str, str, str]]:
    for key, host in (("coordinator.host", config.coordinator.host), ("launcher.host", config.launcher.host)):
        try:
            clean_host(host, key)
        except ConfigError:
            yield key, host, "a name or an address, without a port"


def _replica_faults(config: ClusterConfig) -> Iterator[tuple[str, int, str]]:
    """Prefill and decode workers are nothing without each other."""
    for role, other in ((Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)):
        group, there = config.group(role), config.group(other)
        if there.replicas and not group.replicas:
            is_default = config.unified.replicas and "replicas" not in there.model_fields_set
            hint = f"; {other.value}.replicas is {there.replicas} by default: set it to 0 too" if is_default else ""
            yield f"{role.value}.replicas", 0, f"at least 1 where there are {other.value} workers{hint}"
    prefill, decode = config.prefill.replicas, config.decode.replicas
    if not (prefill or decode or config.unified.replicas):
        yield "unified.replicas", 0, "at least 1 where there are no prefill and decode workers"


def _group_faults(group: WorkerGroup, block_size: int) -> Iterator[tuple[str, int, str]]:
    if group.chunk_tokens % block_size:
        usual = "" if "chunk_tokens" in group.model_fields_set else "; that is the default: set another"
        yield "chunk_tokens", group.chunk_tokens, f"a multiple of kv.block_size ({block_size}){usual}"
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
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    if not isinstance(raw, dict):
        held = "text" if isinstance(raw, str) else shown(raw)  # text may be that of a file of secrets
        raise ConfigError(f"{file}: holds {held}; allowed: a mapping with the keys {keys_of(ClusterConfig)}")
    raw.setdefault("name", file.stem)
    try:
        resolve_paths(raw, file.resolve().parent)
        config = ClusterConfig.model_validate(raw)
        _check_secrets(config, datetime.datetime.now(datetime.UTC), with_clients)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        text = fault_text(ClusterConfig, fault, secret=("security",))
        raise ConfigError(f"{file}: {text}") from None  # its own text may hold a secret
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
                    raise yaml.MarkedYAMLError(None, None, f"{_twice(key.value)} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What the library's constructors raise of a value such as `2024-99-99` is a fault of the file too."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(None, None, f"not a value of the type {kind}", node.start_mark) from None


def _twice(key: str) -> str:
    text = key_text(key)
    return f"the key {key!r}" if text == key else text


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f"not YAML: {error}"
