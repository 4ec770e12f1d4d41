"""Hosts as network namespaces, each with one cable to a switch that is a namespace too. This process itself is on the
network, at an address of its own.

Needs root, `ip` of iproute2, veth, bridges and /dev/net/tun: `missing` says what is not there.
"""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.cluster import ROOT, wait_until
from tests.support.netns.impairment import Impairment
from tests.support.netns.relay import Relay

DEVICE = "net0"
"""A host's own end of its cable."""
INNER_DEVICE = "inner0"
"""What every host has besides, and what no peer is reached by."""
_BRIDGE = "bridge0"


def missing() -> str:
    """What this machine lacks of all that is needed; empty where nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip`: install iproute2"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    name = f"ll{uuid.uuid4().hex[:6]}"
    for what in (("netns", "add", name), ("-n", name, "link", "add", "near", "type", "veth", "peer", "name", "far")):
        if (fault := _try(*what)) is not None:
            _try("netns", "del", name)
            return f"`ip {' '.join(what)}` says: {fault}"
    fault = _try("-n", name, "link", "add", _BRIDGE, "type", "bridge")
    _try("netns", "del", name)
    return f"no bridges here: {fault}" if fault is not None else ""


class Network:
    """Hosts by name. Invariant: all that is made here has this network's own prefix, and `close` removes just that."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"ll{uuid.uuid4().hex[:6]}"  # an interface's name has 15 characters at most
        self._subnet = _free_subnet()
        self._names = tuple(hosts)
        self._relays: dict[str, Relay] = {}
        self._switch = f"{self._prefix}-switch"
        self._namespaces: list[str] = []

    @property
    def own_address(self) -> str:
        """Of this process."""
        return f"{self._subnet}.254"

    def address(self, host: str) -> str:
        return f"{self._subnet}.{self._names.index(host) + 1}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The same command, on that host."""
        return ["ip", "netns", "exec", self._namespace(host), *command]

    def build(self, impaired: Sequence[str] = ()) -> None:
        """Make it all. The cables of the `impaired` hosts go through a relay."""
        self._add_namespace(self._switch)
        _ip("-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", self._switch, "link", "set", _BRIDGE, "up")
        for index, host in enumerate(self._names):
            namespace = self._namespace(host)
            self._add_namespace(namespace)
            near, far = f"{self._prefix}-{index}", f"{self._prefix}-{index}s"
            if host in impaired:
                self._relays[host] = Relay(near, far, seed=7 * index)
                _ip("link", "set", near, "netns", namespace)
            else:
                _ip("link", "add", near, "netns", namespace, "type", "veth", "peer", "name", far)
            _ip("-n", namespace, "link", "set", near, "name", DEVICE)
            _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", DEVICE, "up")
            _add_inner_network(namespace)
            self._plug_in(far)
        own, far = f"{self._prefix}-own", f"{self._prefix}-owns"
        _ip("link", "add", own, "type", "veth", "peer", "name", far)
        _ip("address", "add", f"{self.own_address}/24", "dev", own)
        _ip("link", "set", own, "up")
        self._plug_in(far)
        for host in self._names:
            wait_until(lambda: self._answers(host), f"{host} is reached")  # noqa: B023

    def close(self) -> None:
        """Remove it. Processes on hosts have ended by then."""
        for relay in self._relays.values():
            relay.close()
        for namespace in self._namespaces:
            _try("netns", "del", namespace)
        _try("link", "del", f"{self._prefix}-own")  # if its other end is not gone yet

    def cut(self, host: str) -> None:
        """Pull the cable at the switch: nothing comes to this host or from it, and others see nothing but silence."""
        _ip("-n", self._switch, "link", "set", self._far(host), "down")

    def restore(self, host: str) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", self._far(host), "up")

    def impair(self, host: str, impairment: Impairment) -> int:
        """Of an impaired host's cable, both ways; the frames that it has lost so far."""
        return self._relays[host].set(impairment)

    def received_bytes(self, host: str) -> int:
        """All that has ever come to this host by its cable."""
        command = self.command(host, ["cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes"])
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _far(self, host: str) -> str:
        return f"{self._prefix}-{self._names.index(host)}s"

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._namespaces.append(name)

    def _plug_in(self, device: str) -> None:
        _ip("link", "set", device, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", device, "master", _BRIDGE, "up")

    def _answers(self, host: str) -> bool:
        probe = self.command(host, ["ip", "-4", "-o", "address", "show", "dev", DEVICE, "up"])
        return self.address(host) in subprocess.run(probe, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def network(hosts: Sequence[str], impaired: Sequence[str] = ()) -> Iterator[Network]:
    """Hosts with these names. It is all gone at the end, whatever went wrong."""
    made = Network(hosts)
    try:
        made.build(impaired)
        yield made
    finally:
        made.close()


def start(
    net: Network, host: str, command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A process on a host; what it says goes to the end of `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            net.command(host, command), stdout=out, stderr=subprocess.STDOUT, env=dict(environment), cwd=ROOT
        )


def _free_subnet() -> str:
    """The first three bytes of a /24 in the range that is set aside for tests of networks (RFC 2544), without a route
    of this machine."""
    taken = subprocess.run(["ip", "-4", "route", "show", "table", "all"], capture_output=True, text=True).stdout
    start_at = os.getpid() % 256
    candidates = (f"198.18.{(start_at + n) % 256}" for n in range(256))
    return next(subnet for subnet in candidates if f"{subnet}." not in taken)


def _add_inner_network(namespace: str) -> None:
    """A device that leads nowhere and has the same address on every host, as container engines make one."""
    _ip("-n", namespace, "link", "add", INNER_DEVICE, "type", "veth", "peer", "name", f"{INNER_DEVICE}s")
    _ip("-n", namespace, "address", "add", "172.17.0.1/16", "dev", INNER_DEVICE)
    for device in (INNER_DEVICE, f"{INNER_DEVICE}s"):
        _ip("-n", namespace, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    fault = _try(*arguments)
    assert fault is None, f"ip {' '.join(arguments)}: {fault}"


def _try(*arguments: str) -> str | None:
    """What went wrong with `ip`, None where nothing did."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")
