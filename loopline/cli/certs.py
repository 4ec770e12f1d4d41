"""`loopline certs`: a development set of certificates, keys and tokens."""

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from loopline.certificates import (
    CA_FILE,
    CA_KEY_FILE,
    CERT_FILE,
    CLIENT_TOKEN_FILE,
    CLIENT_TOKENS_FILE,
    CLUSTER_TOKEN_FILE,
    KEY_FILE,
    write_development_set,
)

_ALWAYS = ("localhost", "127.0.0.1", "::1")
_MOST_DAYS = 3650


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files go.", show_default=False)],
    *,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME_OR_IP", help="Where a process is reached; may be repeated.", show_default=False),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=_MOST_DAYS, help="How long the certificates hold.")] = 30,
) -> None:
    """Make a development set: an authority, a certificate for every process, the cluster's token and a client's."""
    hosts = list(dict.fromkeys((*_ALWAYS, socket.gethostname(), *(host or ()))))
    write_development_set(folder, hosts=hosts, days=days)
    sys.stdout.write(_advice(folder.resolve(), hosts, days))


def _advice(folder: Path, hosts: list[str], days: int) -> str:
    return f"""\
# for {", ".join(hosts)}; for {days} days. {CA_KEY_FILE} signs further certificates: no process needs it.
security:
  tls:
    ca_file: {folder / CA_FILE}
    cert_file: {folder / CERT_FILE}
    key_file: {folder / KEY_FILE}
  cluster_token_file: {folder / CLUSTER_TOKEN_FILE}
  client_tokens_file: {folder / CLIENT_TOKENS_FILE}
# clients: --ca-file {folder / CA_FILE} --token-file {folder / CLIENT_TOKEN_FILE}
"""
