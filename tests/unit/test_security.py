"""The files of the section `security`: what is wrong with one is said with its name and never with its secret."""

import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from coordinator.server import _is_anybodys
from loopline.certificates import CA_FILE, CA_KEY_FILE, CERT_FILE, CLIENT_TOKEN_FILE, CLIENT_TOKENS_FILE, KEY_FILE
from loopline.cli.main import app
from loopline.cli.options import TOKEN_FILE_VARIABLE, shown_credentials, with_credentials
from loopline.config import load_config
from loopline.errors import ConfigError
from loopline.security import NO_SECURITY, Access, Credentials, read_client_tokens, read_tokens
from loopline.worker.main import parse_worker_arguments
from tests.support.golden import MODELS
from tests.support.secrets import SecretSet

TOKEN, OTHER = "t" * 32, "u" * 43
RUNNER = CliRunner()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def config_of(folder: Path, security: dict[str, Any], **sections: Any) -> Path:
    return write(folder / "c.yaml", yaml.safe_dump({"model": {"path": "m"}, "security": security, **sections}))


@pytest.fixture
def secrets(tmp_path: Path) -> SecretSet:
    return SecretSet(tmp_path / "set")


def test_nothing_is_asked_where_nothing_is_said(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "c.yaml", "model: {path: m}")).read_security() == NO_SECURITY


def test_a_whole_section_is_read_from_paths_beside_the_file(tmp_path: Path, secrets: SecretSet) -> None:
    section = yaml.safe_load(yaml.safe_dump(secrets.section()).replace(f"{tmp_path}/", ""))
    found = load_config(config_of(tmp_path, section)).read_security()
    assert found.credentials == Credentials(secrets.tls, secrets.cluster_token)
    assert found.access.client_tokens == {"client": secrets.client_token}
    assert found.access.cluster_tokens == (secrets.cluster_token,)
    assert not found.access.require_client_certificate


def test_the_first_token_is_shown_and_each_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "token", f"# ours\n\n{TOKEN}\n{OTHER}  \n")
    found = load_config(config_of(tmp_path, {"cluster_token_file": "token"})).read_security()
    assert found.credentials.token == TOKEN
    assert found.access.cluster_tokens == (TOKEN, OTHER)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token"),
        (TOKEN[:-1], "line 1: the token has 31 characters; allowed: at least 32"),
        (f"{TOKEN}\n{'v' * 16} {'v' * 16}", "line 2: the token has other characters"),
        (f"{TOKEN}\x7f", "line 1: the token has other characters"),
        (f"{TOKEN}\u00e4", "is not ASCII"),
    ],
)
def test_a_bad_token_is_not_repeated(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path / "token", text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tokens(file)
    assert str(file) in str(caught.value) and "ttt" not in str(caught.value) and "vvv" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# nobody", "names no client"),
        (TOKEN, "line 1 is not NAME: TOKEN"),
        (f": {TOKEN}", "line 1 is not NAME: TOKEN"),
        (f"kim: {TOKEN[:5]}", "line 1: the token has 5 characters"),
        (f"kim: {TOKEN}\nkim: {OTHER}", "line 2: the name 'kim' is there twice"),
        (f"kim: {TOKEN}\nlee: {TOKEN}", "line 2: 'lee' has another client's token"),
    ],
)
def test_a_bad_clients_file_names_the_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_client_tokens(write(tmp_path / "clients", text))
    assert "ttt" not in str(caught.value)


def test_several_clients_have_names(tmp_path: Path) -> None:
    assert read_client_tokens(write(tmp_path / "c", f"kim: {TOKEN}\n# \nlee:{OTHER}")) == {"kim": TOKEN, "lee": OTHER}


def test_clients_tokens_are_read_where_clients_are_served(tmp_path: Path, secrets: SecretSet) -> None:
    section = {**secrets.section(), "client_tokens_file": str(tmp_path / "on-another-machine")}
    config = config_of(tmp_path, section, model={"path": str(MODELS / "tiny-ouro")})
    worker = parse_worker_arguments(
        "decode", ["--config", str(config), "--coordinator", "127.0.0.1:1"]
    ).settings.security
    assert worker.access.cluster_tokens == (secrets.cluster_token,) and worker.access.client_tokens == {}
    assert shown_credentials(config=config) == worker.credentials
    with pytest.raises(ConfigError, match=r"security\.client_tokens_file: .*no such file"):
        load_config(config)
    assert "no such file" in str(RUNNER.invoke(app, ["check", str(config)]).exception)


def fault(tmp_path: Path, security: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config_of(tmp_path, security, **sections))
    return str(caught.value)


