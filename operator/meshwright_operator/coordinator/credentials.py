"""The operator's Secret: the key of the jobs' tokens, and the CA of the coordinator with its private key.

The operator creates the Secret if it does not exist, completes and rotates it, and never overwrites an entry that it
cannot read. Replicas that create it at the same time agree, because only one create succeeds and the others read. Each
update is a PUT with the resourceVersion that was read.

A new key stops the workers of all running jobs. So every replica that runs restores a Secret that was deleted, with the
key that it has in memory, and a replica that starts waits for that while another one leads.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from meshwright.api.objects import KubeObject
from meshwright_operator.coordinator import certificates
from meshwright_operator.coordinator.certificates import Authority, CertificateError
from meshwright_operator.coordinator.tokens import KEY_BYTES
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path
from meshwright_operator.timestamps import utc_now

TOKEN_KEY = "coordinator.key"  # noqa: S105 - the entry's name
CA_CERTIFICATES = "ca.crt"
CA_KEYS = "ca.key"
ATTEMPTS = 5

log = logging.getLogger(__name__)


class CredentialsError(Exception):
    """The operator's Secret, or a certificate file, cannot be used. The message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The contents of the Secret."""

    key: bytes = field(repr=False)
    """The key from which tokens are derived."""
    authorities: tuple[Authority, ...] = ()
    """The CAs that agents trust, oldest first."""


def read_secret(secret: KubeObject) -> Credentials | None:
    """The Secret's contents; None if the Secret is empty.

    Raises:
        CredentialsError: An entry is missing or damaged, or the Secret is not the operator's.
    """
    metadata, entries = secret["metadata"], secret.get("data") or {}
    if not entries:
        return None
    where = f"Secret {metadata.get('namespace')}/{metadata['name']}"
    if TOKEN_KEY not in entries:
        raise CredentialsError(
            f"{where} contains {', '.join(sorted(entries))}, but not `{TOKEN_KEY}`: it is not the operator's. "
            "Choose another name with --credentials-secret, or delete the Secret"
        )
    key = _decode(where, entries, TOKEN_KEY).strip()
    if len(key) < KEY_BYTES:
        raise CredentialsError(
            f"`{TOKEN_KEY}` of {where} must have at least {KEY_BYTES} bytes, got {len(key)}: restore it from a backup. "
            "A new key stops the workers of all running jobs"
        )
    if CA_CERTIFICATES not in entries and CA_KEYS not in entries:
        return Credentials(key)
    try:
        authorities = certificates.read_authorities(
            _decode(where, entries, CA_CERTIFICATES), _decode(where, entries, CA_KEYS)
        )
    except CertificateError as error:
        raise CredentialsError(
            f"`{CA_CERTIFICATES}` and `{CA_KEYS}` of {where} cannot be used: {error}. Remove both entries: the "
            "operator creates a new CA, and running agents accept it"
        ) from None
    return Credentials(key, tuple(sorted(authorities, key=lambda authority: authority.not_after)))


def secret_data(credentials: Credentials) -> dict[str, str]:
    """The entries of the Secret."""
    entries = {TOKEN_KEY: credentials.key}
    if credentials.authorities:
        entries[CA_CERTIFICATES] = certificates.bundle(credentials.authorities).encode()
        entries[CA_KEYS] = "".join(authority.key_pem for authority in credentials.authorities).encode()
    return {name: base64.b64encode(value).decode() for name, value in entries.items()}


class CredentialsStore:
    """Reads, creates and rotates the Secret.

    Args:
        client: The API server.
        namespace: The operator's namespace.
        name: The Secret's name.
        ca_lifetime: Lifetime of a CA; None if the Secret has no CA, because certificates come from files.
        now: The clock.
        leader: Name of another process that leads now; empty if there is none. It has the key of the running jobs.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        ca_lifetime: timedelta | None,
        now: Callable[[], datetime] = utc_now,
        leader: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._ca_lifetime = ca_lifetime
        self._now = now
        self._leader = leader
        self._current: Credentials | None = None

    async def load(self) -> Credentials:
        """The Secret's contents, once they are complete and no CA is due for rotation.

        The key of this process does not change while it runs, because the agents of running jobs have its tokens.

        Raises:
            ApiError: The API server could not be reached, or rejected a call. Or the Secret is gone, and the leader has
                not restored it yet.
            CredentialsError: The Secret cannot be used. It was not changed.
        """
        for _ in range(ATTEMPTS):
            try:
                credentials = await self._load_once()
            except ApiError as error:
                if error.code != 409:
                    raise
                continue  # Another process created or changed the Secret: read what it wrote.
            if self._current is not None and credentials.key != self._current.key:
                log.error(
                    "the key of the operator's Secret was changed; workers of running jobs are rejected after the "
                    "operator's next start",
                    extra={"secret": f"{self._namespace}/{self._name}"},
                )
                credentials = replace(credentials, key=self._current.key)
            self._current = credentials
            return credentials
        raise ApiError(
            409, "Conflict", f"Secret {self._namespace}/{self._name} changed {ATTEMPTS} times while reading it"
        )

    async def _load_once(self) -> Credentials:
        try:
            secret = await self._client.get(core_path(self._namespace, "secrets", self._name))
        except ApiError as error:
            if error.code != 404:
                raise
            return await self._create()
        found = read_secret(secret)
        complete = self._completed(found)
        if complete != found:
            body = {**secret, "data": {**(secret.get("data") or {}), **secret_data(complete)}}
            await self._client.replace(core_path(self._namespace, "secrets", self._name), body)
            log.info("updated the operator's Secret", extra=self._log_fields(complete))
        return complete

    async def _create(self) -> Credentials:
        """Create the Secret, with the contents that this process had read before it was deleted, if any."""
        if self._current is None and self._leader is not None and (holder := await self._leader()):
            raise ApiError(404, "NotFound", f"the Secret is gone: waiting for {holder}, which leads, to restore it")
        complete = self._completed(self._current)
        labels = {"app.kubernetes.io/name": "meshwright", "app.kubernetes.io/managed-by": "meshwright-operator"}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._name, "namespace": self._namespace, "labels": labels},
            "type": "Opaque",
            "data": secret_data(complete),
        }
        await self._client.create(core_path(self._namespace, "secrets"), body)
        log.info("created the operator's Secret", extra=self._log_fields(complete))
        return complete

    def _completed(self, found: Credentials | None) -> Credentials:
        credentials = found or self._current or Credentials(secrets.token_hex(KEY_BYTES).encode())
        if self._ca_lifetime is None:
            return credentials
        authorities = certificates.rotated(credentials.authorities, self._now(), self._ca_lifetime)
        return replace(credentials, authorities=authorities)

    def _log_fields(self, credentials: Credentials) -> dict[str, object]:
        return {"secret": f"{self._namespace}/{self._name}", "authorities": len(credentials.authorities)}


def _decode(where: str, entries: KubeObject, name: str) -> bytes:
    try:
        return base64.b64decode(entries.get(name) or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise CredentialsError(f"`{name}` of {where} is not base64") from None
