"""The coordinator's TLS: the context with which it serves, renewed while it serves.

New connections use the newest certificate; open ones continue. A certificate goes live only after a handshake in memory
has shown that agents accept it, so a failed renewal leaves the previous one in place.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from cryptography import x509

from meshwright.protocol.trust import MAX_BUNDLE_BYTES
from meshwright_operator.coordinator import certificates
from meshwright_operator.coordinator.certificates import CertificateError, ServingCertificate
from meshwright_operator.coordinator.credentials import CredentialsError, CredentialsStore
from meshwright_operator.kube.client import ApiError
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.timestamps import format_time, utc_now

CHECK_SECONDS = 3600.0
"""Longest time between two looks at the CAs, so that those that another replica added are served."""
FILE_CHECK_SECONDS = 10.0
RETRY_SECONDS = 60.0
SHORTEST_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the coordinator serves with, and what agents verify it with."""

    chain: str
    """Serving certificate and intermediate ones, in PEM format."""
    key: str = field(repr=False)
    bundle: str
    """CA certificates in PEM format."""
    not_after: datetime
    authority_not_after: datetime
    """When the last CA of the bundle expires."""


class CertificateSource(Protocol):
    """Where the coordinator's certificate comes from."""

    async def identity(self) -> Identity:
        """The certificate to serve with from now on.

        Raises:
            ApiError, CredentialsError: It is not available.
        """

    def pause(self) -> float:
        """Seconds until the next look."""


