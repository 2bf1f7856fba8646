"""`pods/proxy`: a GET that is forwarded to a port of a pod, as kube-apiserver does it. Other methods are not served.

The pods of an embedded cluster have loopback addresses, to which a real API server does not forward.
"""

from __future__ import annotations

import contextlib

import aiohttp
from aiohttp import web

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.status_errors import ApiError, bad_request

SUBRESOURCE = "proxy"
_DEFAULT_PORT = "80"
_TIMEOUT = aiohttp.ClientTimeout(total=30, connect=5)
_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")


def pod_of(name: str) -> str:
    """The name of the pod in `[SCHEME:]NAME[:PORT]`."""
    return _parts(name)[1]


async def forward(request: web.Request, pod: KubeObject, name: str) -> web.StreamResponse:
    """Forward a GET to a port of the pod.

    Args:
        request: its path ends with `/proxy` and the path on the pod.
        pod: the pod.
        name: `[SCHEME:]NAME[:PORT]` of the request.

    Raises:
        ApiError: the pod has no address, or does not answer.
    """
    scheme, _, port = _parts(name)
    if not port.isdecimal():
        raise bad_request(f"the port of {name} is not a number: ports of pods have no names here")
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        raise bad_request("address not allowed")
    rest = request.path.partition(f"/{name}/{SUBRESOURCE}")[2]
    url = f"{scheme}://{address}:{port}{rest or '/'}"
    headers = {key: request.headers[key] for key in _HEADERS if key in request.headers}
    try:
        # A separate session: the pod must not get the caller's credentials.
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False) as session,
            session.get(url, params=list(request.query.items()), headers=headers) as upstream,
        ):
            kept = {
                key: upstream.headers[key] for key in ("Content-Type", "Content-Encoding") if key in upstream.headers
            }
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            with contextlib.suppress(ConnectionResetError):
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"error trying to reach service: {error}"
        raise ApiError(503, "ServiceUnavailable", text) from None


def _parts(name: str) -> tuple[str, str, str]:
    parts = name.split(":")
    if len(parts) == 3:
        return parts[0] or "http", parts[1], parts[2] or _DEFAULT_PORT
    return "http", parts[0], parts[1] if len(parts) == 2 and parts[1] else _DEFAULT_PORT
