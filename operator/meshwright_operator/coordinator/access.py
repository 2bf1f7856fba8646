"""What agents need to reach the coordinator and trust it: its URL, the key of their tokens, and its certificate.

Every replica serves agents over TLS, so each reads the Secret before it serves, or creates it, whether it leads or not.
The Secret is therefore not subject to the write fence. Its resourceVersion keeps replicas from overwriting each other.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

from kubernetes.aio.client import Configuration

from meshwright.addresses import join_host_port
from meshwright_operator.coordinator.credentials import CredentialsError, CredentialsStore
from meshwright_operator.coordinator.running_leader import RunningLeader
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tls import CertificateFiles, CertificateSource, CoordinatorTls, ManagedCertificates
from meshwright_operator.coordinator.tokens import Tokens, load_key
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.manifests.worker_pod import CoordinatorTrust
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.settings import Settings

FIRST_RETRY_SECONDS = 2.0
SECRET_CHECK_SECONDS = 15.0
"""Time between two looks at the Secret, so that it is restored soon after somebody deleted it."""

log = logging.getLogger(__name__)


class CoordinatorAccess:
    """Prepares the coordinator's key and certificates, and keeps the certificates current.

    Raises:
        KeyFileError: The key file cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        tokens: Tokens,
        coordinator: Coordinator,
        metrics: OperatorMetrics,
    ) -> None:
        self._settings = settings
        self._client = KubeClient(configuration, metrics, max_in_flight=1)
        self._tokens = tokens
        self._coordinator = coordinator
        self._url = settings.coordinator_url or ""
        self._bundle = ""
        self._prepared = False
        managed = settings.tls == "managed"
        ca_lifetime = timedelta(days=settings.tls_ca_days)
        leader = RunningLeader(self._client, settings.lease_namespace, settings.lease_name, settings.identity)
        self._store = CredentialsStore(
            self._client,
            settings.lease_namespace,
            settings.credentials_secret,
            ca_lifetime if managed else None,
            leader=leader.name,
        )
        self._file_key = load_key(settings.key_file) if settings.key_file is not None else None
        self._uses_secret = managed or self._file_key is None
        self._tls: CoordinatorTls | None = None
        if settings.tls != "disabled":
            self._tls = CoordinatorTls(self._source(ca_lifetime), self._server_name(), metrics, self._publish)

    @property
    def url(self) -> str:
        """URL at which agents reach the coordinator."""
        return self._url

    @property
    def trust(self) -> CoordinatorTrust:
        """How agents of new pods verify the coordinator."""
        return CoordinatorTrust(self._bundle, self._settings.tls_server_name if self._bundle else "")

    @property
    def context(self) -> ssl.SSLContext | None:
        """The context to serve with; None without TLS."""
        return self._tls.context if self._tls is not None else None

    @property
    def prepared(self) -> bool:
        """Whether the key and the certificate are there."""
        return self._prepared

    async def prepare(self, failed: Callable[[], None] = lambda: None) -> None:
        """Read or create the key and the certificate. Retries while the API server does not answer.

        Args:
            failed: Called after each attempt that failed.

        Raises:
            CredentialsError: The Secret or a file cannot be used.
        """
        while True:
            try:
                self._tokens.use(self._file_key or (await self._store.load()).key)
                if self._tls is not None:
                    await self._tls.refresh()
                self._prepared = True
                return
            except ApiError as error:
                name = f"{self._settings.lease_namespace}/{self._settings.credentials_secret}"
                failed()
                log.warning("cannot read or create the operator's Secret", extra={"secret": name, "error": str(error)})
                await asyncio.sleep(FIRST_RETRY_SECONDS)

    def serving(self, port: int) -> None:
        """Record the port on which the coordinator listens, for the URL."""
        scheme = "http" if self._tls is None else "https"
        address = join_host_port(self._settings.coordinator_listen.host, port)
        self._url = self._settings.coordinator_url or f"{scheme}://{address}"

    async def run(self) -> None:
        """Renew certificates, and restore the Secret if somebody deletes it, until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._tls is not None:
                group.create_task(self._tls.run(), name="renewal")
            if self._uses_secret:
                group.create_task(self._keep_secret(), name="secret")

    async def _keep_secret(self) -> None:
        """Look at the Secret until cancelled. A replica that starts without it would make a key that no agent has."""
        while True:
            await asyncio.sleep(SECRET_CHECK_SECONDS)
            try:
                await self._store.load()
            except (ApiError, CredentialsError) as error:
                log.warning("cannot read or restore the operator's Secret", extra={"error": str(error)})

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()

    def _source(self, ca_lifetime: timedelta) -> CertificateSource:
        given = self._settings
        if given.tls == "files":
            assert given.tls_cert_file is not None
            assert given.tls_key_file is not None
            assert given.tls_ca_file is not None
            return CertificateFiles(given.tls_cert_file, given.tls_key_file, given.tls_ca_file)
        host = self._host()
        return ManagedCertificates(self._store, [name for name in (host, *given.tls_names) if name], ca_lifetime)

    def _server_name(self) -> str:
        return self._settings.tls_server_name or self._host()

    def _host(self) -> str:
        """The host in the coordinator's URL."""
        if self._settings.coordinator_url is None:
            return self._settings.coordinator_listen.host
        return urlsplit(self._settings.coordinator_url).hostname or ""

    def _publish(self, bundle: str) -> None:
        self._bundle = bundle
        self._coordinator.trust(bundle)
