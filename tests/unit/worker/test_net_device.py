"""The network device that UCX is told to use: chosen where tcp is all that it would be used for, and by nobody else."""

import socket
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
