"""A cluster with TLS and tokens serves those who have them, and every control call on every port refuses the others.

One launch for all tests; none of them may do it any harm.
"""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml

from loopline.certificates import CA_FILE, CLIENT_TOKEN_FILE, CLUSTER_TOKEN_FILE
from loopline.client import Client
from loopline.client.operator import Operator
from loopline.errors import AccessRefused
from loopline.identity import WorkerState
from loopline.security import Credentials
from loopline.wire.channel import open_blocking_channel
from tests.support.calls import CONTROL_CALLS, HEALTH, PUBLIC_CALLS, REFLECTION, Call
from tests.support.cluster import LOOPLINE, ROOT, Cluster, launched
from tests.support.secrets import SecretSet

PROMPT = (100, 101, 102)
STRANGER = "s" * 43
MESSAGE_BYTES = 2**20

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Guarded:
    """The running cluster, its secrets, and somebody else's."""

    cluster: Cluster
    secrets: SecretSet
    foreign: SecretSet
    expired: SecretSet
    config: Path

    @property
    def worker_addresses(self) -> list[str]:
        return [worker.address for worker in self.cluster.workers().values()]

    @property
    def addresses(self) -> list[str]:
        return [self.cluster.address, *self.worker_addresses]

    def loopline(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(LOOPLINE), command, "--address", self.cluster.address, *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    secrets = SecretSet(folder / "ours")
    sections = yaml.safe_load((ROOT / "configs/local-cpu.yaml").read_text(encoding="utf-8"))
    sections["model"]["path"] = str(ROOT / "configs" / sections["model"]["path"])
    sections["security"] = secrets.section()
    sections["limits"] = {"max_message_bytes": MESSAGE_BYTES}
    config = folder / "cluster.yaml"
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    ours = Credentials(replace(secrets.tls, certificate=None, key=None), secrets.client_token)
    with launched(config, folder, ours) as cluster:
        foreign, expired = SecretSet(folder / "foreign"), SecretSet(folder / "expired", days=2, age_days=9)
        yield Guarded(cluster, secrets, foreign, expired, config)


def code(error: grpc.RpcError | None) -> Any:
    return None if error is None else error.code()


def statuses(guarded: Guarded, credentials: Credentials, calls: list[Call], **options: Any) -> dict[str, Any]:
    """What the calls end with on every port of the cluster."""
    found = {}
    for address in guarded.addresses:
        with open_blocking_channel(address, credentials) as channel:
            found.update({f"{address}{call.path}": code(call.status_on(channel, **options)) for call in calls})
    return found


def test_a_client_with_a_token_is_served(guarded: Guarded) -> None:
    completion = guarded.cluster.client.complete(PROMPT, max_tokens=8, deadline_s=60.0)
    assert len(completion.token_ids) == 8
    generate = ["--ca-file", guarded.secrets.path(CA_FILE), "--token-file", guarded.secrets.path(CLIENT_TOKEN_FILE)]
    said = guarded.loopline("generate", *generate, "--prompt-ids", "100,101,102", "--max-tokens", "8", "--json")
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("token", [None, STRANGER], ids=["none", "unknown"])
def test_every_control_call_on_every_port_needs_a_token(guarded: Guarded, token: str | None) -> None:
    found = statuses(guarded, Credentials(guarded.secrets.tls), CONTROL_CALLS, token=token)
    assert len(guarded.worker_addresses) == 2
    by_port = {name: status for name, status in found.items() if _is_served(guarded, name)}
    assert len(by_port) >= 5 + 2 * 3
    assert set(by_port.values()) == {grpc.StatusCode.UNAUTHENTICATED}, by_port
    elsewhere = {status for name, status in found.items() if name not in by_port}
    assert elsewhere <= {grpc.StatusCode.UNIMPLEMENTED}  # a service that the port does not have


def _is_served(guarded: Guarded, name: str) -> bool:
    """Whether the call's port has its service: the coordinator has all but Peering, workers have that alone."""
    return name.startswith(guarded.cluster.address) is not ("/loopline.v1.Peering/" in name)


def test_a_clients_token_controls_nothing(guarded: Guarded) -> None:
    found = statuses(guarded, Credentials(guarded.secrets.tls), CONTROL_CALLS, token=guarded.secrets.client_token)
    served = {name: status for name, status in found.items() if _is_served(guarded, name)}
    own = {status for name, status in served.items() if name.startswith(guarded.cluster.address)}
    workers = {status for name, status in served.items() if not name.startswith(guarded.cluster.address)}
    assert own == {grpc.StatusCode.PERMISSION_DENIED}, served
    assert workers == {grpc.StatusCode.UNAUTHENTICATED}, served  # they know no clients
    tls = replace(guarded.secrets.tls, certificate=None, key=None)
    with Operator(guarded.cluster.address, credentials=Credentials(tls, guarded.secrets.client_token)) as operator:
        assert operator.status().serving
        with pytest.raises(AccessRefused, match="is a client's"):
            operator.scale(decode=0)


def test_public_calls_need_a_token_and_health_none(guarded: Guarded) -> None:
    tls = replace(guarded.secrets.tls, certificate=None, key=None)
    with open_blocking_channel(guarded.cluster.address, Credentials(tls)) as channel:
        for call in (*PUBLIC_CALLS, REFLECTION):
            assert code(call.status_on(channel)) is grpc.StatusCode.UNAUTHENTICATED, call.path
        assert code(REFLECTION.status_on(channel, token=guarded.secrets.client_token)) is None
        assert code(HEALTH.status_on(channel)) is None
    with (
        Client(guarded.cluster.address, credentials=Credentials(tls)) as client,
        pytest.raises(AccessRefused, match="a token is missing"),
    ):
        client.complete(PROMPT, max_tokens=2)


def test_no_port_speaks_plain_text(guarded: Guarded) -> None:
    found = statuses(guarded, Credentials(token=guarded.secrets.cluster_token), CONTROL_CALLS[:1])
    assert set(found.values()) == {grpc.StatusCode.UNAVAILABLE}, found


def test_workers_ports_take_certificates_of_the_authority_alone(guarded: Guarded) -> None:
    ours = guarded.secrets.tls
    for tls in (
        replace(ours, certificate=None, key=None),
        replace(guarded.foreign.tls, ca=ours.ca),
        replace(guarded.expired.tls, ca=ours.ca),
    ):
        credentials = Credentials(tls, guarded.secrets.cluster_token)
        for address in guarded.worker_addresses:
            with open_blocking_channel(address, credentials) as channel:
                for call in CONTROL_CALLS:
                    if "Peering" in call.path:
                        assert code(call.status_on(channel)) is grpc.StatusCode.UNAVAILABLE, (address, call.path)


def test_a_caller_of_another_authority_believes_no_port(guarded: Guarded) -> None:
    found = statuses(guarded, Credentials(guarded.foreign.tls), CONTROL_CALLS[:1])
    assert set(found.values()) == {grpc.StatusCode.UNAVAILABLE}, found


def test_every_port_refuses_a_message_past_the_limit(guarded: Guarded) -> None:
    credentials = Credentials(guarded.secrets.tls, guarded.secrets.cluster_token)
    large = bytes(MESSAGE_BYTES + 1)
    for address in guarded.addresses:
        call = next(
            call
            for call in CONTROL_CALLS
            if _is_served(guarded, f"{address}{call.path}") and not call.request_streaming
        )
        with open_blocking_channel(address, credentials) as channel:
            refused = call.status_on(channel, request=large)
            assert code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED, (address, refused)
            assert str(MESSAGE_BYTES) in str(refused.details())  # type: ignore[union-attr]


def test_an_operator_has_the_clusters_token(guarded: Guarded) -> None:
    files = ["--ca-file", guarded.secrets.path(CA_FILE), "--token-file"]
    refused = guarded.loopline("scale", "--decode", "1", *files, guarded.secrets.path(CLIENT_TOKEN_FILE))
    assert refused.returncode == 1 and "is a client's" in refused.stderr
    scaled = guarded.loopline("scale", "--decode", "1", *files, guarded.secrets.path(CLUSTER_TOKEN_FILE))
    assert scaled.returncode == 0 and "decode: 1 -> 1" in scaled.stdout, scaled.stderr
    status = guarded.loopline("status", "--audit", "--config", str(guarded.config))
    assert status.returncode == 0, status.stderr
    plain = guarded.loopline("status")
    assert plain.returncode == 1 and "no coordinator answers" in plain.stderr


def test_a_worker_with_another_token_ends_and_says_which_key(guarded: Guarded, tmp_path: Path) -> None:
    sections = yaml.safe_load(guarded.config.read_text(encoding="utf-8"))
    sections["security"] = {"tls": guarded.secrets.section()["tls"], "cluster_token_file": str(tmp_path / "token")}
    (tmp_path / "token").write_text(STRANGER, encoding="utf-8")
    (tmp_path / "worker.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
    line = [str(LOOPLINE), "worker", "--role", "decode", "--name", "stranger", "--coordinator", guarded.cluster.address]
    line += ["--config", str(tmp_path / "worker.yaml")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "security.cluster_token_file" in ended.stderr and STRANGER not in ended.stderr
    assert "stranger" not in guarded.cluster.workers()


def test_no_secret_is_on_a_command_line_or_in_a_log(guarded: Guarded) -> None:
    secrets = (guarded.secrets.cluster_token, guarded.secrets.client_token)
    processes = [psutil.Process(guarded.cluster.process.pid), *guarded.cluster.descendants()]
    said = [" ".join(process.cmdline()) for process in processes]
    said += [path.read_text(errors="replace") for path in guarded.cluster.run_dir.iterdir() if path.is_file()]
    assert len(said) >= 4 + 4
    assert not [text for text in said if any(secret in text for secret in secrets)]


def test_the_cluster_serves_on(guarded: Guarded) -> None:
    """The last test: whatever was tried above, the same processes answer, and nothing is held."""
    assert len(guarded.cluster.client.complete(PROMPT, max_tokens=8, deadline_s=60.0).token_ids) == 8
    guarded.cluster.wait_idle()
    assert {worker.state for worker in guarded.cluster.workers().values()} == {WorkerState.READY}
    assert all(worker.epoch == 1 for worker in guarded.cluster.workers().values())
