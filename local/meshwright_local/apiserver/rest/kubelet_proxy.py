"""Logs, exec, attach and port-forward: forwarded to the node agent of the pod, as kube-apiserver forwards them to a
kubelet.

The node object has the agent's address (an address of type InternalIP and `daemonEndpoints.kubeletEndpoint`). The
server authenticates with its kubelet token and trusts only certificates of its own authority.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import aiohttp
from aiohttp import web

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.status_errors import ApiError, bad_request
from meshwright_local.apiserver.store import Store

NODES = ("", "nodes")
EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
PORT_FORWARD_PROTOCOL = "SPDY/3.1+portforward.k8s.io"
DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_CONNECT_SECONDS = 5.0
_LOG_PARAMETERS = ("follow", "tailLines", "sinceSeconds", "sinceTime", "timestamps", "limitBytes", "previous")
_EXEC_PARAMETERS = ("command", "stdin", "stdout", "stderr", "tty")
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound"}
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, TimeoutError)


class KubeletProxy:
    """Connections to node agents. `token` authenticates this server to them."""

    def __init__(self, store: Store, token: str, context: ssl.SSLContext) -> None:
        self._store = store
        self._token = token
        self._context = context
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def logs(self, request: web.Request, pod: KubeObject) -> web.StreamResponse:
        """Stream a container's log, which is empty if the pod has no node yet. Raises ApiError."""
        container = _container(pod, request.query.get("container", ""))
        if not pod["spec"].get("nodeName"):
            return web.Response(status=204)
        query = [(key, request.query[key]) for key in _LOG_PARAMETERS if key in request.query]
        url = self._url(pod, "containerLogs", container)
        try:
            async with self._client().get(url, params=query, ssl=self._context) as upstream:
                if upstream.status != 200:
                    raise _failure(upstream.status, await upstream.text())
                response = web.StreamResponse(headers={"Content-Type": "text/plain"})
                await response.prepare(request)
                with contextlib.suppress(ConnectionResetError):
                    async for chunk in upstream.content.iter_any():
                        await response.write(chunk)
                    await response.write_eof()
                return response
        except _UNREACHABLE as error:
            raise _unreachable(pod, error) from None

    async def stream(self, action: str, request: web.Request, pod: KubeObject) -> web.StreamResponse:
        """Forward the streams of `exec` or `attach` as WebSocket messages. Raises ApiError."""
        container = _container(pod, request.query.get("container", ""))
        if not pod["spec"].get("nodeName"):
            raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
        if not _is_websocket(request):
            # kubectl falls back to SPDY if the WebSocket failed, so the message names the likely cause.
            statuses = (pod.get("status") or {}).get("containerStatuses") or ()
            if any(s["name"] == container and (s.get("state") or {}).get("running") for s in statuses):
                raise bad_request("unable to upgrade: only WebSocket connections are served; SPDY is not")
            text = f'unable to upgrade connection: container not found ("{container}")'
            raise ApiError(500, "InternalError", text)
        if "*/*" not in request.headers.get("Accept", "*/*"):
            # As kubelets do with containerd: the streams are of no media type that could be asked for.
            raise ApiError(406, "NotAcceptable", "406: Not Acceptable")
        query = [(key, value) for key in _EXEC_PARAMETERS for value in request.query.getall(key, [])]
        return await self._forward(request, pod, self._url(pod, action, container), query)

    async def port_forward(self, request: web.Request, pod: KubeObject) -> web.StreamResponse:
        """Forward connections to ports of a pod. Raises ApiError."""
        if not pod["spec"].get("nodeName"):
            raise bad_request(f"pod {pod['metadata']['name']} does not have a host assigned")
        if not _is_websocket(request):
            raise bad_request("unable to upgrade: only WebSocket connections are served; SPDY is not")
        return await self._forward(request, pod, self._url(pod, "portForward"), [])

    async def _forward(
        self, request: web.Request, pod: KubeObject, url: str, query: list[tuple[str, str]]
    ) -> web.StreamResponse:
        offered = [p.strip() for p in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        protocols = [p for p in offered if p in (*EXEC_PROTOCOLS, PORT_FORWARD_PROTOCOL)]
        try:
            upstream = await self._client().ws_connect(
                url, params=query, protocols=protocols, ssl=self._context, max_msg_size=0
            )
        except aiohttp.WSServerHandshakeError as error:
            raise _failure(error.status, error.message) from None
        except _UNREACHABLE as error:
            raise _unreachable(pod, error) from None
        async with upstream:
            chosen = [upstream.protocol] if upstream.protocol else []
            client = web.WebSocketResponse(protocols=chosen, max_msg_size=0)
            await client.prepare(request)
            await _relay(client, upstream)
        return client

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
            headers = {"Authorization": f"Bearer {self._token}"}
            self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)
        return self._session

    def _url(self, pod: KubeObject, action: str, container: str = "") -> str:
        name = pod["spec"]["nodeName"]
        status = (self._store.find(NODES, "", name) or {}).get("status") or {}
        addresses = {a["type"]: a["address"] for a in status.get("addresses") or ()}
        port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
        address = addresses.get("InternalIP") or addresses.get("Hostname")
        if not address or not port:
            text = f'node "{name}" has no address and kubelet port; is its agent running?'
            raise ApiError(500, "InternalError", text)
        place = (action, pod["metadata"]["namespace"], pod["metadata"]["name"], container)
        return "/".join((f"https://{address}:{port}", *(part for part in place if part)))


def _is_websocket(request: web.Request) -> bool:
    return request.headers.get("Upgrade", "").lower() == "websocket"


async def _relay(client: web.WebSocketResponse, upstream: aiohttp.ClientWebSocketResponse) -> None:
    """Forward messages both ways until either side closes. Forward the close too."""

    async def up() -> None:
        async for message in client:
            await _pass_on(message, upstream)

    async def down() -> None:
        async for message in upstream:
            await _pass_on(message, client)
        await client.close(code=upstream.close_code or 1000)

    tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await upstream.close()
        await client.close()


async def _pass_on(message: aiohttp.WSMessage, target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse) -> None:
    if message.type is aiohttp.WSMsgType.BINARY:
        await target.send_bytes(message.data)
    elif message.type is aiohttp.WSMsgType.TEXT:
        await target.send_str(message.data)


def _container(pod: KubeObject, requested: str) -> str:
    """Return the container: the requested one, the default one of the pod's annotation, or the only one."""
    name, spec = pod["metadata"]["name"], pod["spec"]
    names = [c["name"] for c in spec["containers"]]
    requested = requested or (pod["metadata"].get("annotations") or {}).get(DEFAULT_CONTAINER, "")
    if not requested and len(names) > 1:
        raise bad_request(f"a container name must be specified for pod {name}, choose one of: {names}")
    others = (c["name"] for key in ("initContainers", "ephemeralContainers") for c in spec.get(key) or ())
    if requested and requested not in (*names, *others):
        raise bad_request(f"container {requested} is not valid for pod {name}")
    return requested or str(names[0])


def _failure(status: int, text: str) -> ApiError:
    return ApiError(status, _REASONS.get(status, "InternalError"), text.strip() or f"the node agent returned {status}")


def _unreachable(pod: KubeObject, error: BaseException) -> ApiError:
    text = f'the agent of node "{pod["spec"].get("nodeName")}" cannot be reached: {error}'
    return ApiError(500, "InternalError", text)
