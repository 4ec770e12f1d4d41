"""TLS and message sizes, against real servers on this machine's loopback."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from loopline.security import NO_CREDENTIALS, Access, Credentials
from loopline.wire.channel import bind, make_server, open_channel
from tests.support.secrets import SecretSet

LIMIT_S = 20.0
ECHO = "/loopline.v1.Test/Echo"
SMALL = 65_536


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> SecretSet:
    return SecretSet(tmp_path_factory.mktemp("ours") / "set")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> SecretSet:
    return SecretSet(tmp_path_factory.mktemp("foreign") / "set")


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> SecretSet:
    return SecretSet(tmp_path_factory.mktemp("expired") / "set", days=2, age_days=9)


def outcome(
    access: Access,
    credentials: Credentials,
    *,
    request: bytes = b"x",
    answer: Callable[[bytes], bytes] = bytes,
    server_bytes: int = SMALL,
    caller_bytes: int = SMALL,
) -> Any:
    """What one call brings: the answer, or the status code that it ends with."""

    async def echo(sent: bytes, context: Any) -> bytes:
        return answer(sent)

    async def main() -> Any:
        server = make_server(access, server_bytes)
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("loopline.v1.Test", handlers),))
        address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, access)}"
        await server.start()
        try:
            async with open_channel(address, credentials, caller_bytes) as channel:
                return await channel.unary_unary(ECHO)(request, timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await server.stop(None)

    return asyncio.run(main())


def test_both_sides_of_one_authority_agree(ours: SecretSet) -> None:
    assert outcome(Access(ours.tls, True), Credentials(ours.tls)) == b"x"
    assert outcome(Access(ours.tls), Credentials(replace(ours.tls, certificate=None, key=None))) == b"x"


def test_plain_text_and_tls_do_not_mix(ours: SecretSet) -> None:
    assert outcome(Access(ours.tls), NO_CREDENTIALS) is grpc.StatusCode.UNAVAILABLE
    assert outcome(Access(), Credentials(ours.tls)) is grpc.StatusCode.UNAVAILABLE


def test_a_server_of_another_authority_is_not_believed(ours: SecretSet, foreign: SecretSet) -> None:
    assert outcome(Access(foreign.tls), Credentials(ours.tls)) is grpc.StatusCode.UNAVAILABLE


def test_a_server_with_another_name_is_not_believed(ours: SecretSet, tmp_path: Path) -> None:
    elsewhere = SecretSet(tmp_path / "set", hosts=("elsewhere.example",)).tls
    assert outcome(Access(elsewhere), Credentials(replace(ours.tls, ca=elsewhere.ca))) is grpc.StatusCode.UNAVAILABLE


def test_an_expired_server_is_not_believed(ours: SecretSet, expired: SecretSet) -> None:
    believer = replace(ours.tls, ca=expired.tls.ca)
    assert outcome(Access(expired.tls), Credentials(believer)) is grpc.StatusCode.UNAVAILABLE


def test_a_port_that_asks_for_certificates_takes_only_its_authoritys(
    ours: SecretSet, foreign: SecretSet, expired: SecretSet
) -> None:
    asking = Access(ours.tls, require_client_certificate=True)
    nobody = replace(ours.tls, certificate=None, key=None)
    assert outcome(asking, Credentials(nobody)) is grpc.StatusCode.UNAVAILABLE
    assert outcome(asking, Credentials(replace(foreign.tls, ca=ours.tls.ca))) is grpc.StatusCode.UNAVAILABLE
    trusts_expired = Access(replace(ours.tls, ca=ours.tls.ca + expired.tls.ca), require_client_certificate=True)
    late = replace(expired.tls, ca=ours.tls.ca)
    assert outcome(trusts_expired, Credentials(late)) is grpc.StatusCode.UNAVAILABLE
    assert outcome(trusts_expired, Credentials(ours.tls)) == b"x"


def test_a_message_past_the_limit_is_refused_both_ways() -> None:
    def doubled(sent: bytes) -> bytes:
        return sent * 2

    half = bytes(SMALL // 2 + 1)
    assert outcome(Access(), NO_CREDENTIALS, request=half) == half
    large = bytes(SMALL + 1)
    to_server = outcome(Access(), NO_CREDENTIALS, request=large, caller_bytes=4 * SMALL)
    assert to_server is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcome(Access(), NO_CREDENTIALS, request=large) is grpc.StatusCode.RESOURCE_EXHAUSTED  # by the sender
    to_caller = outcome(Access(), NO_CREDENTIALS, request=half, answer=doubled, server_bytes=4 * SMALL)
    assert to_caller is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert outcome(Access(), NO_CREDENTIALS, request=half, answer=doubled) is grpc.StatusCode.RESOURCE_EXHAUSTED
