"""Development sets of certificates and tokens for tests, and the section `security` that names their files."""

import datetime
from pathlib import Path

from loopline.certificates import (
    CA_FILE,
    CERT_FILE,
    CLIENT_TOKEN_FILE,
    CLIENT_TOKENS_FILE,
    CLUSTER_TOKEN_FILE,
    KEY_FILE,
    write_development_set,
)
from loopline.security import Tls, read_tls, read_tokens

HOSTS = ("127.0.0.1",)


class SecretSet:
    """One set in a folder of its own; a negative `age_days` makes certificates of the future."""

    def __init__(self, folder: Path, *, hosts: tuple[str, ...] = HOSTS, days: int = 2, age_days: int = 0) -> None:
        self.folder = folder
        begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days, minutes=1)
        write_development_set(folder, hosts=hosts, days=days, begins=begins)

    @property
    def tls(self) -> Tls:
        return read_tls(self.folder / CA_FILE, self.folder / CERT_FILE, self.folder / KEY_FILE)

    @property
    def cluster_token(self) -> str:
        return read_tokens(self.folder / CLUSTER_TOKEN_FILE)[0]

    @property
    def client_token(self) -> str:
        return read_tokens(self.folder / CLIENT_TOKEN_FILE)[0]

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def section(self) -> dict[str, object]:
        return {
            "tls": {
                "ca_file": self.path(CA_FILE),
                "cert_file": self.path(CERT_FILE),
                "key_file": self.path(KEY_FILE),
            },
            "cluster_token_file": self.path(CLUSTER_TOKEN_FILE),
            "client_tokens_file": self.path(CLIENT_TOKENS_FILE),
        }
