"""A small asynchronous Kubernetes API client for raw dictionaries, without generated code.

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

from meshwright.api.objects import KubeObject
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.resources import Resource

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_WATCH_SECONDS = 290
_PAGE = "500"


class ApiError(Exception):
    """A response with code 400 or more. `reason` is that of the Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @classmethod
    def of(cls, status: int, content: bytes) -> ApiError:
        """Create it from a response body. A body that is not a Status object becomes the message."""
        try:
            body = orjson.loads(content)
            return cls(status, body.get("reason", ""), body.get("message", ""))
        except (orjson.JSONDecodeError, AttributeError):
            return cls(status, "", content.decode(errors="replace")[:500])


REQUEST_ERRORS = (ApiError, aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions of a request that are not bugs of the caller."""


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A consistent list: all items, and the revision to watch from."""

    items: list[KubeObject]
    resource_version: str


class ApiClient:
    """Requests to one API server over a shared pool of connections.

    Every method raises ApiError for an error response, and aiohttp.ClientError or TimeoutError if the server is
    unavailable.
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
        """Send one request. Return the decoded JSON response, or the text of a response that is not JSON."""
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": content_type}
        url = self.connection.url + path
        async with self.session.request(
            method, url, params=params, data=data, headers=headers, timeout=self._timeout
        ) as response:
            content = await response.read()
            if response.status >= 400:
                raise ApiError.of(response.status, content)
            return orjson.loads(content) if "json" in response.content_type else content.decode()

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> KubeObject:
        """Return one object."""
        answer: KubeObject = await self.request("GET", resource.path(namespace, name))
        return answer

    async def find(self, resource: Resource, name: str, namespace: str | None = None) -> KubeObject | None:
        """Return one object, or None if it does not exist."""
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
        """Return all matching objects, fetched in pages. Adds the kind and apiVersion that list items lack."""
        params = _params(labelSelector=label_selector, fieldSelector=field_selector, limit=_PAGE)
        items: list[KubeObject] = []
        while True:
            page = await self.request("GET", resource.path(namespace), params=params)
            for item in page.get("items") or ():
                items.append({**item, "kind": resource.kind, "apiVersion": resource.api_version})
            continue_token = page["metadata"].get("continue")
            if not continue_token:
                return ObjectList(items, page["metadata"].get("resourceVersion", ""))
            params["continue"] = continue_token

    async def create(self, resource: Resource, body: KubeObject, namespace: str | None = None) -> KubeObject:
        """Create an object, in the namespace of its metadata unless `namespace` is given."""
        space = namespace or (body.get("metadata") or {}).get("namespace")
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        answer: KubeObject = await self.request("POST", resource.path(space), body=full)
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
    ) -> KubeObject:
        """Patch an object or its subresource."""
        path = resource.path(namespace, name, subresource)
        answer: KubeObject = await self.request("PATCH", path, body=body, content_type=content_type)
        return answer

    async def set_condition(self, resource: Resource, item: KubeObject, condition: KubeObject) -> None:
        """Merge one condition into the status of exactly this object (409 if a new object has its name)."""
        metadata = item["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [condition]}}
        space = metadata.get("namespace")
        kind = STRATEGIC_PATCH
        await self.patch(resource, metadata["name"], body, space, subresource="status", content_type=kind)

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
        """Delete an object. Return False if it did not exist or, with `uid`, only another object has that name."""
        options: KubeObject = {"apiVersion": "v1", "kind": "DeleteOptions"}
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

    async def watch(
        self,
        resource: Resource,
        resource_version: str,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
    ) -> AsyncIterator[KubeObject]:
        """Yield watch events `{type, object}` after a revision, until the server ends the stream.

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
            event: KubeObject = orjson.loads(line)
            if event["type"] == "ERROR":
                raise ApiError.of(event["object"].get("code", 500), orjson.dumps(event["object"]))
            yield event

    async def lines(
        self, path: str, params: Mapping[str, str] | None = None, *, idle: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed response, such as a watch or a pod's log, without line ends.

        Lines may be of any length, which aiohttp's own line reader does not allow.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=idle)
        async with self.session.get(self.connection.url + path, params=params, timeout=timeout) as response:
            if response.status >= 400:
                raise ApiError.of(response.status, await response.read())
            rest = b""
            async for chunk in response.content.iter_any():
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    yield line
            if rest:
                yield rest

    async def resources(self) -> dict[Resource, frozenset[str]]:
        """Return every served resource with its verbs, each group in its preferred version, without subresources."""
        versions = [("", "v1")]
        for group in (await self.request("GET", "/apis")).get("groups") or ():
            versions.append((group["name"], group["preferredVersion"]["version"]))
        found: dict[Resource, frozenset[str]] = {}
        for group, version in versions:
            try:
                answer = await self.request("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
            except ApiError as error:
                # The last definition of a group was deleted between the two requests, or an aggregated server is down.
                if error.status in (404, 503):
                    continue
                raise
            for item in answer.get("resources") or ():
                if "/" not in item["name"]:
                    resource = Resource(group, version, item["name"], item["kind"], bool(item["namespaced"]))
                    found[resource] = frozenset(item.get("verbs") or ())
        return found

    async def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until the server is ready. Raises TimeoutError if it takes too long."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await self.request("GET", "/readyz")
                    return
                except REQUEST_ERRORS:
                    await asyncio.sleep(0.02)


def _params(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
