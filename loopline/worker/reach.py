"""Where a worker listens and at which address others reach it, where its command line does not say both.

The address is the one that this machine uses on its way to the coordinator: all in that network reach it there.
"""

import socket
from dataclasses import dataclass

from loopline.errors import ConfigError
from loopline.hosts import clean_host, is_every_host
from loopline.security import is_loopback_host


@dataclass(frozen=True)
class Reach:
    """`host` is listened on, `advertise` is what others are told."""

    host: str
    advertise: str


@dataclass(frozen=True)
class Route:
    """The way to a peer: this machine's address on it, and the peer's."""

    mine: str
    theirs: str


def find_reach(coordinator: str, host: str | None, advertise: str | None) -> Reach:
    """What was not given is found from the route to the coordinator at HOST:PORT. Raises ConfigError where there is
    none, for what is no host, and for a loopback address while the coordinator's is not: workers of other machines may
    join there, and none of them could reach this one."""
    listen = None if host is None else clean_host(host, "--host")
    told = None if advertise is None else clean_host(advertise, "--advertise")
    if told is not None and is_every_host(told):
        raise ConfigError(f"--advertise is {advertise}; allowed: one address at which other workers reach this one")
    if listen is None:
        listen = route_to(coordinator).mine
    if told is None:
        told = route_to(coordinator).mine if is_every_host(listen) else listen
    if is_loopback_host(told):
        _require_loopback(coordinator, "--host" if advertise is None else "--advertise", told)
    return Reach(listen, told)


def route_to(address: str) -> Route:
    """Asks the kernel's routing table; nothing is sent. Of several addresses of a name the first that there is a way to
    is taken. Raises ConfigError where HOST:PORT leads nowhere."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"--coordinator is {address}; allowed: HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise _nowhere(address, error) from None
    fault = OSError("it names no address")
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # of a datagram socket: only chooses the addresses
                return Route(str(probe.getsockname()[0]), str(probe.getpeername()[0]))
        except OSError as error:  # as for IPv6 on a machine that has none: the next may be of the other kind
            fault = error
    raise _nowhere(address, fault)


def _nowhere(address: str, error: Exception) -> ConfigError:
    return ConfigError(f"--coordinator is {address}, to which there is no way from here: {error}")


def _require_loopback(coordinator: str, flag: str, told: str) -> None:
    if is_loopback_host(coordinator.rpartition(":")[0]):
        return
    route = route_to(coordinator)
    if is_loopback_host(route.theirs):  # by a name of its own
        return
    raise ConfigError(
        f"{flag} is {told}, which only this machine reaches, while others may come to the coordinator at "
        f"{coordinator}; allowed: an address that they reach, such as {route.mine}, which is found if none is given, "
        "or loopback for --coordinator too, where all workers are on its machine"
    )
