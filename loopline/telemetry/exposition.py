"""The HTTP side of metrics: /metrics in Prometheus' formats, and /targets for its HTTP service discovery."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

METRICS_PATH = "/metrics"
TARGETS_PATH = "/targets"
Target = tuple[str, Mapping[str, str]]
"""HOST:PORT of a process's metrics, and labels for whatever is scraped there."""
_Environment = dict[str, Any]
_Start = Callable[..., Any]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the base's look-up of the host's whole name, which may take long and which nobody needs."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    timeout = 10.0  # of a connection that says or takes nothing, which would hold its thread

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class MetricsServer:
    """Answers scrapes in threads of its own until it is closed."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        targets: Callable[[], Iterable[Target]] | None = None,
    ) -> None:
        """Listen on HOST:PORT, 0: any free port. Raises OSError where it cannot. `targets`: of the other processes,
        called at each discovery, which begins with this process at the address that it was asked at. None: there is no
        discovery."""
        self._targets = targets
        self._metrics = make_wsgi_app(registry)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = _Server6 if family == socket.AF_INET6 else _Server
        self._server = make_server(host, port, self._answer, kind, _Silent)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environment: _Environment, start: _Start) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path in ("/", METRICS_PATH):
            return list(self._metrics(environment, start))
        if path == TARGETS_PATH and self._targets is not None:
            here = environment.get("HTTP_HOST", f"{environment['SERVER_NAME']}:{self.port}")
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(discovery(here, self._targets())).encode()]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [f"{METRICS_PATH} is here{' and ' + TARGETS_PATH if self._targets else ''}\n".encode()]


def discovery(coordinator: str, targets: Iterable[Target]) -> list[dict[str, object]]:
    """The answer to a discovery, in Prometheus' http_sd format."""
    first: Target = (coordinator, {"process": "coordinator", "kind": "coordinator"})
    return [{"targets": [address], "labels": dict(labels)} for address, labels in (first, *targets)]
