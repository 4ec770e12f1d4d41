"""X.509 certificates: is a pair of use now, and a development set of authority, pair and tokens.

Called when a configuration is read, and by `loopline certs`. What the network does with certificates is gRPC's matter.
"""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loopline.errors import ConfigError, OperatorError
from loopline.security import Tls

CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"
CERT_FILE, KEY_FILE = "cert.pem", "key.pem"
CLUSTER_TOKEN_FILE, CLIENT_TOKENS_FILE, CLIENT_TOKEN_FILE = "cluster-token", "client-tokens", "client-token"
CLIENT_NAME = "client"
_CLOCK_SKEW = datetime.timedelta(minutes=5)  # between machines: a fresh set is good on all of them
_TOKEN_BYTES = 32
_SECRET, _PUBLIC = 0o600, 0o644


def check_pair(tls: Tls, ca_file: str, cert_file: str, key_file: str, now: datetime.datetime) -> None:
    """Raises ConfigError that names the file: not a certificate or key, not theirs, of none of the authorities, or not
    valid at `now`, with the date. Of several authorities one that is valid is enough, if it is the certificate's."""
    authorities = _load_certificates(tls.ca, ca_file)
    valid = [authority for authority in authorities if _date_fault(authority, now) is None]
    if not valid:
        raise ConfigError(f"{ca_file}: {_date_fault(authorities[-1], now)}")
    certificate, *between = _load_certificates(tls.certificate or b"", cert_file)
    if (fault := _date_fault(certificate, now)) is not None:
        raise ConfigError(f"{cert_file}: {fault}")
    if not _is_of(certificate, between, valid):
        raise ConfigError(f"{cert_file}: the certificate is of no authority in {ca_file} that is valid now")
    try:
        key = serialization.load_pem_private_key(tls.key or b"", password=None)
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise ConfigError(f"{key_file}: is not a PEM private key without a password") from error
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise ConfigError(f"{key_file}: is not the key of the certificate in {cert_file}")


def write_development_set(
    folder: Path, *, hosts: Sequence[str], days: int, begins: datetime.datetime | None = None
) -> None:
    """A new authority, one pair for servers and clients at `hosts` (names or IP addresses), valid for `days` from
    `begins` (None: now), the cluster's token and one client's. Existing files are never replaced: OperatorError."""
    begins = datetime.datetime.now(datetime.UTC) - _CLOCK_SKEW if begins is None else begins
    ends = begins + datetime.timedelta(days=days) + _CLOCK_SKEW
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name, name = _name("Loopline development CA"), _name("loopline")
    ca = (
        _draft(ca_name, ca_name, ca_key.public_key(), begins, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _draft(name, ca_name, key.public_key(), begins, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    client_token = secrets.token_urlsafe(_TOKEN_BYTES)
    contents = {
        CA_FILE: (ca.public_bytes(serialization.Encoding.PEM), _PUBLIC),
        CA_KEY_FILE: (_private_bytes(ca_key), _SECRET),
        CERT_FILE: (certificate.public_bytes(serialization.Encoding.PEM), _PUBLIC),
        KEY_FILE: (_private_bytes(key), _SECRET),
        CLUSTER_TOKEN_FILE: (f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), _SECRET),
        CLIENT_TOKENS_FILE: (f"{CLIENT_NAME}: {client_token}\n".encode(), _SECRET),
        CLIENT_TOKEN_FILE: (f"{client_token}\n".encode(), _SECRET),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file in contents:
            if (folder / file).exists():
                raise OperatorError(f"{folder / file}: is there already; a set is made in a folder without one")
        for file, (content, mode) in contents.items():
            _write_new(folder / file, content, mode)
    except OSError as error:
        raise OperatorError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _load_certificates(pem: bytes, file: str) -> list[x509.Certificate]:
    """All of a file, in its order; at least one."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{file}: is not a PEM certificate") from error


def _date_fault(certificate: x509.Certificate, now: datetime.datetime) -> str | None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        return f"the certificate expired on {ends:%Y-%m-%d %H:%M} UTC"
    if now < begins:
        return f"the certificate is valid only from {begins:%Y-%m-%d %H:%M} UTC on"
    return None


def _is_of(
    certificate: x509.Certificate, between: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> bool:
    """Whether one of the authorities has issued it, by way of the certificates `between` or not, or is itself it."""
    if certificate in authorities or any(_has_issued(authority, certificate) for authority in authorities):
        return True
    return any(
        _has_issued(issuer, certificate) and _is_of(issuer, [*between[:at], *between[at + 1 :]], authorities)
        for at, issuer in enumerate(between)
    )


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # another name, no key that signs, another key
        return False
    return True


def _draft(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    begins: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise OperatorError(f"host is {host!r}; allowed: an IP address or an ASCII name") from None


def _public_bytes(key: object) -> bytes:
    encode = key.public_bytes  # type: ignore[attr-defined]  # every kind of key has it
    return bytes(encode(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """The file has its rights from its first moment on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
