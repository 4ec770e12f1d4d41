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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loopline.security import is_loopback_host
from loopline.settings import TransferSettings

logger = logging.getLogger(__name__)
_NAME = "UCX_NET_DEVICES"
_SIOCGIFADDR = 0x8915
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


def device_of(address: str) -> str | None:
    """The network device with this address; None for a name, or an address that no device has as its first one."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.version == 6:
        return _ipv6_devices().get(wanted.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, device in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", device.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == wanted.packed:
                return device
    return None


def _ipv6_devices() -> dict[str, str]:
    """Devices by address, as 32 hexadecimal digits."""
    try:
        lines = _IPV6_DEVICES.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {fields[0]: fields[-1] for fields in map(str.split, lines) if fields}


def _has_rdma() -> bool:
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