def test_keys_that_need_each_other(tmp_path: Path, secrets: SecretSet) -> None:
    token = {"cluster_token_file": str(write(tmp_path / "token", TOKEN))}
    assert "security.require_client_certificate is true" in fault(tmp_path, {"require_client_certificate": True})
    assert "security.client_tokens_file is set; allowed" in fault(tmp_path, {"client_tokens_file": "x"})
    for section in ("coordinator", "launcher"):
        said = fault(tmp_path, token, **{section: {"host": "10.0.0.5"}})
        assert "security.tls is null" in said and f"{section}.host is 10.0.0.5" in said
    assert "security.tls.key_file is missing" in fault(tmp_path, {"tls": {"ca_file": "a", "cert_file": "b"}})
    assert "security.tls.x: no such key; allowed: ca_file, cert_file, key_file" in fault(
        tmp_path, {"tls": {"ca_file": "a", "cert_file": "b", "key_file": "c", "x": 1}}
    )
    tls_and_token = {"tls": secrets.section()["tls"], **token}
    load_config(config_of(tmp_path, tls_and_token, coordinator={"host": "10.0.0.5"}))


def test_a_file_that_is_wrong_is_named(tmp_path: Path, secrets: SecretSet) -> None:
    said = fault(tmp_path, {"cluster_token_file": "gone"})
    assert f"security.cluster_token_file: {tmp_path / 'gone'}: no such file" in said
    section = secrets.section()
    section["client_tokens_file"] = str(write(tmp_path / "clients", f"kim: {secrets.cluster_token}"))
    said = fault(tmp_path, section)
    assert "'kim' has the cluster's own token" in said and secrets.cluster_token not in said


@pytest.mark.parametrize(
    "security",
    [
        {"client_tokens_file": {"web": TOKEN}},
        {"client_tokens_file": [TOKEN], "cluster_token_file": "x"},
        {"cluster_token_file": TOKEN},
        {"cluster_token_file": f"tt/tt/{TOKEN[:28]}"},  # a token may hold slashes
        {"tls": TOKEN},
        {"tls": {"ca_file": f"-----BEGIN CERTIFICATE-----\n{TOKEN * 20}\n", "cert_file": "c", "key_file": "k"}},
        TOKEN,
    ],
)
def test_a_secret_in_place_of_its_file_is_not_repeated(tmp_path: Path, security: Any) -> None:
    said = fault(tmp_path, security)
    assert "security" in said and "ttt" not in said
    assert "; allowed: " in said or "no such file in" in said


def test_a_secret_in_place_of_any_other_file_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds text; allowed: a mapping") as as_config:
        load_config(write(tmp_path / "token", TOKEN))
    with pytest.raises(ConfigError, match="no such file in") as as_file:
        read_tokens(TOKEN)
    assert "ttt" not in f"{as_config.value}{as_file.value}"


