"""gRPC servers and channels as every process of a cluster makes them: options, binding, addresses, TLS and tokens.

Used by the coordinator, the workers and the client. No message of ours is known here.
"""

import errno
import functools
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio

from loopline.errors import AddressInUse, ConfigError, InvalidRequest
from loopline.security import NO_CREDENTIALS, OPEN_ACCESS, Access, Credentials, Tls, is_loopback_host
from loopline.wire.guard import interceptors, token_metadata
from loopline.wire.reading import Reader

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


def make_server(access: Access = OPEN_ACCESS, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    """A grpc.aio server that lets in what `access` says; `bind` gives it its port. A request that cannot be parsed is
    its caller's fault."""
    reader = Reader(((ERROR_KEY, InvalidRequest.__name__),))
    inside = [*interceptors(access), reader]  # whoever is not let in has nothing parsed
    return grpc.aio.server(options=server_options(max_message_bytes), interceptors=inside)


def open_channel(
    address: str,
    credentials: Credentials = NO_CREDENTIALS,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    *,
    extra_options: Sequence[Option] = (),
) -> grpc.aio.Channel:
    """A grpc.aio channel to HOST:PORT, with `extra_options` besides the usual ones. It connects when first used and
    reconnects by itself.

    Raises ConfigError where a token would go over a network without TLS.
    """
    options = [*channel_options(max_message_bytes), *extra_options]
    _require_privacy(address, credentials)
    if credentials.tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, _channel_credentials(credentials.tls), options=options)
    return cast(grpc.aio.Channel, _with_token(channel, credentials.token))


def open_blocking_channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> grpc.Channel:
    """A blocking channel to HOST:PORT, for callers without an event loop. Raises as `open_channel`."""
    options = channel_options(max_message_bytes)
    _require_privacy(address, credentials)
    if credentials.tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, _channel_credentials(credentials.tls), options=options)
    return cast(grpc.Channel, _with_token(channel, credentials.token))


def join_address(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server | grpc.Server, host: str, port: int, access: Access = OPEN_ACCESS) -> int:
    """Make `server` listen on HOST:PORT (0: any free port), with TLS where `access` has it, and return the port.

    Raises AddressInUse that names HOST:PORT, ConfigError where the host is not this machine's, or where tokens would
    come to it over a network without TLS.
    """
    address = join_address(host, port)
    if access.tls is None and access.cluster_tokens and not is_loopback_host(host):
        raise ConfigError(f"cannot listen on {address}: tokens need security.tls where the host is not loopback")
    _require_free(host, port)
    try:
        if access.tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _server_credentials(access.tls, access.require_client_certificate))
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


def _require_privacy(address: str, credentials: Credentials) -> None:
    host = address.rpartition(":")[0].strip("[]")
    if credentials.token is not None and credentials.tls is None and not is_loopback_host(host):
        raise ConfigError(f"no token is sent to {address} without TLS, where others could read it: give a CA file")


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def _server_credentials(tls: Tls, require_client_certificate: bool) -> grpc.ServerCredentials:
    if tls.key is None or tls.certificate is None:
        raise ConfigError("a server with TLS needs a certificate and its key")
    pair = [(tls.key, tls.certificate)]
    if not require_client_certificate:
        return grpc.ssl_server_credentials(pair)
    return grpc.ssl_server_credentials(pair, root_certificates=tls.ca, require_client_auth=True)


def _with_token(channel: Any, token: str | None) -> Any:
    return channel if token is None else _TokenChannel(channel, token)


class _TokenChannel:
    """A channel of either kind whose calls carry a token in their metadata.

    Not gRPC's call credentials, which want TLS on loopback too, and not its interceptors, which put a queue between
    a stream and its reader. Callers give no metadata of their own.
    """

    def __init__(self, channel: Any, token: str) -> None:
        self._channel = channel
        self._metadata = token_metadata(token)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.unary_unary(*arguments, **options), metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.unary_stream(*arguments, **options), metadata=self._metadata)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.stream_unary(*arguments, **options), metadata=self._metadata)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.stream_stream(*arguments, **options), metadata=self._metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def __enter__(self) -> Self:
        self._channel.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.__exit__(kind, error, trace)

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.__aexit__(kind, error, trace)
