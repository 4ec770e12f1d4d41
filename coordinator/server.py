"""The coordinator's process: builds the parts from a cluster YAML, listens, serves health, leaves in order."""

import asyncio
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.dispatcher import Dispatcher
from coordinator.fleet import Fleet
from coordinator.intake import Intake
from coordinator.operations import OperationsServicer
from coordinator.policies import make_policy
from coordinator.prefix_source import SourceRule
from coordinator.rebalance_watch import RebalanceWatch
from coordinator.scrape import serve_metrics
from coordinator.service import MOST_WRITE_S, ClusterServicer, LooplineServicer, ModelCard
from loopline.clock import Clock, MonotonicClock
from loopline.config import ClusterConfig, load_config
from loopline.hosts import reached_here
from loopline.model_spec import ModelSpec, load_model_spec
from loopline.process import on_terminate, settle_heap, watch_life_pipe, write_json_by_rename
from loopline.request import InitialState, Limits, SamplingParams
from loopline.security import OPEN_ACCESS, Access, is_loopback_host
from loopline.telemetry.logs import configure_logging
from loopline.telemetry.traces import Tracing, open_tracing
from loopline.text import TextCodec, load_text
from loopline.wire._generated.loopline.v1 import (
    cluster_pb2_grpc,
    loopline_pb2,
    loopline_pb2_grpc,
    operations_pb2_grpc,
)
from loopline.wire.channel import bind, join_address, make_server

_LOG = logging.getLogger(__name__)
SERVICE_NAME: str = loopline_pb2.DESCRIPTOR.services_by_name["Loopline"].full_name
_CLOSE_S = 1.0  # for the last statuses to reach their clients


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Command line of one coordinator process."""

    config_path: Path
    port: int | None = None
    """None: the configuration's."""
    listen_file: Path | None = None
    """Where to write the address and the epoch once it listens. What an earlier life wrote there is read first: this
    one's epoch is later, whatever the clock says."""
    drain_limit_s: float | None = None
    """None: the configuration's."""
    life_fd: int | None = None
    """Read end of a pipe that the parent holds open; its end means that the parent is gone."""


def build_dispatcher(
    config: ClusterConfig, spec: ModelSpec, clock: Clock, *, earlier_epoch: int = 0, tracing: Tracing | None = None
) -> Dispatcher:
    """A dispatcher for one model, with a later epoch than `earlier_epoch`; needs a running event loop."""
    max_loops = config.model.max_loops or spec.default_loops
    probe = SamplingParams(
        max_tokens=2,
        loops=min(spec.default_loops, max_loops),
        initial_state=InitialState(config.model.initial_state),
    )
    return Dispatcher(
        clock=clock,
        epoch=max(time.time_ns(), earlier_epoch + 1),
        lease_s=config.membership.lease_s,
        reply_timeout_s=config.membership.reply_timeout_s,
        peer_share=config.transfer.peer_share,
        sources=SourceRule(
            choice=config.routing.prefix_source, local_below_tokens=config.routing.local_prefill_below_tokens
        ),
        queue_limit=config.coordinator.queue_limit,
        unread_tokens=config.coordinator.unread_tokens,
        limits=Limits(
            vocab_size=spec.vocab_size,
            context_tokens=spec.context_tokens,
            max_loops=max_loops,
            arena_tokens=spec.context_tokens,
        ),
        rate_floor_bytes_per_s=config.transfer.rate_floor_bytes_per_s,
        policy=make_policy(config.routing.policy, config.routing.load_weight),
        probe_params=probe,
        probe_token_id=spec.bos_id or 0,
        tracing=tracing,
    )


def build_intake(config: ClusterConfig, spec: ModelSpec, codec: TextCodec | None) -> Intake:
    return Intake(
        spec=spec,
        codec=codec,
        max_loops=config.model.max_loops or spec.default_loops,
        initial_state=InitialState(config.model.initial_state),
        default_deadline_s=config.coordinator.default_deadline_s,
        exit_gate=config.model.exit_gate,
    )


def build_server(
    dispatcher: Dispatcher,
    fleet: Fleet,
    intake: Intake,
    card: ModelCard,
    max_message_bytes: int,
    drain_limit_s: float,
    *,
    access: Access = OPEN_ACCESS,
    most_write_s: float = MOST_WRITE_S,
) -> grpc.aio.Server:
    """A server with all services that lets in what `access` says; not bound, not started. `drain_limit_s`: of a drain
    that names no limit; `most_write_s`: how long a client may take for one event."""
    server = make_server(access, max_message_bytes)
    add_public: Any = loopline_pb2_grpc.add_LooplineServicer_to_server  # generated code is untyped
    add_cluster: Any = cluster_pb2_grpc.add_ClusterServicer_to_server
    add_operations: Any = operations_pb2_grpc.add_OperationsServicer_to_server
    add_public(LooplineServicer(dispatcher, fleet, intake, card, most_write_s), server)
    add_cluster(ClusterServicer(dispatcher, fleet), server)
    add_operations(OperationsServicer(dispatcher, fleet, drain_limit_s), server)
    return server


