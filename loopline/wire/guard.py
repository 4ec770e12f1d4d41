"""Who may call what: an interceptor that looks at a call's token before anything of the call is parsed.

A service that is named here neither as public nor as open is a control service: a new one is closed until somebody
decides otherwise.
"""

import enum
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from loopline.security import Access

AUTHORIZATION = "authorization"
_SCHEME = "bearer"
OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
"""Whoever reaches the port may ask."""
PUBLIC_SERVICES = frozenset({"loopline.v1.Loopline", "grpc.reflection.v1alpha.ServerReflection"})
"""For clients, and for whoever controls the cluster."""
_MISSING = (
    "a token is missing: this call needs one in its metadata, as authorization: Bearer TOKEN (a command: --token-file, "
    "or --config with its section security)"
)
_UNKNOWN = "the call's token is not known here"
_CLIENTS = "the call's token is a client's: this call controls the cluster and needs the token of those who may"
Refusal = tuple[grpc.StatusCode, str]
Handler = Any  # grpc.RpcMethodHandler, whose attributes the stubs lack


class Holder(enum.Enum):
    """Whose token a call carries."""

    NOBODY = enum.auto()
    UNKNOWN = enum.auto()
    CLIENT = enum.auto()
    CLUSTER = enum.auto()


def interceptors(access: Access) -> list["grpc.aio.ServerInterceptor[Any, Any]"]:
    """For a server with this access; none where it asks for no token."""
    return [_Guard(access)] if access.cluster_tokens or access.client_tokens else []


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a call carries that shows `token`."""
    return ((AUTHORIZATION, f"Bearer {token}"),)


def refusal(access: Access, service: str, metadata: Sequence[tuple[str, str | bytes]]) -> Refusal | None:
    """Why a call of the service (its full name) is not let in; None if it is. What is said names what is missing and
    nothing of what was expected."""
    needs = _needs(access, service)
    if needs is None:
        return None
    holder = _holder(access, metadata)
    if holder is Holder.CLUSTER or holder is needs:
        return None
    if holder is Holder.CLIENT:
        return grpc.StatusCode.PERMISSION_DENIED, _CLIENTS
    return grpc.StatusCode.UNAUTHENTICATED, _MISSING if holder is Holder.NOBODY else _UNKNOWN


def _needs(access: Access, service: str) -> Holder | None:
    if service in OPEN_SERVICES:
        return None
    if service in PUBLIC_SERVICES:
        return Holder.CLIENT if access.client_tokens else None
    return Holder.CLUSTER if access.cluster_tokens or access.client_tokens else None


def _holder(access: Access, metadata: Sequence[tuple[str, str | bytes]]) -> Holder:
    shown = [value for key, value in metadata if key == AUTHORIZATION]
    if not shown:
        return Holder.NOBODY
    value = shown[0].decode("latin-1") if isinstance(shown[0], bytes) else shown[0]
    scheme, _, token = value.partition(" ")
    if len(shown) > 1 or scheme.lower() != _SCHEME:
        return Holder.NOBODY
    is_cluster = _is_among(token, access.cluster_tokens)
    is_client = _is_among(token, tuple(access.client_tokens.values()))
    if is_cluster:
        return Holder.CLUSTER
    return Holder.CLIENT if is_client else Holder.UNKNOWN


def _is_among(token: str, known: Sequence[str]) -> bool:
    """Compares with all of them, and digests rather than texts: the time taken says neither which one nor how much of
    it was met, nor how long it is."""
    mine = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
    met = [hmac.compare_digest(mine, hashlib.sha256(other.encode()).digest()) for other in known]
    return any(met)


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # at run time it takes none
    """Answers in place of the service where a call is not let in."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        details: Any = handler_call_details
        handler = await continuation(handler_call_details)
        refused = refusal(self._access, str(details.method).strip("/").rpartition("/")[0], details.invocation_metadata)
        return handler if refused is None or handler is None else _refusing(handler, *refused)


def _refusing(handler: Handler, code: grpc.StatusCode, text: str) -> Handler:
    """A handler of the same kind that says no; it parses nothing of what was sent."""

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(code, text)

    makers: Mapping[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[handler.request_streaming, handler.response_streaming](refuse)
