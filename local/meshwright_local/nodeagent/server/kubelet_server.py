"""The HTTPS endpoints of a node's kubelet, by which an API server reads logs and runs commands.

`GET /containerLogs/{namespace}/{pod}/{container}`, `GET /exec/{namespace}/{pod}/{container}` (WebSocket), `/healthz`.
Callers authenticate with the cluster's kubelet token, or with a client certificate of the cluster's authority as a
kube-apiserver does: commands run as this user, so the port must not accept every user of the machine.
"""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.runtime.process import StartError
from meshwright_local.nodeagent.server import logs, port_forward, remote_attach, remote_exec


@dataclass(frozen=True, slots=True)
class KubeletTls:
    """Serving certificate and accepted credentials. `repr` shows no secret."""

    certificate: Path
    key: Path
    token: str
    client_ca: Path | None = None
    """Authority whose client certificates are accepted instead of the token."""

    def __repr__(self) -> str:
        return f"KubeletTls({str(self.certificate)!r})"

    def context(self) -> ssl.SSLContext:
        """Return the server's TLS settings."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


class NodePods(Protocol):
    """The pods of a node, as its agent knows them."""

    def find(self, namespace: str, name: str) -> KubeObject | None:
        """Return a pod of this node."""

    def container(self, pod: KubeObject, name: str) -> Container | None:
        """Return a container that was started."""

    def pod_directory(self, uid: str) -> Path:
        """Return the directory of a pod's files, such as its logs."""


class KubeletServer:
    """Serves one node on its own port. It can be started again after it was stopped."""

    def __init__(self, pods: NodePods, tls: KubeletTls) -> None:
        self._pods = pods
        self._tls = tls
        self._runner: web.AppRunner | None = None

    async def start(self, host: str) -> int:
        """Start serving. Return the port."""
        application = web.Application(middlewares=[self._authenticate])
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        application.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        application.router.add_get("/attach/{namespace}/{pod}/{container}", self._attach)
        application.router.add_get("/portForward/{namespace}/{pod}", self._port_forward)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0, ssl_context=self._tls.context()).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        certified = request.transport is not None and request.transport.get_extra_info("peercert")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = scheme == "Bearer" and hmac.compare_digest(token.encode(), self._tls.token.encode())
        if not certified and not known:
            raise web.HTTPUnauthorized(text="Unauthorized")
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        pod, name = self._pod(request), request.match_info["container"]
        try:
            options = logs.LogOptions.parse(request.query)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        container = self._pods.container(pod, name)
        directory = self._pods.pod_directory(pod["metadata"]["uid"]) / "logs" / name
        runs = sorted(directory.glob("*.log"), key=lambda path: int(path.stem))
        if options.previous:
            runs = runs[:-1]
        if not runs and options.previous:
            raise web.HTTPBadRequest(text=f'previous terminated container "{name}" not found')
        if not runs and container is None:
            raise web.HTTPNotFound(text=f'container "{name}" has no log on this node')
        if not runs and not options.follow:
            raise web.HTTPBadRequest(text=f'container "{name}" is waiting to start')
        path = runs[-1] if runs else directory / "0.log"
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        async for text in logs.stream(path, options, lambda: not container or container.log != path or container.over):
            await response.write(text)
        await response.write_eof()
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod, name = self._pod(request), request.match_info["container"]
        container = self._pods.container(pod, name)
        if container is None:
            raise web.HTTPNotFound(text=f'container "{name}" is not running on this node')
        command_line = request.query.getall("command", [])
        if not command_line:
            raise web.HTTPBadRequest(text="command: must have at least one element")
        try:
            return await remote_exec.serve(request, container, command_line)
        except StartError as error:
            raise web.HTTPInternalServerError(text=f"error executing command in container: {error}") from error

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        pod, name = self._pod(request), request.match_info["container"]
        container = self._pods.container(pod, name)
        if container is None:
            raise web.HTTPNotFound(text=f'container "{name}" is not running on this node')
        try:
            return await remote_attach.serve(request, container)
        except StartError as error:
            raise web.HTTPInternalServerError(text=f"error attaching to container: {error}") from error

    async def _port_forward(self, request: web.Request) -> web.StreamResponse:
        return await port_forward.serve(request, self._pod(request))

    def _pod(self, request: web.Request) -> KubeObject:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        pod = self._pods.find(namespace, name)
        if pod is None:
            raise web.HTTPNotFound(text=f'pod "{namespace}/{name}" is not on this node')
        return pod
