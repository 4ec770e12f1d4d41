"""Where a worker is reached: said, found from the route, or refused. No packet is sent."""

import socket

import pytest

from loopline.errors import ConfigError
from loopline.worker import reach
from loopline.worker.reach import Reach, Route, find_reach, route_to


def test_beside_its_coordinator_on_loopback_it_is_on_loopback_too() -> None:
    assert find_reach("127.0.0.1:50051", None, None) == Reach("127.0.0.1", "127.0.0.1")
    assert find_reach("localhost:50051", None, None).advertise in ("127.0.0.1", "::1")
    assert find_reach("127.0.0.1:50051", "127.0.0.2", None) == Reach("127.0.0.2", "127.0.0.2")


def test_what_is_said_holds_and_asks_nobody() -> None:
    assert find_reach("nowhere.invalid:50051", "10.0.0.7", None) == Reach("10.0.0.7", "10.0.0.7")
    assert find_reach("nowhere.invalid:50051", "0.0.0.0", "node-7") == Reach("0.0.0.0", "node-7")


def test_who_listens_everywhere_is_reached_on_the_way_to_the_coordinator() -> None:
    assert find_reach("127.0.0.1:50051", "0.0.0.0", None) == Reach("0.0.0.0", "127.0.0.1")
    assert find_reach("127.0.0.1:50051", None, "node-7") == Reach("127.0.0.1", "node-7")


def test_the_route_to_a_machine_is_its_own_address() -> None:
    try:
        mine = route_to("192.0.2.1:9").mine
    except ConfigError:
        pytest.skip("this machine has no route to other networks")
    assert not mine.startswith("127.")
    assert route_to(f"{mine}:9") == Route(mine, mine)
    with pytest.raises(ConfigError, match=f"--host is 127.0.0.1.*such as {mine}"):  # also on the coordinator's machine
        find_reach(f"{mine}:9", "127.0.0.1", None)


@pytest.mark.parametrize(
    ("host", "advertise", "named"),
    [
        ("127.0.0.1", None, "--host is 127.0.0.1"),
        (None, "localhost", "--advertise is localhost"),
        ("::1", None, "--host is ::1"),
        ("[::1]", None, "--host is ::1"),
        (None, "[::1]", "--advertise is ::1"),
        ("127.1", None, "--host is 127.0.0.1"),
        ("::ffff:127.0.0.1", None, "--host is 127.0.0.1"),
        ("10.0.0.2", "127.8.9.1", "--advertise is 127.8.9.1"),
    ],
)
def test_loopback_is_refused_where_the_coordinator_has_another_address(
    host: str | None, advertise: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "route_to", lambda address: Route("10.0.0.2", "10.0.0.1"))
    with pytest.raises(ConfigError, match=rf"{named}, .* at 10.0.0.1:50051;.*such as 10.0.0.2"):
        find_reach("10.0.0.1:50051", host, advertise)
    assert find_reach("10.0.0.1:50051", None, None) == Reach("10.0.0.2", "10.0.0.2")
    monkeypatch.setattr(reach, "route_to", lambda address: Route("127.0.0.1", "127.0.1.1"))
    assert find_reach("this-machine:50051", host, advertise)  # by its own name


def test_hosts_are_written_in_their_usual_form() -> None:
    assert find_reach("10.0.0.1:1", "[fd00::7]", None) == Reach("fd00::7", "fd00::7")
    assert find_reach("127.0.0.1:1", "[::]", "[fd00::7]") == Reach("::", "fd00::7")
    assert find_reach("127.0.0.1:1", "0", None) == Reach("0.0.0.0", "127.0.0.1")
    assert find_reach("[::1]:1", "[::1]", None) == Reach("::1", "::1")


@pytest.mark.parametrize(
    "host", ["node:9000", "10.0.0.7:9000", "[::1]:5", "[::1", "", "a host", "http://node", "1::2::3"]
)
@pytest.mark.parametrize("flag", ["--host", "--advertise"])
def test_what_is_no_host_is_refused(flag: str, host: str) -> None:
    arguments = (host, None) if flag == "--host" else (None, host)
    with pytest.raises(ConfigError) as caught:
        find_reach("127.0.0.1:1", *arguments)
    assert f"{flag} is {host or 'empty'}; allowed: a name or an address, without a port" in str(caught.value)


def test_a_way_by_the_second_address_of_a_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPv6 comes first in the list, and this machine, or the network, has none."""
    datagram = (socket.SOCK_DGRAM, socket.IPPROTO_UDP, "")
    unreachable = (socket.AF_INET, *datagram, ("255.255.255.255", 9))  # broadcast, which a plain socket may not
    both = [unreachable, (socket.AF_INET, *datagram, ("127.0.0.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: both)
    assert route_to("head:9") == Route("127.0.0.1", "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: [unreachable])
    with pytest.raises(ConfigError, match=r"--coordinator is head:9, .*[Pp]ermission denied"):
        route_to("head:9")


def test_what_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for everywhere in ("0.0.0.0", "[::]", "::", "0", "::ffff:0.0.0.0"):
        with pytest.raises(ConfigError, match=r"--advertise is .*; allowed: one address"):
            find_reach("127.0.0.1:1", None, everywhere)
    for address in ("host-without-port", "127.0.0.1:http"):
        with pytest.raises(ConfigError, match=f"--coordinator is {address}; allowed: HOST:PORT"):
            find_reach(address, None, None)

    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=r"--coordinator is head:1, .*Name or service not known"):
        find_reach("head:1", None, None)
