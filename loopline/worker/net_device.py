"""Which network device UCX moves KV over, where nobody has said so: the one at whose address others reach the worker.

UCX takes a device that is up for one that leads to its peers. Many machines have a bridge of a container engine, with
one and the same address on each of them: UCX would look for its peer there, on its own machine.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loopline.security import is_loopback_host
from loopline.settings import TransferSettings

logger = logging.getLogger(__name__)
_NAME = "UCX_NET_DEVICES"
_SIOCGIFCONF = 0x8912
_IFCONF = struct.Struct("iP")  # bytes, and where they are
_IFREQ = struct.Struct("16s4x4s16x")  # a label, and an IPv4 address inside a sockaddr
_MOST_ADDRESSES = 1024
_IPV6_DEVICES = Path("/proc/net/if_inet6")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_RDMA_TRANSPORTS = ("rc", "ud", "dc", "ib", "srd", "gga", "all")


def with_net_device(transfer: TransferSettings, addresses: Sequence[str]) -> TransferSettings:
    """`transfer` with UCX_NET_DEVICES, if UCX may be told: the device of the first of these addresses that one has.
    Unchanged for a worker on loopback, whose peers are all on its own machine."""
    ucx = dict(transfer.ucx)
    if not may_choose(ucx, os.environ, _has_rdma()) or any(map(is_loopback_host, addresses)):
        return transfer
    found = next(((address, device) for address in addresses if (device := device_of(address))), None)
    if found is None:
        return transfer
    logger.info("%s is %s, the device of %s", _NAME, found[1], found[0])
    return replace(transfer, ucx=tuple(sorted({**ucx, _NAME: found[1]}.items())))


def may_choose(ucx: Mapping[str, str], environment: Mapping[str, str], has_rdma: bool) -> bool:
    """Whether tcp is all that a network device would be used for, and nobody has named one. On a machine with RDMA
    devices (`has_rdma`) to name one of tcp would forbid those, unless the transports that are asked for have none."""
    settings = {**environment, **ucx}
    if _NAME in settings:
        return False
    asked = settings.get("UCX_TLS", "all").split(",")
    return not has_rdma or not any(name.startswith(("^", *_RDMA_TRANSPORTS)) for name in asked)


def device_of(host: str) -> str | None:
    """The network device with this address, or with one that this name stands for; None if there is none. Loopback is
    no device for a name: many machines give their own name such an address, and others reach them by another."""
    try:
        return _devices().get(ipaddress.ip_address(host).packed)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    addresses = [ipaddress.ip_address(str(target[0]).partition("%")[0]) for *_, target in found]
    devices = _devices()
    return next((devices[one.packed] for one in addresses if not one.is_loopback and one.packed in devices), None)


def _devices() -> dict[bytes, str]:
    """All addresses of this machine, secondary ones too, with their devices."""
    return _ipv4_devices() | _ipv6_devices()


def _ipv4_devices() -> dict[bytes, str]:
    listed = array("B", bytes(_MOST_ADDRESSES * _IFREQ.size))
    where, length = listed.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used, _ = _IFCONF.unpack(fcntl.ioctl(probe, _SIOCGIFCONF, _IFCONF.pack(length, where)))
    found: dict[bytes, str] = {}
    for label, address in _IFREQ.iter_unpack(listed.tobytes()[:used]):
        found.setdefault(address, label.rstrip(b"\0").decode().partition(":")[0])  # eth0:1 is an address of eth0
    return found


def _ipv6_devices() -> dict[bytes, str]:
    try:
        lines = _IPV6_DEVICES.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {bytes.fromhex(fields[0]): fields[-1] for fields in map(str.split, lines) if fields}


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