def test_a_certificate_of_no_use_is_said_at_start(tmp_path: Path, secrets: SecretSet) -> None:
    old = SecretSet(tmp_path / "old", days=2, age_days=9)
    assert "ca.pem: the certificate expired on 20" in fault(tmp_path, {"tls": old.section()["tls"]})
    early = SecretSet(tmp_path / "early", days=2, age_days=-9)
    assert "the certificate is valid only from 20" in fault(tmp_path, {"tls": early.section()["tls"]})
    tls: Any = secrets.section()["tls"]
    assert "is not the key of the certificate in" in fault(tmp_path, {"tls": {**tls, "key_file": old.path(KEY_FILE)}})
    no_key = {**tls, "key_file": old.path(CERT_FILE)}
    assert "allowed: a PEM file" in fault(tmp_path, {"tls": no_key})
    broken = write(tmp_path / "broken", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert "broken: is not a PEM certificate" in fault(tmp_path, {"tls": {**tls, "cert_file": str(broken)}})


def test_two_authorities_while_one_follows_the_other(tmp_path: Path, secrets: SecretSet) -> None:
    others = {"old": SecretSet(tmp_path / "old", days=2, age_days=9), "next": SecretSet(tmp_path / "next")}
    tls: Any = secrets.section()["tls"]
    ours = secrets.tls.ca.decode()
    for order in (("old", ours), (ours, "old"), ("next", ours), (ours, "next")):
        text = "".join(others[one].tls.ca.decode() if one in others else one for one in order)
        both = str(write(tmp_path / "both.pem", text))
        load_config(config_of(tmp_path, {"tls": {**tls, "ca_file": both}}))
    said = fault(tmp_path, {"tls": {**tls, "ca_file": others["next"].path(CA_FILE)}})
    assert "cert.pem: the certificate is of no authority in" in said and "next/ca.pem" in said
    expired = others["old"].tls.ca.decode()
    none_valid = str(write(tmp_path / "none.pem", expired + expired))
    assert "none.pem: the certificate expired on 20" in fault(tmp_path, {"tls": {**tls, "ca_file": none_valid}})


def test_a_certificate_of_an_authority_between(tmp_path: Path, secrets: SecretSet) -> None:
    """The pair's file holds the chain: its own certificate, and that of whoever issued it."""
    between = SecretSet(tmp_path / "between")
    top_key = serialization.load_pem_private_key(Path(secrets.path(CA_KEY_FILE)).read_bytes(), password=None)
    top, issuer = (x509.load_pem_x509_certificate(one.tls.ca) for one in (secrets, between))
    assert isinstance(top_key, ec.EllipticCurvePrivateKey)
    crossed = (
        x509.CertificateBuilder(top.subject, issuer.subject, issuer.public_key(), x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(top_key, hashes.SHA256())
    )
    own = Path(between.path(CERT_FILE)).read_text(encoding="utf-8")
    chain = write(tmp_path / "chain.pem", own + crossed.public_bytes(serialization.Encoding.PEM).decode())
    tls = {"ca_file": secrets.path(CA_FILE), "cert_file": str(chain), "key_file": between.path(KEY_FILE)}
    load_config(config_of(tmp_path, {"tls": tls}))
    assert "of no authority" in fault(tmp_path, {"tls": {**tls, "cert_file": between.path(CERT_FILE)}})


def test_a_secret_that_others_can_read_is_warned_of(
    tmp_path: Path, secrets: SecretSet, caplog: pytest.LogCaptureFixture
) -> None:
    path = config_of(tmp_path, secrets.section())
    with caplog.at_level(logging.WARNING):
        load_config(path)
        assert caplog.messages == []
        Path(secrets.path(KEY_FILE)).chmod(0o640)
        load_config(path)
    assert [secrets.path(KEY_FILE) in message for message in caplog.messages] == [True]


def test_a_development_set_is_private_and_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    made = RUNNER.invoke(app, ["certs", str(folder), "--host", "10.1.2.3", "--days", "3"])
    assert made.exit_code == 0, made.output
    for name in (CA_KEY_FILE, KEY_FILE, CLIENT_TOKEN_FILE, CLIENT_TOKENS_FILE):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    (tmp_path / "c.yaml").write_text(f"model: {{path: m}}\n{made.stdout}", encoding="utf-8")
    assert load_config(tmp_path / "c.yaml").read_security().access.client_tokens
    before = (folder / KEY_FILE).read_bytes()
    again = RUNNER.invoke(app, ["certs", str(folder)])
    assert again.exit_code != 0 and "is there already" in str(again.exception)
    assert (folder / KEY_FILE).read_bytes() == before


def test_a_commands_credentials_come_from_files_or_a_configuration(tmp_path: Path, secrets: SecretSet) -> None:
    config, token = config_of(tmp_path, secrets.section()), Path(secrets.path(CLIENT_TOKEN_FILE))
    assert shown_credentials() == Credentials()
    assert shown_credentials(config=config) == Credentials(secrets.tls, secrets.cluster_token)
    assert shown_credentials(config=config, token_file=token) == Credentials(secrets.tls, secrets.client_token)
    assert shown_credentials(token_file=token).token == secrets.client_token
    with pytest.raises(ConfigError, match="are needed together"):
        shown_credentials(cert_file=token)
    arguments = ["status", "--address", "192.0.2.1:5"]
    refused = RUNNER.invoke(app, arguments, env={TOKEN_FILE_VARIABLE: str(token)})
    assert "no token is sent to 192.0.2.1:5 without TLS" in str(refused.exception)
    told = RUNNER.invoke(app, [*arguments, "--token-file", str(token)], env={TOKEN_FILE_VARIABLE: str(tmp_path / "no")})
    assert "no token is sent to 192.0.2.1:5 without TLS" in str(told.exception)
    both = RUNNER.invoke(app, [*arguments, "--config", str(config), "--ca-file", str(config)])
    assert both.exit_code == 2


def test_a_configuration_goes_before_the_environment(tmp_path: Path, secrets: SecretSet) -> None:
    shown: list[Credentials] = []
    probe = typer.Typer()

    @probe.command()
    @with_credentials
    def command(*, credentials: Credentials) -> None:
        shown.append(credentials)

    config, token = str(config_of(tmp_path, secrets.section())), secrets.path(CLIENT_TOKEN_FILE)
    for arguments in (["--config", config], ["--config", config, "--token-file", token], []):
        assert RUNNER.invoke(probe, arguments, env={TOKEN_FILE_VARIABLE: token}).exit_code == 0
    assert [one.token for one in shown] == [secrets.cluster_token, secrets.client_token, secrets.client_token]


@pytest.mark.parametrize(
    ("access", "host", "is_open"),
    [
        (Access(), "0.0.0.0", True),
        (Access(), "127.0.0.1", False),
        (Access(cluster_tokens=(TOKEN,)), "0.0.0.0", False),
        (Access(require_client_certificate=True), "0.0.0.0", False),
    ],
)
def test_a_cluster_that_anybody_controls(access: Access, host: str, is_open: bool) -> None:
    assert _is_anybodys(access, host) is is_open
