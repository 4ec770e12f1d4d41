"""The command line of a worker process, the same for both kinds."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from loopline.config import load_config
from loopline.process import configure_logging
from loopline.settings import WorkerSettings


@dataclass(frozen=True)
class WorkerArguments:
    """What a worker is started with."""

    settings: WorkerSettings
    life_fd: int | None


def parse_worker_arguments(role: str, arguments: Sequence[str] | None) -> WorkerArguments:
    """Read the command line and the cluster YAML. Raises ConfigError kinds; argparse exits on a wrong flag."""
    parser = argparse.ArgumentParser(prog=f"python -m {role}_worker", description=f"A {role} worker process.")
    parser.add_argument("--config", required=True, help="cluster YAML")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT of the coordinator")
    parser.add_argument("--name", default=f"{role}-0", help="name for people; unique in the cluster")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on and to be reached at")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--life-fd", type=int, default=None, help="pipe whose end means that the parent is gone")
    parsed = parser.parse_args(arguments)
    configure_logging(parsed.name)
    config = load_config(parsed.config)
    settings = config.worker_settings(role, parsed.name, parsed.coordinator, port=parsed.port, host=parsed.host)
    return WorkerArguments(settings, parsed.life_fd)
