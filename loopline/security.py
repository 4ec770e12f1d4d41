"""What a process shows when it calls, and what it asks of those who call it: certificates, keys and tokens, as read
from the files that a cluster's YAML or a command line names.

Standard library only. `loopline.wire` makes channels and servers of these records; no secret is ever in a `repr`.
"""

import os
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from loopline.errors import ConfigError
from loopline.hosts import address_of

MIN_TOKEN_CHARS = 32
_TOKEN_CHARS = frozenset(string.ascii_letters + string.digits + "-._~+/=")  # RFC 6750, section 2.1
_OTHERS = 0o077


@dataclass(frozen=True)
class Tls:
    """PEM texts: the authority that the other side's certificate must be of, and this side's own pair if it has one."""

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Credentials:
    """What a caller shows. Without `tls` the channel is plain text; without `token` calls carry none."""

    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_files(
        cls,
        *,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> Self:
        """All are optional; a certificate needs its key and the authority. Raises ConfigError that names the file."""
        if (cert_file is None) is not (key_file is None):
            given = cert_file or key_file
            raise ConfigError(f"{given}: a certificate and its key are needed together")
        if cert_file is not None and ca_file is None:
            raise ConfigError(f"{cert_file}: a certificate is of use only with a CA file, by which TLS begins")
        tls = None if ca_file is None else read_tls(ca_file, cert_file, key_file)
        return cls(tls, None if token_file is None else read_tokens(token_file)[0])


@dataclass(frozen=True)
class Access:
    """What a server asks for. Without `tls` it speaks plain text; without tokens it lets every call in."""

    tls: Tls | None = None
    require_client_certificate: bool = False
    cluster_tokens: tuple[str, ...] = field(default=(), repr=False)
    """Of those who may control the cluster."""
    client_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By the client's name: of those who may ask for answers."""


NO_CREDENTIALS = Credentials()
OPEN_ACCESS = Access()


@dataclass(frozen=True)
class ClusterSecurity:
    """Both sides of one process of a cluster; by default nothing is asked and nothing shown."""

    credentials: Credentials = NO_CREDENTIALS
    access: Access = OPEN_ACCESS


NO_SECURITY = ClusterSecurity()


def read_tls(ca_file: str | Path, cert_file: str | Path | None = None, key_file: str | Path | None = None) -> Tls:
    """Raises ConfigError that names the file which cannot be read or is not PEM."""
    return Tls(
        _read_pem(ca_file, b"CERTIFICATE-----"),
        None if cert_file is None else _read_pem(cert_file, b"CERTIFICATE-----"),
        None if key_file is None else _read_pem(key_file, b"PRIVATE KEY-----"),
    )


def read_tokens(file: str | Path) -> tuple[str, ...]:
    """The tokens of a file, one a line; the first is the one to show. Raises ConfigError that names file and line."""
    tokens = tuple(_checked(file, number, line) for number, line in _lines(file))
    if not tokens:
        raise ConfigError(f"{file}: holds no token; allowed: one of at least {MIN_TOKEN_CHARS} characters a line")
    return tokens


def read_client_tokens(file: str | Path) -> dict[str, str]:
    """Tokens by client from lines `NAME: TOKEN`. Raises ConfigError that names file and line, never a token."""
    found: dict[str, str] = {}
    for number, line in _lines(file):
        name, colon, token = line.partition(":")
        name = name.strip()
        if not (colon and name):
            raise ConfigError(f"{file}: line {number} is not NAME: TOKEN")
        if name in found:
            raise ConfigError(f"{file}: line {number}: the name {name!r} is there twice")
        token = _checked(file, number, token.strip())
        if token in found.values():
            raise ConfigError(f"{file}: line {number}: {name!r} has another client's token")
        found[name] = token
    if not found:
        raise ConfigError(f"{file}: names no client; allowed: lines NAME: TOKEN")
    return found


def is_open_to_others(file: str | Path) -> bool:
    """Whether other users of this machine have any right to the file."""
    return bool(Path(file).stat().st_mode & _OTHERS)


def is_loopback_host(host: str) -> bool:
    """Whether it is reached from its own machine only. A name other than localhost is taken for another's."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def _lines(file: str | Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without comments and empty ones."""
    try:
        text = _read(file).decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not ASCII text") from None  # the error's own text would hold some of the file
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


def _checked(file: str | Path, number: int, token: str) -> str:
    if len(token) < MIN_TOKEN_CHARS:
        text = f"the token has {len(token)} characters; allowed: at least {MIN_TOKEN_CHARS}"
        raise ConfigError(f"{file}: line {number}: {text}")
    if not _TOKEN_CHARS.issuperset(token):
        raise ConfigError(f"{file}: line {number}: the token has other characters than letters, digits and -._~+/=")
    return token


def _read_pem(file: str | Path, mark: bytes) -> bytes:
    found = _read(file)
    if mark not in found:
        raise ConfigError(f"{file}: has no line with {mark.decode()}; allowed: a PEM file")
    return found


def _read(file: str | Path) -> bytes:
    try:
        return Path(file).read_bytes()
    except FileNotFoundError:
        raise ConfigError(_missing(file)) from None
    except OSError as error:
        if not os.path.exists(file):  # its name is too long, as a PEM text is
            raise ConfigError(_missing(file)) from None
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None


def _missing(file: str | Path) -> str:
    """That there is no such file; its name is not repeated where it is as long as a token, for it may be one."""
    folder = name = os.path.abspath(file)
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    if len(name.removeprefix(folder).lstrip("/")) < MIN_TOKEN_CHARS:
        return f"{file}: no such file"
    return f"no such file in {folder}; its name is not repeated here, for it is as long as a token"
