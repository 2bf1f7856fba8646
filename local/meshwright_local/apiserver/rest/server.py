"""The API server: start and stop.

It always serves TLS: client libraries send no token over plain HTTP, and without authentication every user of the
machine could run commands as this user.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from aiohttp import web

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.auth import certificates
from meshwright_local.apiserver.auth.certificates import Authority, TlsFiles
from meshwright_local.apiserver.auth.identity import RBAC, Authenticator, Authorizer, User, admin, initial_roles
from meshwright_local.apiserver.query_options import WriteOptions
from meshwright_local.apiserver.registry.builtin_kinds import PERMANENT_NAMESPACES
from meshwright_local.apiserver.registry.discovery import Registry
from meshwright_local.apiserver.registry.objects import NAMESPACES, Objects
from meshwright_local.apiserver.rest.chaos import Chaos
from meshwright_local.apiserver.rest.handlers import DELETES_PER_TURN, Handlers
from meshwright_local.apiserver.rest.kubelet_proxy import KubeletProxy
from meshwright_local.apiserver.rest.request_bodies import MAX_BODY_BYTES
from meshwright_local.apiserver.rest.router import Routes
from meshwright_local.apiserver.store import Store
from meshwright_local.kube import timestamps
from meshwright_local.kube.kubeconfig import write_private

EVENTS = ("", "events")
EVENT_LIFETIME = datetime.timedelta(hours=1)
_SWEEP_SECONDS = 60.0
_SHUTDOWN_SECONDS = 1.0


class ApiServer:
    """An API server.

    Args:
        directory: directory of objects, keys and the token; None stores everything in memory.
        token: the administrator's bearer token; by default created, and stored in `directory`.
        kubelet_token: token that the server sends to node agents; by default created.
        tls: certificate to serve with; by default issued by a new authority.
        users: additional static tokens and their users.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        token: str | None = None,
        kubelet_token: str | None = None,
        tls: TlsFiles | None = None,
        users: Mapping[str, User] | None = None,
    ) -> None:
        self._directory = directory
        self._tls = tls
        self._users = dict(users or {})
        self.token = token or self._secret("admin.token")
        """The administrator's bearer token."""
        self.kubelet_token = kubelet_token or self._secret("kubelet.token")
        """The token that node agents accept from this server."""
        self.authority: Authority | None = None if tls else self._load_authority()
        """The authority of serving certificates, such as those of node agents; None if `tls` was given."""
        self.ca_pem = tls.authority.read_text() if tls else self.authority.pem if self.authority else ""
        """The certificate that clients must trust."""
        self.url = ""
        """URL of the server, once started."""
        self.chaos = Chaos()
        """Fault injection."""
        self._store: Store | None = None
        self._routes: Routes | None = None
        self._kubelet: KubeletProxy | None = None
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start serving; port 0 selects a free port.

        Raises:
            StoreInUseError: another server uses the directory.
            OSError: the port is taken.
        """
        self._store = Store(self._directory)
        try:
            self._routes = self._assemble(self._store)
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._routes.handle)
            self._runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
            )
            await self._runner.setup()
            await web.TCPSite(self._runner, host, port, ssl_context=self._context(host)).start()
            address, bound = self._runner.addresses[0][:2]
        except BaseException:
            await self.stop()
            raise
        self.url = f"https://{'127.0.0.1' if address == '0.0.0.0' else address}:{bound}"  # noqa: S104 - not a bind

    async def stop(self) -> None:
        """Stop serving. All acknowledged writes are in the store; open watches end."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._routes is not None:
            self._routes.cancel_all()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._kubelet is not None:
            await self._kubelet.close()
        if self._store is not None:
            self._store.close()
        self._routes = self._runner = self._kubelet = self._store = self._sweeper = None

    def _assemble(self, store: Store) -> Routes:
        registry = Registry()
        objects = Objects(store, registry)
        _populate(objects)
        self._sweeper = asyncio.create_task(_sweep_events(objects))

        def has_account(namespace: str, name: str, uid: str) -> bool:
            account = store.find(("", "serviceaccounts"), namespace, name)
            return account is not None and account["metadata"]["uid"] == uid

        key = self._secret("service-account.key").encode()
        authenticator = Authenticator({**self._users, self.token: admin()}, key, has_account)
        self._kubelet = KubeletProxy(store, self.kubelet_token, certificates.client_context(self.ca_pem))
        handlers = Handlers(store, objects, authenticator, self._kubelet, self.chaos)
        return Routes(registry, handlers, authenticator, Authorizer(store), self.chaos)

    def _secret(self, name: str) -> str:
        """Return a random secret. With a directory it is the same after each start."""
        if self._directory is None:
            return secrets.token_urlsafe(32)
        path = self._directory / name
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32))
        return path.read_text().strip()

    def _load_authority(self) -> Authority:
        if self._directory is None:
            return certificates.create_authority()
        return certificates.load_authority(self._directory / "pki")

    def _context(self, host: str) -> ssl.SSLContext:
        if self.authority is not None:
            names = dict.fromkeys([*certificates.LOCAL_NAMES, host])
            return certificates.server_context(*self.authority.issue("kube-apiserver", names))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if self._tls is not None:
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        return context


def _populate(objects: Objects) -> None:
    """Create the objects that every cluster has from the start, if they do not exist."""
    wanted = [(NAMESPACES, {"metadata": {"name": name}}) for name in PERMANENT_NAMESPACES]
    wanted += [((RBAC, plural), obj) for plural, obj in initial_roles()]
    for key, obj in wanted:
        if objects.store.find(key, "", obj["metadata"]["name"]) is None:
            objects.create(objects.registry.builtin(key), "", obj, WriteOptions("kube-apiserver"))


def expired_events(events: Iterator[KubeObject], now: datetime.datetime) -> list[KubeObject]:
    """Return the events that were not updated for an hour, which a real server deletes too."""
    return [event for event in events if now - _last_touched(event, now) > EVENT_LIFETIME]


def _last_touched(event: KubeObject, now: datetime.datetime) -> datetime.datetime:
    series, created = event.get("series") or {}, event["metadata"].get("creationTimestamp")
    moments = [series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), created]
    return max((timestamps.parse(moment) for moment in moments if moment), default=now)


async def _sweep_events(objects: Objects) -> None:
    resource = objects.registry.builtin(EVENTS)
    while True:
        now = datetime.datetime.now(datetime.UTC)
        for index, event in enumerate(expired_events(objects.store.all(EVENTS), now)):
            metadata = event["metadata"]
            if objects.store.find(EVENTS, metadata["namespace"], metadata["name"]) is not None:
                objects.delete(resource, event, {})
            if index % DELETES_PER_TURN == DELETES_PER_TURN - 1:
                await asyncio.sleep(0)
        await asyncio.sleep(_SWEEP_SECONDS)
