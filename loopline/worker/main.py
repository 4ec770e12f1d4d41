"""The entry point of a worker process, the same for all kinds."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loopline.config import load_config
from loopline.errors import OperatorError
from loopline.sched.policy import RolePolicy
from loopline.settings import WorkerSettings
from loopline.telemetry.logs import configure_logging
from loopline.worker.net_device import with_net_device
from loopline.worker.reach import find_reach
from loopline.worker.runtime import EXIT_OPERATOR, BuildRole, run_worker

_LAST_PORT = 65535


@dataclass(frozen=True)
class WorkerArguments:
    """What a worker is started with."""

    settings: WorkerSettings
    life_fd: int | None


def worker_main(role: str, policy: RolePolicy, build_role: BuildRole, arguments: Sequence[str] | None) -> int:
    """Exit status: 0 after a drain or a stop, 1 after a failure of ours, 2 for what the operator must mend,
    3 for one that has drained and asks to be started again."""
    try:
        parsed = parse_worker_arguments(role, arguments)
    except OperatorError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_OPERATOR
    return run_worker(parsed.settings, policy, build_role, parsed.life_fd)


def _port(text: str) -> int:
    """A port, 0 for any free one. Raises argparse's own error, which names the flag."""
    if not (text.isdecimal() and int(text) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text} is not a port; allowed: 0 (any free one) to {_LAST_PORT}")
    return int(text)


def parse_worker_arguments(role: str, arguments: Sequence[str] | None) -> WorkerArguments:
    """Read the command line and the cluster YAML. Raises ConfigError kinds; argparse exits on a wrong flag."""
    parser = argparse.ArgumentParser(prog=f"loopline worker --role {role}", description=f"A {role} worker process.")
    parser.add_argument("--config", required=True, help="cluster YAML")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT of the coordinator")
    parser.add_argument(
        "--name", default=None, help="name for people, unique in the cluster; ROLE-HOST-PID if not given"
    )
    parser.add_argument("--host", help="address to listen on; that of this machine on the way to the coordinator")
    parser.add_argument("--advertise", help="address at which others reach it, where that is not --host")
    parser.add_argument("--port", type=_port, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--metrics-port", type=_port, help="port to answer scrapes at; by default the YAML decides")
    parser.add_argument("--uuid", default="", help=argparse.SUPPRESS)
    parser.add_argument("--life-fd", type=int, default=None, help="pipe whose end means that the parent is gone")
    parser.add_argument(
        "--without-faults", action="store_true", help="commit no fault of one moment that the YAML names; others hold"
    )
    parsed = parser.parse_args(arguments)
    name = parsed.name or f"{role}-{socket.gethostname()}-{os.getpid()}"
    config = load_config(parsed.config, with_clients=False)
    configure_logging(name, config.telemetry.log_format, config.telemetry.log_level)
    reach = find_reach(parsed.coordinator, parsed.host, parsed.advertise)
    settings = config.worker_settings(role, name, parsed.coordinator, port=parsed.port, host=reach.host)
    security = config.read_security(with_clients=False)
    settings = replace(settings, advertise=reach.advertise, uuid=parsed.uuid, security=security)
    settings = replace(settings, transfer=with_net_device(settings.transfer, (reach.advertise, reach.host)))
    if parsed.metrics_port is not None:
        settings = replace(settings, metrics_port=parsed.metrics_port)
    if parsed.without_faults:
        settings = replace(settings, faults=tuple(fault for fault in settings.faults if fault.is_lasting))
    return WorkerArguments(settings, parsed.life_fd)
