import asyncio
import socket

import grpc.aio
import pytest

from loopline.errors import AddressInUse, ConfigError
from loopline.wire.channel import bind, join_address, server_options


def test_a_taken_port_is_named() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{port}"):
                bind(grpc.aio.server(options=server_options()), "127.0.0.1", port)

    asyncio.run(main())


def test_a_host_that_is_not_this_machines_is_named() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"cannot listen on 203.0.113.7:5000"):
            bind(grpc.aio.server(options=server_options()), "203.0.113.7", 5000)

    asyncio.run(main())


def test_any_free_port_is_found() -> None:
    async def main() -> None:
        assert bind(grpc.aio.server(options=server_options()), "127.0.0.1", 0) > 0

    asyncio.run(main())


def test_an_ipv6_host_gets_brackets() -> None:
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("node-1", 5) == "node-1:5"
