"""Certificates of the coordinator: certificate authorities (CAs), and the serving certificates that they sign.

No function does I/O or reads a clock. Keys are ECDSA P-256. Every certificate is valid from one day before it was
created, because the clocks of nodes differ.

A new CA is created when two thirds of the previous one's lifetime are over. Until the previous one expires, agents
trust both, and the oldest one that outlives a new serving certificate signs it. So agents have a quarter of a CA's
lifetime to learn of a new one before it is used.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATED = timedelta(days=1)
SERVING_PART = 12
"""A serving certificate lives for this part of a CA's lifetime: about 30 days of a year."""


class CertificateError(ValueError):
    """A certificate or key cannot be used. The message says which, and why."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def not_after(self) -> datetime:
        """When it expires."""
        return self.certificate.not_valid_after_utc

    def valid_at(self, now: datetime) -> bool:
        """Whether agents accept it at this time."""
        return self.certificate.not_valid_before_utc <= now < self.not_after

    @property
    def pem(self) -> str:
        """The certificate."""
        return certificate_pem(self.certificate)

    @property
    def key_pem(self) -> str:
        """The private key."""
        return _key_pem(self.key)


@dataclass(frozen=True, slots=True)
class ServingCertificate:
    """The certificate with which the coordinator proves its identity."""

    chain: str
    """The certificate and those between it and the CA, in PEM format."""
    key: str = field(repr=False)
    not_before: datetime
    not_after: datetime


def create_authority(now: datetime, lifetime: timedelta) -> Authority:
    """Create a CA that is valid for `lifetime`."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Each one has a name of its own, so that the certificates of a bundle can be told apart.
    name = _name(f"meshwright-coordinator-ca-{serial:040x}"[:64])
    usage = x509.KeyUsage(**{**_NO_USAGE, "key_cert_sign": True, "crl_sign": True})
    builder = (
        _builder(name, name, key, now, now + lifetime)
        .serial_number(serial)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return Authority(builder.sign(key, hashes.SHA256()), key)


def issue(authority: Authority, names: Iterable[str], now: datetime, lifetime: timedelta) -> ServingCertificate:
    """Issue a serving certificate for host names and IP addresses. It does not outlive the CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    not_after = min(now + lifetime, authority.not_after)
    alternatives = x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(_name("meshwright-coordinator"), authority.certificate.subject, key, now, not_after)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**_NO_USAGE, "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    valid = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return ServingCertificate(certificate_pem(certificate), _key_pem(key), *valid)


def rotated(authorities: Sequence[Authority], now: datetime, lifetime: timedelta) -> tuple[Authority, ...]:
    """The CAs from now on, oldest first: without expired ones, and with a new one if the newest is due.

    One that is not valid yet stays, but signs nothing: a clock is wrong now, or was wrong when it was created.
    """
    kept = tuple(authority for authority in authorities if authority.not_after > now)
    valid = [authority for authority in kept if authority.valid_at(now)]
    if valid and valid[-1].not_after - now >= lifetime / 3:
        return kept
    return tuple(sorted((*kept, create_authority(now, lifetime)), key=lambda authority: authority.not_after))


def signer(authorities: Sequence[Authority], now: datetime, lifetime: timedelta) -> Authority:
    """The CA that signs serving certificates: the oldest that outlives one, because most agents know it."""
    valid = [authority for authority in authorities if authority.valid_at(now)] or list(authorities)
    return next((a for a in valid if a.not_after - now >= lifetime / SERVING_PART), valid[-1])


def bundle(authorities: Iterable[Authority]) -> str:
    """The certificates of these CAs, in PEM format."""
    return "".join(authority.pem for authority in authorities)


def read_authorities(certificates: bytes, keys: bytes) -> tuple[Authority, ...]:
    """The CAs in a bundle and the file of their private keys, in the same order.

    Raises:
        CertificateError: One of them cannot be read, or a key belongs to another certificate.
    """
    loaded = read_certificates(certificates)
    blocks = _PRIVATE_KEY.findall(keys)
    if len(blocks) != len(loaded):
        raise CertificateError(f"there are {len(loaded)} certificates and {len(blocks)} private keys")
    return tuple(_authority(certificate, block) for certificate, block in zip(loaded, blocks, strict=True))


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """The certificates in a file in PEM format.

    Raises:
        CertificateError: It contains none, or one that cannot be read.
    """
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise CertificateError(f"no certificate in PEM format: {error}") from None


def certificate_pem(certificate: x509.Certificate) -> str:
    """The certificate in PEM format."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
_NO_USAGE = dict.fromkeys(
    (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    ),
    False,
)


def _authority(certificate: x509.Certificate, pem: bytes) -> Authority:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"no private key in PEM format: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("the private key is not an elliptic curve key")
    if certificate.public_key() != key.public_key():
        raise CertificateError("a private key belongs to another certificate")
    return Authority(certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


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
