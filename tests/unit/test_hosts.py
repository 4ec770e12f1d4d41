"""Hosts as they are written: the same answer for every way to write the same one."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopline.errors import ConfigError
from loopline.hosts import address_of, clean_host, is_every_host, reached_here
from loopline.security import is_loopback_host
from loopline.wire.channel import join_address

ADDRESSES = st.ip_addresses() | st.ip_addresses(network="127.0.0.0/8") | st.sampled_from([ipaddress.ip_address("::1")])


def _spellings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[str]:
    if isinstance(address, ipaddress.IPv6Address):
        return [str(address), address.exploded, f"[{address}]", f"[{address.exploded}]"]
    a, b, c, d = address.packed
    short = [f"{a}.{b}.{c * 256 + d}", f"{a}.{(b * 256 + c) * 256 + d}", str(int(address)), hex(int(address))]
    return [str(address), f"::ffff:{address}", f"[::ffff:{address}]", *short]


@given(ADDRESSES)
def test_an_address_is_one_however_it_is_written(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    usual = address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address
    for text in _spellings(address):
        assert address_of(text) == usual, text
        assert clean_host(text, "host") == str(usual)
        assert is_loopback_host(text) == usual.is_loopback
        assert is_every_host(text) == usual.is_unspecified
        assert join_address(clean_host(text, "host"), 5) == (f"[{usual}]:5" if usual.version == 6 else f"{usual}:5")


@given(st.text(max_size=20))
def test_whatever_is_said_becomes_a_host_or_an_error_that_names_it(text: str) -> None:
    try:
        cleaned = clean_host(text, "--host")
    except ConfigError as error:
        assert f"--host is {text or 'empty'}; allowed" in str(error)
    else:
        assert clean_host(cleaned, "--host") == cleaned
        assert address_of(cleaned) is not None or (cleaned == text and ":" not in text)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("0", "127.0.0.1"),
        ("::", "::1"),
        ("[::]", "::1"),
        ("10.0.0.1", "10.0.0.1"),
        ("node-7", "node-7"),
    ],
)
def test_who_listens_everywhere_is_reached_on_loopback(host: str, here: str) -> None:
    assert reached_here(host) == here


def test_names_are_left_alone() -> None:
    for name in ("localhost", "node-7", "3com.example", "a_b.c", "0xy"):
        assert clean_host(name, "host") == name and address_of(name) is None and not is_every_host(name)
    assert is_loopback_host("localhost") and not is_loopback_host("node-7")
