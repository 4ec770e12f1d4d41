"""The network device that UCX is told to use: chosen where tcp is all that it would be used for, and by nobody else."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loopline.settings import TransferSettings
from loopline.worker import net_device
from loopline.worker.net_device import device_of, may_choose, with_net_device


@pytest.mark.parametrize(
    ("ucx", "environment", "has_rdma", "expected"),
    [
        ({}, {}, False, True),
        ({}, {}, True, False),
        ({"UCX_TLS": "tcp"}, {}, True, True),
        ({"UCX_TLS": "tcp,cuda_copy,cuda_ipc,sm"}, {}, True, True),
        ({"UCX_TLS": "rc,tcp,cuda"}, {}, True, False),
        ({"UCX_TLS": "rc,tcp,cuda"}, {}, False, True),
        ({"UCX_TLS": "^cuda"}, {}, True, False),
        ({}, {"UCX_TLS": "tcp"}, True, True),
        ({"UCX_TLS": "rc"}, {"UCX_TLS": "tcp"}, True, False),
        ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth1"}, {}, False, False),
        ({"UCX_TLS": "tcp"}, {"UCX_NET_DEVICES": "eth1"}, False, False),
    ],
)
def test_it_is_chosen_where_only_tcp_would_use_it(
    ucx: dict[str, str], environment: dict[str, str], has_rdma: bool, expected: bool
) -> None:
    assert may_choose(ucx, environment, has_rdma) is expected


def test_a_device_is_found_by_its_address() -> None:
    assert device_of("127.0.0.1") == "lo"
    assert device_of("192.0.2.77") is None
    assert device_of("node-7") is None


def test_a_device_is_found_by_a_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {socket.inet_aton("127.0.1.1"): "lo", socket.inet_aton("10.0.0.7"): "eth0"}
    monkeypatch.setattr(net_device, "_devices", lambda: listed)
    names = {"node-7": ["127.0.1.1", "10.0.0.7"], "node-8": ["10.0.0.8"], "only-here": ["127.0.1.1"]}

    def resolve(host: str, *arguments: object, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert [device_of(name) for name in names] == ["eth0", None, None]


@pytest.mark.skipif(os.geteuid() != 0, reason="a second address needs root")
def test_a_device_is_found_by_its_second_address() -> None:
    """In a network namespace of its own."""
    script = (
        "ip link set lo up; ip addr add 10.9.0.1/24 dev lo; ip addr add 10.9.0.2/24 dev lo; "
        "ip addr add 10.9.1.3/32 dev lo label lo:x; "
        f"{sys.executable} -c 'from loopline.worker.net_device import device_of as f; "
        'print(f("10.9.0.1"), f("10.9.0.2"), f("10.9.1.3"), f("10.9.0.3"))\''
    )
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "not found" in done.stderr or "not permitted" in done.stderr:
        pytest.skip(f"no namespace to be had: {done.stderr.strip()[:200]}")
    assert done.stdout.split() == ["lo", "lo", "lo", "None"], done.stderr


def test_a_device_is_found_by_its_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    monkeypatch.setattr(net_device, "_IPV6_DEVICES", listed)
    assert device_of("2001:db8::7") == "eth0"
    assert device_of("2001:db8::8") is None


def test_the_first_address_that_a_device_has_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(net_device, "device_of", {"10.0.0.7": "eth0", "10.1.0.7": "eth1"}.get)
    settings = TransferSettings(ucx=(("UCX_TLS", "tcp"),))
    chosen = with_net_device(settings, ("node-7", "10.1.0.7", "10.0.0.7"))
    assert chosen.ucx == (("UCX_NET_DEVICES", "eth1"), ("UCX_TLS", "tcp"))
    assert with_net_device(settings, ("node-7", "0.0.0.0")) is settings
    assert with_net_device(settings, ("127.0.0.1", "127.0.0.1")) is settings


def test_a_real_address_of_this_machine_has_a_device() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no route to other networks")
        mine = str(probe.getsockname()[0])
    assert device_of(mine) in {name for _, name in socket.if_nameindex()}
