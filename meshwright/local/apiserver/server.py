"""The API server as one thing to start and stop.

It always serves TLS: client libraries send no token over plain HTTP, and a port that anyone on the machine may use
would let them run commands as this user.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from meshwright.local.apiserver import certificates
from meshwright.local.apiserver.api import Api
from meshwright.local.apiserver.bodies import MAX_BODY_BYTES
from meshwright.local.apiserver.certificates import Authority, TlsFiles
from meshwright.local.apiserver.definitions import Definitions
from meshwright.local.apiserver.deleting import Deleting
from meshwright.local.apiserver.expiry import sweep_events
from meshwright.local.apiserver.identity import Authenticator, User, admin
from meshwright.local.apiserver.kinds.core import PERMANENT_NAMESPACES
from meshwright.local.apiserver.kubelet import KubeletProxy
from meshwright.local.apiserver.options import WriteOptions
from meshwright.local.apiserver.rbac import GROUP, Authorizer, initial_roles
from meshwright.local.apiserver.registry import Registry
from meshwright.local.apiserver.requests import ResourceRequests
from meshwright.local.apiserver.store import ResourceKey, Store
from meshwright.local.apiserver.subresources import Subresources
from meshwright.local.apiserver.writing import Writing

_SHUTDOWN_SECONDS = 1.0
_SYSTEM = "kube-apiserver"


class ApiServer:
    """An API server.

    Args:
        directory: where objects, keys and the token are kept; None keeps everything in memory.
        token: the administrator's bearer token; made when left out, and kept in `directory`.
        kubelet_token: what the server presents to node agents; made when left out.
        tls: certificate to serve with; made from an own authority when left out.
        users: further static tokens and whom they stand for.
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
        """What node agents accept from this server."""
        self.authority: Authority | None = None if tls else self._load_authority()
        """Signs serving certificates, such as those of node agents; None when `tls` was given."""
        self.ca_pem = tls.authority.read_text() if tls else self.authority.pem if self.authority else ""
        """The certificate that clients must trust."""
        self.url = ""
        """Where the server listens, once started."""
        self._store: Store | None = None
        self._api: Api | None = None
        self._kubelet: KubeletProxy | None = None
        self._runner: web.AppRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Begin to serve; port 0 takes a free one.

        Raises:
            StoreInUseError: another server holds the directory.
            OSError: the port is taken.
        """
        self._store = Store(self._directory)
        try:
            self._api = self._assemble(self._store)
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{path:.*}", self._api.handle)
            self._runner = web.AppRunner(
                app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
            )
            await self._runner.setup()
            site = web.TCPSite(self._runner, host, port, ssl_context=self._context(host))
            await site.start()
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
        if self._api is not None:
            self._api.cancel_all()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._kubelet is not None:
            await self._kubelet.close()
        if self._store is not None:
            self._store.close()
        self._api = self._runner = self._kubelet = self._store = self._sweeper = None

    def _assemble(self, store: Store) -> Api:
        registry = Registry()
        definitions = Definitions(store, registry)
        writing = Writing(store, definitions.after_write)
        deleting = Deleting(store, definitions.after_write)
        definitions.attach(writing, deleting)
        _populate(registry, writing)
        events = registry.get("", "v1", "events")
        if events is not None:
            self._sweeper = asyncio.create_task(sweep_events(events, writing, deleting))
        authenticator = Authenticator(
            {**self._users, self.token: admin()},
            self._secret("service-account.key").encode(),
            lambda namespace, name, uid: _has_account(writing, namespace, name, uid),
        )
        self._kubelet = KubeletProxy(writing, self.kubelet_token, certificates.client_context(self.ca_pem))
        subresources = Subresources(store, registry, writing, deleting)
        requests = ResourceRequests(store, writing, deleting, definitions, subresources, authenticator, self._kubelet)
        return Api(registry, requests, authenticator, Authorizer(writing))

    def _secret(self, name: str) -> str:
        """A random secret, the same after each start when there is a directory to keep it in."""
        if self._directory is None:
            return secrets.token_urlsafe(32)
        path = self._directory / name
        if not path.exists():
            certificates.write_private(path, secrets.token_urlsafe(32))
        return path.read_text().strip()

    def _load_authority(self) -> Authority:
        if self._directory is None:
            return certificates.create_authority()
        return certificates.load_authority(self._directory / "pki")

    def _context(self, host: str) -> ssl.SSLContext:
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
            return context
        if self.authority is None:
            raise RuntimeError("a server without given certificates has an authority")
        names = dict.fromkeys([*certificates.LOCAL_NAMES, host])
        return certificates.server_context(*self.authority.issue("kube-apiserver", names))


def _has_account(writing: Writing, namespace: str, name: str, uid: str) -> bool:
    account = writing.find(("", "serviceaccounts"), namespace, name)
    return account is not None and account["metadata"]["uid"] == uid


def _populate(registry: Registry, writing: Writing) -> None:
    """Create what every cluster has from the start and this one lacks."""
    wanted: list[tuple[ResourceKey, dict[str, Any]]] = [
        (("", "namespaces"), {"metadata": {"name": name}}) for name in PERMANENT_NAMESPACES
    ]
    wanted += [((GROUP, plural), obj) for plural, obj in initial_roles()]
    for key, obj in wanted:
        _create_if_missing(registry, writing, key, obj)


def _create_if_missing(registry: Registry, writing: Writing, key: ResourceKey, obj: dict[str, Any]) -> None:
    resource = registry.get(key[0], "v1", key[1])
    if resource is None or writing.find(key, "", obj["metadata"]["name"]) is not None:
        return
    writing.create(resource, "", obj, WriteOptions(_SYSTEM, True, False, "Strict", False))
