"""gRPC servers and channels as every process of a cluster makes them: options, binding, addresses.

Used by the coordinator, the workers and the client. No message of ours is known here.
"""

import errno
import socket

import grpc
import grpc.aio

from loopline.errors import AddressInUse, ConfigError

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
ERROR_KEY = "loopline-error"  # of trailing metadata: the name of a class in loopline/errors.py
RETRY_KEY = "grpc-retry-pushback-ms"  # of trailing metadata, gRPC's own name: when who was refused should come again
_KEEPALIVE_TIME_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_RECONNECT_FIRST_MS = 100
_RECONNECT_MOST_MS = 1_000
Option = tuple[str, int]


def server_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[Option]:
    """Options of a server: a taken port is an error, pings of idle clients are welcome, message sizes are bounded."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[Option]:
    """Options of a channel, grpc.aio's or the blocking one: quick reconnection, keepalive, no HTTP proxy between."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_MOST_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MOST_MS),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A grpc.aio channel to HOST:PORT. It connects when first used and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))


def open_blocking_channel(address: str, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> grpc.Channel:
    """A blocking channel to HOST:PORT, for callers without an event loop."""
    return grpc.insecure_channel(address, options=channel_options(max_message_bytes))


def join_address(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server | grpc.Server, host: str, port: int) -> int:
    """Make `server` listen on HOST:PORT (0: any free port) and return the port.

    Raises AddressInUse that names HOST:PORT, ConfigError where the host is not this machine's.
    """
    address = join_address(host, port)
    _require_free(host, port)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: {error}") from error
    if not bound:
        raise AddressInUse(f"cannot listen on {address}")
    return int(bound)


def _require_free(host: str, port: int) -> None:
    """Ask the kernel first: gRPC itself reports a taken port only as text on standard error."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        address = join_address(host, port)
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"cannot listen on {address}: another process has that port") from error
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error
