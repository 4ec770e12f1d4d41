"""Hosts as people and command lines write them: names, addresses, short forms of them, with IPv6's brackets or without.

Pure: nothing is resolved. Standard library only.
"""

import ipaddress
import re
import socket

from loopline.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NUMBERS = re.compile(r"[0-9][0-9a-fA-FxX.]*")  # what resolvers take for IPv4: 127.1, 0, 0x7f.1
_NO_NAME = re.compile(r"[\s:/\[\]]")


def address_of(host: str) -> Address | None:
    """The address that is written there, an IPv4 one inside of IPv6 as itself; None for a name."""
    bare = _bare(host)
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return _short_form(bare)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def clean_host(host: str, what: str) -> str:
    """A name as it is, an address in its usual form, without brackets. Raises ConfigError that
    says `what` is neither, as with a port behind it."""
    address = address_of(host)
    if address is not None:
        return str(address)
    if not host or _NO_NAME.search(host):
        raise ConfigError(f"{what} is {host or 'empty'}; allowed: a name or an address, without a port")
    return host


def is_every_host(host: str) -> bool:
    """Whether who listens there listens on all addresses of the machine, or of one kind."""
    address = address_of(host)
    return address is not None and address.is_unspecified


def reached_here(host: str) -> str:
    """At which host this machine itself reaches who listens there: loopback for one that listens everywhere."""
    address = address_of(host)
    if address is None or not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _short_form(host: str) -> ipaddress.IPv4Address | None:
    if not _NUMBERS.fullmatch(host):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None
