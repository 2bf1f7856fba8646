"""A certificate authority for one machine, and serving certificates signed by it (ECDSA P-256).

The API server and the node agents' log and exec endpoints serve TLS with certificates of this authority; clients trust
it through the kubeconfig. Creating certificates takes milliseconds, so an in-memory server creates its own each time.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshwright_local.kube.kubeconfig import write_private

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_LIFETIME = datetime.timedelta(days=3650)
_BACKDATED = datetime.timedelta(minutes=5)
_USAGES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of a certificate, its key and the authority."""

    certificate: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> str:
        """The certificate that clients trust."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, common_name: str, names: Iterable[str] = LOCAL_NAMES, *, client: bool = False) -> tuple[str, str]:
        """Issue a serving certificate for host names and IP addresses. Return certificate and key as PEM.

        With `client`, it is also a client certificate, as a real API server uses for kubelets.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if client else [])]
        extensions = [
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
            (x509.ExtendedKeyUsage(uses), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False),
        ]
        certificate = _sign(_name(common_name), key, extensions, self.certificate.subject, self.key)
        return certificate.public_bytes(serialization.Encoding.PEM).decode(), _key_pem(key)


def create_authority(common_name: str = "meshwright-local-ca") -> Authority:
    """Create a certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, decipher_only=False, **dict.fromkeys(_USAGES, False)
    )
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
    return Authority(_sign(_name(common_name), key, extensions, _name(common_name), key), key)


def load_authority(directory: Path) -> Authority:
    """Load the authority of a directory (`ca.crt`, `ca.key`). Create it if it does not exist."""
    certificate, key = directory / "ca.crt", directory / "ca.key"
    if certificate.exists() and key.exists():
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError(
                f"{key} does not contain an elliptic curve key; remove {directory} to create a new authority"
            )
        return Authority(x509.load_pem_x509_certificate(certificate.read_bytes()), private)
    authority = create_authority()
    write_private(key, _key_pem(authority.key))
    write_private(certificate, authority.pem)
    return authority


def server_context(certificate_pem: str, key_pem: str) -> ssl.SSLContext:
    """Return a TLS context that serves with a certificate. Deletes the private file that `ssl` needs at once."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{certificate_pem}\n{key_pem}")
        file.flush()
        context.load_cert_chain(file.name)
    return context


def client_context(authority_pem: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only one authority."""
    return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=authority_pem)


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _BACKDATED).not_valid_after(now + _LIFETIME)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for extension, critical in [*extensions, (identifier, False)]:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
