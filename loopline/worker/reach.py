"""Where a worker listens and at which address others reach it, where its command line does not say both.

The address is the one that this machine uses on its way to the coordinator: all in that network reach it there.
"""

import socket
from dataclasses import dataclass

from loopline.errors import ConfigError
from loopline.security import is_loopback_host

_EVERY = ("0.0.0.0", "::")


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

    @property
    def is_here(self) -> bool:
        """Whether the peer is on this machine."""
        return self.mine == self.theirs or is_loopback_host(self.theirs)


def find_reach(coordinator: str, host: str | None, advertise: str | None) -> Reach:
    """What was not given is found from the route to the coordinator at HOST:PORT. Raises ConfigError where there is
    none, and for a loopback address while the coordinator is on another machine: no peer could reach the worker."""
    if advertise in _EVERY:
        raise ConfigError(f"--advertise is {advertise}; allowed: one address at which other workers reach this one")
    listen = host or route_to(coordinator).mine
    told = advertise or (listen if listen not in _EVERY else route_to(coordinator).mine)
    if is_loopback_host(told):
        _require_here(coordinator, "--advertise" if advertise else "--host", told)
    return Reach(listen, told)


def route_to(address: str) -> Route:
    """Asks the kernel's routing table; nothing is sent. Raises ConfigError where HOST:PORT leads nowhere."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, target in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)  # of a datagram socket: only chooses the addresses
                return Route(str(probe.getsockname()[0]), str(probe.getpeername()[0]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--coordinator is {address}, to which there is no way from here: {error}") from None
    raise ConfigError(f"--coordinator is {address}, which names no address")


def _require_here(coordinator: str, flag: str, told: str) -> None:
    route = route_to(coordinator)
    if not route.is_here:
        raise ConfigError(
            f"{flag} is {told}, which only this machine reaches, and the coordinator is on another one "
            f"({coordinator}); allowed: an address that its workers reach, such as {route.mine}, which is found "
            f"where no address is given"
        )