async def serve(options: ServerOptions) -> None:
    """Run a coordinator until SIGTERM, SIGINT or its parent's end. Raises OperatorError before it listens."""
    config = load_config(options.config_path)
    configure_logging("coordinator", config.telemetry.log_format, config.telemetry.log_level)
    spec = load_model_spec(config.model.path)
    earlier_epoch = 0 if options.listen_file is None else _read_epoch(options.listen_file)
    clock, fleet = MonotonicClock(), Fleet()
    tracing = open_tracing(config.telemetry.otlp_endpoint, config.name, "coordinator", "coordinator")
    dispatcher = build_dispatcher(config, spec, clock, earlier_epoch=earlier_epoch, tracing=tracing)
    card = ModelCard(Path(config.model.path).name, _dtype(config, spec))
    intake = build_intake(config, spec, load_text(config.model.path))
    drain_limit_s = config.membership.drain_limit_s
    access = config.read_security().access
    server = build_server(
        dispatcher, fleet, intake, card, config.limits.max_message_bytes, drain_limit_s, access=access
    )
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = config.coordinator.port if options.port is None else options.port
    host = config.coordinator.host
    address = join_address(reached_here(host), bind(server, host, port, access=access))
    if _is_anybodys(access, host):
        _LOG.warning("whoever reaches %s controls this cluster: security.cluster_token_file is not set", address)
    if config.telemetry.metrics_port is not None:
        serve_metrics(dispatcher, host, config.telemetry.metrics_port)
    rebalance = RebalanceWatch(dispatcher, fleet, clock, config.launcher.rebalance_patience_s)
    if config.launcher.rebalance == "auto":
        rebalance.start()
    stop = _watch_for_stop(options.life_fd)
    await server.start()
    settle_heap()
    if options.listen_file is not None:
        listening = {"address": address, "pid": os.getpid(), "epoch": dispatcher.epoch}
        write_json_by_rename(options.listen_file, listening)
    _LOG.info("coordinator of %s listens on %s, epoch %d", config.name, address, dispatcher.epoch)
    async with asyncio.TaskGroup() as tasks:
        helpers = [
            tasks.create_task(dispatcher.run()),
            tasks.create_task(_publish_health(dispatcher, health_servicer)),
        ]
        limit_s = drain_limit_s if options.drain_limit_s is None else options.drain_limit_s
        in_order = await stop
        rebalance.stop()
        await dispatcher.drain(limit_s if in_order else 0.0)
        dispatcher.close_workers()
        await server.stop(_CLOSE_S)
        for helper in helpers:
            helper.cancel()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


def _is_anybodys(access: Access, host: str) -> bool:
    """Whether somebody on another machine may control the cluster without a token or a certificate."""
    return not (access.cluster_tokens or access.require_client_certificate or is_loopback_host(host))


def _read_epoch(listen_file: Path) -> int:
    """The epoch of an earlier life that wrote there; 0 where there is none."""
    try:
        return int(json.loads(listen_file.read_text(encoding="utf-8"))["epoch"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is not of an earlier coordinator: %r", listen_file, error)
        return 0


def _dtype(config: ClusterConfig, spec: ModelSpec) -> str:
    return spec.checkpoint_dtype if config.model.dtype == "auto" else config.model.dtype


async def _publish_health(dispatcher: Dispatcher, servicer: Any) -> None:
    status = health_pb2.HealthCheckResponse
    while True:
        dispatcher.readiness.changed.clear()
        for service in ("", SERVICE_NAME):
            await servicer.set(service, status.SERVING if dispatcher.readiness.serving else status.NOT_SERVING)
        await dispatcher.readiness.changed.wait()


def _watch_for_stop(life_fd: int | None) -> asyncio.Future[bool]:
    """Done when this process should leave; True: there is time to drain."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[bool] = loop.create_future()

    def request_stop(in_order: bool) -> None:
        if not stop.done():
            stop.set_result(in_order)

    on_terminate(loop, lambda: request_stop(True))
    if life_fd is not None:
        watch_life_pipe(loop, life_fd, lambda: request_stop(False))
    return stop
