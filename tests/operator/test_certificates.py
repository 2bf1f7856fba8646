"""The coordinator's certificates: what they contain, when CAs follow one another, and which files are rejected."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from cryptography import x509

from meshwright.protocol.trust import bundle_id
from meshwright_operator.coordinator import certificates
from meshwright_operator.coordinator.certificates import Authority, CertificateError
from meshwright_operator.coordinator.credentials import Credentials, CredentialsError, CredentialsStore
from meshwright_operator.coordinator.tls import Identity as Served
from meshwright_operator.coordinator.tls import ManagedCertificates, _load, check_handshake, server_context

NAMES = ("mw.ops.svc", "127.0.0.1", "fd00::7")
YEAR = timedelta(days=365)
NOW = datetime.now(UTC)


def serving(authority: Authority, names: tuple[str, ...] = NAMES, now: datetime = NOW) -> ssl.SSLContext:
    """A server with a certificate of this CA."""
    issued = certificates.issue(authority, names, now, timedelta(days=30))
    context = server_context()
    _load(context, Served(issued.chain, issued.key, "", issued.not_after, issued.not_after))
    return context


@pytest.mark.parametrize("name", NAMES)
def test_a_serving_certificate_is_valid_for_its_names_of_both_address_families(name: str) -> None:
    authority = certificates.create_authority(NOW, YEAR)
    check_handshake(serving(authority), authority.pem, name)
    for other in ("mw.ops", "127.0.0.2", "fd00::8"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            check_handshake(serving(authority), authority.pem, other)


def test_a_certificate_of_another_ca_or_out_of_date_is_rejected() -> None:
    authority, other = (certificates.create_authority(NOW, YEAR) for _ in range(2))
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        check_handshake(serving(authority), other.pem, NAMES[0])
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        check_handshake(serving(authority, now=NOW - timedelta(days=31)), authority.pem, NAMES[0])
    with pytest.raises(ssl.SSLCertVerificationError, match="not yet valid"):
        check_handshake(serving(authority, now=NOW + timedelta(days=2)), authority.pem, NAMES[0])


def test_a_node_whose_clock_is_hours_behind_accepts_a_new_certificate() -> None:
    authority = certificates.create_authority(NOW + timedelta(hours=20), YEAR)
    check_handshake(serving(authority, now=NOW + timedelta(hours=20)), authority.pem, NAMES[0])


def test_extensions_are_those_that_strict_verifiers_require() -> None:
    authority = certificates.create_authority(NOW, YEAR)
    issued = certificates.issue(authority, NAMES, NOW, timedelta(days=30))
    leaf = x509.load_pem_x509_certificate(issued.chain.encode())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("127.0.0.1"),
        ipaddress.ip_address("fd00::7"),
    ]
    constraints = authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.path_length) == (True, 0)
    identifier = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    issuer = leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    assert issuer == identifier
    assert "PRIVATE" not in repr(issued)


def test_over_years_an_agent_that_asks_once_a_quarter_of_a_lifetime_never_loses_trust() -> None:
    authorities = certificates.rotated((), NOW, YEAR)
    known = certificates.bundle(authorities)
    rotations = 0
    for day in range(0, 5 * 365, 10):
        now = NOW + timedelta(days=day)
        after = certificates.rotated(authorities, now, YEAR)
        rotations += after[-1] is not authorities[-1]
        authorities = after
        signer = certificates.signer(authorities, now, YEAR)
        assert len(authorities) <= 2
        assert signer.not_after - now >= YEAR / certificates.SERVING_PART, "it outlives what it signs"
        assert signer.pem in known
        if day % 90 == 0:
            known = certificates.bundle(authorities)
    assert rotations == 7


def test_a_ca_that_expired_unused_is_replaced() -> None:
    old = certificates.rotated((), NOW, YEAR)
    (new,) = certificates.rotated(old, NOW + 2 * YEAR, YEAR)
    assert new.pem != old[0].pem


def test_authorities_are_read_as_they_were_written() -> None:
    two = tuple(certificates.create_authority(NOW, YEAR) for _ in range(2))
    keys = "".join(authority.key_pem for authority in two).encode()
    found = certificates.read_authorities(certificates.bundle(two).encode(), keys.rstrip())
    assert [authority.pem for authority in found] == [authority.pem for authority in two]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pem, key: (b"", key), "no certificate in PEM format"),
        (lambda pem, key: (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", key), "no certificate"),
        (lambda pem, key: (pem, b""), "1 certificates and 0 private keys"),
        (lambda pem, key: (pem + pem, key), "2 certificates and 1 private keys"),
        (lambda pem, key: (pem, key.replace(b"M", b"N", 1)), "no private key in PEM format"),
        (lambda pem, key: (pem, certificates.create_authority(NOW, YEAR).key_pem.encode()), "belongs to another"),
    ],
)
def test_damaged_authorities_are_rejected_with_the_reason(change, words: str) -> None:  # type: ignore[no-untyped-def]
    authority = certificates.create_authority(NOW, YEAR)
    with pytest.raises(CertificateError, match=words):
        certificates.read_authorities(*change(authority.pem.encode(), authority.key_pem.encode()))


def test_a_bundle_has_the_same_name_on_both_sides_of_an_environment_variable() -> None:
    pem = certificates.create_authority(NOW, YEAR).pem
    assert bundle_id(pem) == bundle_id(pem.strip()) != bundle_id(pem + pem)
    assert bundle_id(" \n") == ""


def test_a_ca_of_a_clock_that_was_ahead_signs_nothing_until_it_is_valid() -> None:
    before = certificates.rotated((), NOW, YEAR)
    ahead = certificates.rotated(before, NOW + timedelta(days=300), YEAR)
    assert len(ahead) == 2
    assert certificates.rotated(ahead, NOW, YEAR) == ahead, "the old CA is valid, so nothing changes"
    assert certificates.signer(ahead, NOW, YEAR) is before[0]
    far = certificates.rotated(before, NOW + 3 * YEAR, YEAR)
    back = certificates.rotated(far, NOW, YEAR)
    signer = certificates.signer(back, NOW, YEAR)
    assert signer.valid_at(NOW)
    assert len(back) == 2
    assert certificates.rotated(back, NOW + YEAR / 2, YEAR) == back, "one more CA for each wrong clock, not one a look"


async def test_a_certificate_of_a_clock_that_was_ahead_is_replaced() -> None:
    now = [NOW + timedelta(days=250)]
    authorities = certificates.rotated((), NOW, YEAR)

    class Store:
        async def load(self) -> Credentials:
            return Credentials(b"", certificates.rotated(authorities, now[0], YEAR))

    source = ManagedCertificates(cast(CredentialsStore, Store()), ["localhost"], YEAR, lambda: now[0])
    early = await source.identity()
    now[0] = NOW
    assert source.pause() == 0
    identity = await source.identity()
    assert identity.chain != early.chain
    assert x509.load_pem_x509_certificate(identity.chain.encode()).not_valid_before_utc <= NOW
    assert source.pause() > 0


def test_a_full_disk_is_an_error_of_the_certificate_and_not_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/full")
    with pytest.raises(CredentialsError, match="temporary file"):
        serving(certificates.create_authority(NOW, YEAR))
