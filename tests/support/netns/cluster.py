"""A cluster over several hosts, as a user starts one by hand: the coordinator on one, a worker on each of the others,
at the address that it finds on the way to the coordinator. With TLS and tokens, for the addresses are no loopback."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loopline.certificates import CA_FILE, CLIENT_TOKEN_FILE
from loopline.client import Client
from loopline.security import Credentials
from tests.support.cluster import DEADLINE_S, LOOPLINE, READY_S, Cluster, wait_until, write_config
from tests.support.golden import SMALL
from tests.support.netns.impairment import Impairment
from tests.support.netns.network import Network, network, start
from tests.support.secrets import SecretSet

HEAD = "head"


class HostsCluster(Cluster):
    """Workers are named after their hosts."""

    def __init__(
        self, net: Network, process: subprocess.Popen[bytes], address: str, folder: Path, credentials: Credentials
    ) -> None:
        super().__init__(process, address, folder, credentials)
        self.net = net
        self.credentials = credentials

    def new_client(self) -> Client:
        return Client(self.address, credentials=self.credentials)

    def log_of(self, host: str) -> str:
        return (self.run_dir / f"{host}.log").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def over_hosts(
    folder: Path, roles: Sequence[str], impairments: dict[str, Impairment] | None = None, /, **groups: dict[str, object]
) -> Iterator[HostsCluster]:
    """A coordinator at `head`, and one worker on a host of its own for each of `roles`: prefill-0, decode-0, and so on.
    `impairments`: of the cables of some, from the start. `groups` are sections of the YAML, as of `write_config`.

    At the end all workers drain, and every process must end in order.
    """
    names = [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
    with network([HEAD, *names], list(impairments or ())) as net, contextlib.ExitStack() as running:
        secrets = SecretSet(folder / "secrets", hosts=tuple(net.address(host) for host in (HEAD, *names)))
        config = write_config(
            folder / "cluster.yaml",
            SMALL,
            **{
                "coordinator": {"host": net.address(HEAD), "port": 0},
                "transfer": {"verify": "digest", "poll_interval_s": 0.001, "ucx": {"UCX_TLS": "tcp"}},
                "security": secrets.section(),
                **groups,
            },
        )
        for host, impairment in (impairments or {}).items():
            net.impair(host, impairment)
        where = folder / "address"
        command = [sys.executable, "-m", "coordinator", "--config", str(config), "--listen-file", str(where)]
        coordinator = running.enter_context(_process(net, HEAD, command, folder))
        wait_until(lambda: where.is_file() or coordinator.poll() is not None, "the coordinator listens", READY_S)
        assert coordinator.poll() is None, (folder / f"{HEAD}.log").read_text()
        address = json.loads(where.read_text(encoding="utf-8"))["address"]
        credentials = Credentials.from_files(ca_file=secrets.path(CA_FILE), token_file=secrets.path(CLIENT_TOKEN_FILE))
        cluster = HostsCluster(net, coordinator, address, folder, credentials)
        for role, name in zip(roles, names, strict=True):
            command = [str(LOOPLINE), "worker", "--role", role, "--name", name, "--coordinator", address]
            running.enter_context(_process(net, name, [*command, "--config", str(config)], folder))
        wait_until(lambda: cluster.is_whole(names), f"{names} are ready", 2 * READY_S)
        wait_until(lambda: cluster.client.status().serving, "the cluster serves", READY_S)
        yield cluster
        cluster.client.close()


@contextlib.contextmanager
def _process(net: Network, host: str, command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = folder / f"{host}.log"
    process = start(net, host, command, log, {**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text(encoding="utf-8", errors="replace")
    finally:
        process.kill()
        process.wait()
