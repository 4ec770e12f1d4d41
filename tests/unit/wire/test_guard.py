"""Who is let in, against real servers on this machine's loopback. The calls are those of the protobuf descriptors."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from loopline.errors import ConfigError
from loopline.security import Access, Credentials
from loopline.wire.channel import bind, make_server, open_blocking_channel, open_channel
from loopline.wire.guard import refusal, token_metadata
from tests.support.calls import CONTROL_CALLS, HEALTH, PUBLIC_CALLS, REFLECTION, Call

CLUSTER, OLDER, CLIENT, STRANGER = "c" * 32, "o" * 40, "k" * 32, "s" * 32
ACCESS = Access(cluster_tokens=(CLUSTER, OLDER), client_tokens={"kim": CLIENT})
LIMIT_S = 20.0


class Served:
    """A server on an event loop of its own that answers every call which is let in with what was sent."""

    def __init__(self, access: Access) -> None:
        self.heard: list[str] = []
        self._access = access
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(LIMIT_S)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = make_server(self._access)
        for call in (*CONTROL_CALLS, *PUBLIC_CALLS, HEALTH, REFLECTION):
            handlers = {call.path.rpartition("/")[2]: self._handler(call)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(call.service, handlers),))
        self.address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, self._access)}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(None)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)

    def _handler(self, call: Call) -> Any:
        async def answer(request: Any, context: Any) -> bytes:
            self.heard.append(call.path)
            return b"let in"

        async def stream(request: Any, context: Any) -> None:
            self.heard.append(call.path)
            await context.write(b"let in")

        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, answer),
            (False, True): (grpc.unary_stream_rpc_method_handler, stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, answer),
            (True, True): (grpc.stream_stream_rpc_method_handler, stream),
        }
        make, behaviour = kinds[call.request_streaming, call.response_streaming]
        return make(behaviour)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(ACCESS)
    yield served
    served.close()


@pytest.fixture(scope="module")
def channel(served: Served) -> Iterator[grpc.Channel]:
    with open_blocking_channel(served.address) as channel:
        yield channel


def code(error: grpc.RpcError | None) -> Any:
    return None if error is None else error.code()


def test_the_descriptors_hold_the_calls_that_must_be_guarded() -> None:
    methods = {call.path.removeprefix("/loopline.v1.") for call in CONTROL_CALLS}
    assert methods >= {"Cluster/Attach", "Cluster/ReportExit", "Cluster/AttachLauncher", "Operations/Scale"}
    assert methods >= {"Operations/DrainWorker", "Peering/ConnectPeer", "Peering/CommitHandoff", "Peering/CloseHandoff"}
    assert len(PUBLIC_CALLS) >= 3


@pytest.mark.parametrize("call", CONTROL_CALLS, ids=lambda call: call.path)
def test_a_control_call_needs_the_clusters_token(served: Served, channel: grpc.Channel, call: Call) -> None:
    before = len(served.heard)
    missing = call.status_on(channel)
    assert code(missing) is grpc.StatusCode.UNAUTHENTICATED
    assert "a token is missing" in str(missing.details())  # type: ignore[union-attr]
    unknown = call.status_on(channel, token=STRANGER)
    assert code(unknown) is grpc.StatusCode.UNAUTHENTICATED
    assert STRANGER not in str(unknown.details())  # type: ignore[union-attr]
    assert code(call.status_on(channel, token=CLIENT)) is grpc.StatusCode.PERMISSION_DENIED
    assert len(served.heard) == before
    assert code(call.status_on(channel, token=CLUSTER)) is None
    assert code(call.status_on(channel, token=OLDER)) is None
    assert len(served.heard) == before + 2


@pytest.mark.parametrize("call", [*PUBLIC_CALLS, REFLECTION], ids=lambda call: call.path)
def test_a_public_call_needs_a_clients_token_or_the_clusters(channel: grpc.Channel, call: Call) -> None:
    assert code(call.status_on(channel)) is grpc.StatusCode.UNAUTHENTICATED
    assert code(call.status_on(channel, token=STRANGER)) is grpc.StatusCode.UNAUTHENTICATED
    assert code(call.status_on(channel, token=CLIENT)) is None
    assert code(call.status_on(channel, token=CLUSTER)) is None


def test_health_is_everybodys(channel: grpc.Channel) -> None:
    assert code(HEALTH.status_on(channel)) is None


def test_without_client_tokens_public_calls_are_everybodys() -> None:
    access = Access(cluster_tokens=(CLUSTER,))
    assert refusal(access, "loopline.v1.Loopline", ()) is None
    assert refusal(access, "loopline.v1.Cluster", ()) is not None
    assert refusal(Access(), "loopline.v1.Cluster", ()) is None


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", CLUSTER),),
        (("authorization", f"Basic {CLUSTER}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {CLUSTER[:-1]}"),),
        (("authorization", f"Bearer {CLUSTER} "),),
        (("authorization", f"Bearer {CLUSTER}x"),),
        (("authorization-bin", f"Bearer {CLUSTER}".encode()),),
        (*token_metadata(CLUSTER), *token_metadata(STRANGER)),
    ],
)
def test_what_is_not_exactly_a_token_is_nobodys(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    refused = refusal(ACCESS, "loopline.v1.Cluster", metadata)
    assert refused is not None and refused[0] is grpc.StatusCode.UNAUTHENTICATED
    assert CLUSTER not in refused[1]


def test_a_service_that_nobody_thought_of_is_closed() -> None:
    assert refusal(ACCESS, "loopline.v1.Tomorrow", token_metadata(CLIENT)) is not None


def test_both_kinds_of_channel_show_the_token_with_every_kind_of_call(served: Served) -> None:
    async def main() -> None:
        async with open_channel(served.address, Credentials(token=CLUSTER)) as channel:
            stream = channel.stream_stream("/loopline.v1.Cluster/Attach")()
            assert await stream.read() == b"let in"  # a write could meet the call's end
            stream.cancel()
            assert await channel.unary_unary("/loopline.v1.Cluster/ReportExit")(b"") == b"let in"

    asyncio.run(main())
    with open_blocking_channel(served.address, Credentials(token=CLIENT)) as channel:
        assert list(channel.unary_stream("/loopline.v1.Loopline/Generate")(b"")) == [b"let in"]
        assert channel.unary_unary("/loopline.v1.Loopline/GetStatus")(b"") == b"let in"


def test_no_token_goes_over_a_network_in_plain_text() -> None:
    with pytest.raises(ConfigError, match=r"no token is sent to 192\.0\.2\.1:5 without TLS"):
        open_blocking_channel("192.0.2.1:5", Credentials(token=CLUSTER))

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0: tokens need security\.tls"):
            bind(make_server(ACCESS), "0.0.0.0", 0, ACCESS)

    asyncio.run(main())


def test_no_secret_is_in_a_repr() -> None:
    assert CLUSTER not in repr(ACCESS) and CLIENT not in repr(ACCESS)
    assert CLUSTER not in repr(Credentials(token=CLUSTER))
