"""A small asynchronous Kubernetes API client: raw dictionaries in and out, nothing generated.

The scheduler, the controllers and the node agents of the embedded cluster use it and nothing else, so they work against
any API server. The official client is not used here: its models cost more than the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import orjson

from meshwright.local.connection import Connection
from meshwright.local.resources import PODS, Object, Resource

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_WATCH_SECONDS = 290
_PAGE = 500


class ApiError(Exception):
    """An answer of 400 or more. `reason` is the machine-readable one of the Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A consistent list: every item, and the revision to watch from."""

    items: list[Object]
    resource_version: str


class ApiClient:
    """Requests to one API server over a shared pool of connections.

    Every method raises ApiError for an error answer, aiohttp.ClientError or TimeoutError when the server is away.
    """

    def __init__(self, connection: Connection, *, user_agent: str = "meshwright-local", timeout: float = 30.0) -> None:
        self.connection = connection
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._headers = {"User-Agent": user_agent, "Accept": "application/json"}
        if connection.token:
            self._headers["Authorization"] = f"Bearer {connection.token}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session, opened on first use because it belongs to the running event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self.connection.ssl_context() or False)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """One request; the decoded JSON answer."""
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": content_type}
        async with self.session.request(
            method, self.connection.url + path, params=params, data=data, headers=headers, timeout=self._timeout
        ) as response:
            content = await response.read()
            if response.status >= 400:
                raise _error(response.status, content)
            return orjson.loads(content) if content else {}

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """One object."""
        answer: Object = await self.request("GET", resource.path(namespace, name))
        return answer

    async def find(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None when there is none."""
        try:
            return await self.get(resource, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> ObjectList:
        """Every matching object, fetched in pages. Items get the kind and apiVersion that lists leave out."""
        params = _params(labelSelector=label_selector, fieldSelector=field_selector, limit=str(_PAGE))
        items: list[Object] = []
        while True:
            page = await self.request("GET", resource.path(namespace), params=params)
            for item in page.get("items") or ():
                items.append({**item, "kind": resource.kind, "apiVersion": resource.api_version})
            proceed = page["metadata"].get("continue")
            if not proceed:
                return ObjectList(items, page["metadata"].get("resourceVersion", ""))
            params["continue"] = proceed

    async def create(self, resource: Resource, body: Object, namespace: str | None = None) -> Object:
        """Create an object; the namespace is the body's own unless given."""
        space = namespace or (body.get("metadata") or {}).get("namespace")
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        answer: Object = await self.request("POST", resource.path(space), body=full)
        return answer

    async def replace(self, resource: Resource, body: Object, subresource: str | None = None) -> Object:
        """PUT an object that was read before; a conflict is ApiError 409."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        answer: Object = await self.request("PUT", path, body=body)
        return answer

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
        content_type: str = MERGE_PATCH,
    ) -> Object:
        """Patch an object or its subresource."""
        path = resource.path(namespace, name, subresource)
        answer: Object = await self.request("PATCH", path, body=body, content_type=content_type)
        return answer

    async def apply(
        self, resource: Resource, body: Object, *, field_manager: str, namespace: str | None = None, force: bool = True
    ) -> Object:
        """Server-side apply, as `kubectl apply --server-side` does."""
        metadata = body["metadata"]
        path = resource.path(namespace or metadata.get("namespace"), metadata["name"])
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        params = {"fieldManager": field_manager, "force": "true" if force else "false"}
        answer: Object = await self.request("PATCH", path, params=params, body=full, content_type=APPLY_PATCH)
        return answer

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        grace_seconds: int | None = None,
        propagation: str | None = None,
        uid: str | None = None,
    ) -> bool:
        """Delete an object; False when there was none, or (with `uid`) only another one of that name."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if propagation is not None:
            options["propagationPolicy"] = propagation
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self.request("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and uid is not None):
                return False
            raise
        return True

    async def bind(self, namespace: str, pod: str, node: str, *, uid: str | None = None) -> None:
        """Assign a pod to a node; ApiError 409 when it has one already."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod, "namespace": namespace, **({"uid": uid} if uid else {})},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self.request("POST", PODS.path(namespace, pod, "binding"), body=body)

    async def watch(
        self,
        resource: Resource,
        resource_version: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> AsyncIterator[Object]:
        """Watch events `{type, object}` after a revision, until the server ends the stream.

        Raises:
            ApiError: The stream carried an error; 410 means the revision is too old, so list again.
        """
        params = _params(
            watch="true",
            resourceVersion=resource_version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(_WATCH_SECONDS),
            labelSelector=label_selector,
            fieldSelector=field_selector,
        )
        async for line in self.lines(resource.path(namespace), params, idle=_WATCH_SECONDS + 30):
            event: Object = orjson.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
            yield event

    async def lines(
        self, path: str, params: Mapping[str, str] | None = None, *, idle: float | None = None
    ) -> AsyncIterator[bytes]:
        """The lines of a streamed answer, such as a watch or a pod's log, without their line ends.

        Lines may be of any length, which aiohttp's own line reader does not allow.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=idle)
        async with self.session.get(self.connection.url + path, params=params, timeout=timeout) as response:
            if response.status >= 400:
                raise _error(response.status, await response.read())
            rest = b""
            async for chunk in response.content.iter_any():
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    yield line
            if rest:
                yield rest

    async def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until the server says it is ready.

        Raises:
            TimeoutError: It did not within the time.
        """
        async with asyncio.timeout(seconds):
            while True:
                try:
                    async with self.session.get(self.connection.url + "/readyz", timeout=self._timeout) as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.05)


def _params(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _error(status: int, content: bytes) -> ApiError:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        body = {}
    return ApiError(status, body.get("reason", ""), body.get("message", content.decode(errors="replace")[:500]))