class ManagedCertificates:
    """Serving certificates from the CA in the operator's Secret. They are kept in memory only."""

    def __init__(
        self,
        store: CredentialsStore,
        names: Sequence[str],
        ca_lifetime: timedelta,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._store = store
        self._names = names
        self._ca_lifetime = ca_lifetime
        self._lifetime = ca_lifetime / certificates.SERVING_PART
        self._now = now
        self._serving: ServingCertificate | None = None
        self._signer = ""

    async def identity(self) -> Identity:
        """The current certificate, or a new one if a third of its lifetime is left or another CA signs.

        Also a new one if the current one is not valid yet: the clock was ahead when it was issued.
        """
        authorities = (await self._store.load()).authorities
        now = self._now()
        authority = certificates.signer(authorities, now, self._ca_lifetime)
        if self._serving is None or self._signer != authority.pem or self._seconds_until_due() <= 0:
            self._serving = certificates.issue(authority, self._names, now, self._lifetime)
            self._signer = authority.pem
        serving, bundle = self._serving, certificates.bundle(authorities)
        return Identity(serving.chain, serving.key, bundle, serving.not_after, authorities[-1].not_after)

    def pause(self) -> float:
        """Until the certificate is due, at most an hour."""
        return min(CHECK_SECONDS, self._seconds_until_due())

    def _seconds_until_due(self) -> float:
        if self._serving is None or self._serving.not_before > self._now():
            return 0.0
        return (self._serving.not_after - self._lifetime / 3 - self._now()).total_seconds()


class CertificateFiles:
    """Certificate, key and CA from files that somebody else renews: cert-manager, or the mounted Secret of a user."""

    def __init__(self, certificate: Path, key: Path, ca: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._ca = ca

    async def identity(self) -> Identity:
        """The files' contents now."""
        return await asyncio.to_thread(self._read)

    def pause(self) -> float:
        """The kubelet updates mounted files within a minute or two."""
        return FILE_CHECK_SECONDS

    def _read(self) -> Identity:
        chain, key, ca = (self._text(path) for path in (self._certificate, self._key, self._ca))
        serving = self._certificates(self._certificate, chain)[0]
        authorities = self._certificates(self._ca, ca)
        bundle = "".join(certificates.certificate_pem(authority) for authority in authorities)
        if len(bundle) > MAX_BUNDLE_BYTES:
            raise CredentialsError(
                f"{self._ca} contains {len(authorities)} CA certificates in {len(bundle)} bytes: name a file with only "
                f"the CA of the coordinator's certificate, of at most {MAX_BUNDLE_BYTES} bytes"
            )
        last = max(authority.not_valid_after_utc for authority in authorities)
        return Identity(chain, key, bundle, serving.not_valid_after_utc, last)

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise CredentialsError(f"cannot read {path}: {error.strerror}: mount the file, or name another") from None

    def _certificates(self, path: Path, pem: str) -> Sequence[x509.Certificate]:
        try:
            return certificates.read_certificates(pem.encode())
        except CertificateError as error:
            raise CredentialsError(f"{path}: {error}") from None


class CoordinatorTls:
    """Keeps the serving context and the agents' bundle current.

    Args:
        source: Where the certificate comes from.
        server_name: Name or address that agents verify.
        metrics: Reports when certificates expire, and failed renewals.
        publish: Called with each new bundle.
    """

    def __init__(
        self, source: CertificateSource, server_name: str, metrics: OperatorMetrics, publish: Callable[[str], None]
    ) -> None:
        self.context = server_context()
        self._source = source
        self._server_name = server_name
        self._metrics = metrics
        self._publish = publish
        self._live: Identity | None = None

    async def refresh(self) -> None:
        """Serve with the source's certificate from now on, if agents would accept it.

        Raises:
            ApiError, CredentialsError: There is no such certificate. The previous one stays in use.
        """
        identity = await self._source.identity()
        if identity == self._live:
            return
        trial = server_context()
        try:
            _load(trial, identity)
            check_handshake(trial, identity.bundle, self._server_name)
        except ssl.SSLError as error:
            raise CredentialsError(
                f"agents would not accept the coordinator's certificate for {self._server_name}: {_reason(error)}. "
                "Certificate, key and CA must belong together, and the certificate must contain this name"
            ) from None
        # Agents must be able to learn the new bundle before the certificate changes.
        self._publish(identity.bundle)
        _load(self.context, identity)
        self._live = identity
        expiry = self._metrics.certificate_expiry
        expiry.labels("serving").set(identity.not_after.timestamp())
        expiry.labels("authority").set(identity.authority_not_after.timestamp())
        log.info("serving with a new certificate", extra={"expires": format_time(identity.not_after)})

    async def run(self) -> None:
        """Renew and rotate until cancelled."""
        pause = self._source.pause()
        while True:
            await asyncio.sleep(max(SHORTEST_PAUSE_SECONDS, pause))
            try:
                await self.refresh()
                pause = self._source.pause()
            except (ApiError, CredentialsError) as error:
                self._metrics.certificate_renewal_failures.inc()
                log.warning("renewal of the coordinator's certificate failed", extra={"error": str(error)})
                pause = min(RETRY_SECONDS, max(self._source.pause(), SHORTEST_PAUSE_SECONDS))


def server_context() -> ssl.SSLContext:
    """A context for a server, without a certificate. Its clients are this release's agents, which support TLS 1.3."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Agents do not resume sessions.
    context.num_tickets = 0
    return context


def check_handshake(context: ssl.SSLContext, bundle: str, server_name: str) -> None:
    """Connect to the context in memory, as an agent does.

    Raises:
        ssl.SSLError: An agent that trusts `bundle` would not accept the server.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.load_verify_locations(cadata=bundle)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=server_name)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    finished: set[ssl.SSLObject] = set()
    while len(finished) < 2:
        for side in (client, server):
            try:
                side.do_handshake()
                finished.add(side)
            except ssl.SSLWantReadError:
                continue


def _load(context: ssl.SSLContext, identity: Identity) -> None:
    """Load certificate and key. `ssl` reads only files: this one is private, and is deleted at once."""
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
            file.write(f"{identity.chain.strip()}\n{identity.key.strip()}\n")
            file.flush()
            context.load_cert_chain(file.name)
    except ssl.SSLError:  # an OSError, too
        raise
    except OSError as error:
        raise CredentialsError(
            f"cannot write the certificate to a temporary file: {error.strerror}: free space, or set TMPDIR"
        ) from None


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason or str(error)
