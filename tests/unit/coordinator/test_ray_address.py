"""Looking for a Ray cluster's head without Ray."""

import asyncio
import re
import socket

import pytest

from coordinator.ray_address import look_for_head


def look(address: str) -> None:
    asyncio.run(look_for_head(address))


def test_whoever_listens_will_do_and_what_is_no_host_and_port_is_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        look(f"127.0.0.1:{server.getsockname()[1]}")
    look("ray://127.0.0.1:1")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "nowhere..invalid:6379"])
def test_where_nobody_can_be_connected_to_is_said(address: str) -> None:
    with pytest.raises(ConnectionError, match=re.escape(f"{address} ") + r"cannot be connected to: \w+"):
        look(address)
