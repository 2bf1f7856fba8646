"""Requests to one API server, with errors that name what was asked and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_cli.client.errors import (
    DefinitionMissingError,
    ForbiddenError,
    MeshwrightError,
    NotFoundError,
    RejectedError,
    UnauthorizedError,
    UnreachableError,
)
from meshwright_cli.client.kubeconfig import Connection
from meshwright_cli.client.proxies import environment_proxy

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

_ANYTHING = {"Accept": "*/*"}
"""kube-apiserver answers a WebSocket's request for JSON alone with 406."""
EXEC_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")

_PAGE = "500"
_CONNECT_SECONDS = 10.0
_WATCH_SECONDS = 280
_PING_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object that an API server stores."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`group/version`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """`plural.group`, as roles name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of a collection (without `namespace`: of all namespaces), an object or a subresource.

        Raises:
            NotFoundError: `name` or `namespace` cannot be a name. Without a name, as from an unset variable of a
                shell, the path would be that of the collection, and DELETE would delete every object in it.
        """
        for text in (name, namespace or None):
            if text is not None and (text in ("", ".", "..") or not set(text).isdisjoint("/%?#")):
                raise NotFoundError(f"`{text}` is not the name of an object")
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])


JOBS = Kind(labels.GROUP, labels.VERSION, labels.PLURAL, labels.KIND)
PODS = Kind("", "v1", "pods", "Pod")
EVENTS = Kind("", "v1", "events", "Event")
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)


@dataclass(frozen=True, slots=True)
class Action:
    """What a request does, in the words of roles, for messages."""

    verb: str
    kind: Kind | None = None
    namespace: str | None = None
    name: str = ""
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The resource as roles name it, with its subresource."""
        if self.kind is None:
            return ""
        plural, _, group = self.kind.resource.partition(".")
        return f"{plural}{f'/{self.subresource}' if self.subresource else ''}{f'.{group}' if group else ''}"

    def __str__(self) -> str:
        where = f" in namespace `{self.namespace}`" if self.namespace else ""
        return f"{self.verb} {self.resource}{f' `{self.name}`' if self.name else ''}{where}".strip()


class ApiServer:
    """Requests over a shared pool of connections. Belongs to one event loop."""

    def __init__(self, connection: Connection, *, timeout: float = 30.0) -> None:
        self.connection = connection
        self._timeout = aiohttp.ClientTimeout(total=timeout, connect=min(timeout, _CONNECT_SECONDS))
        self._session: aiohttp.ClientSession | None = None
        self._pem: str | None = None

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        action: Action,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """Send a request. Returns the decoded JSON response, or the text of a response that is not JSON.

        Raises:
            MeshwrightError: one of its subclasses, by cause.
        """
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": content_type}
        try:
            session, more = await self._prepared()
            url = self.connection.url + path
            async with session.request(
                method, url, params=params, data=data, headers=headers, timeout=self._timeout, **more
            ) as response:
                content = await response.read()
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise self._error(response.status, content, action)
                return json.loads(content) if "json" in response.content_type else content.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def lines(
        self, path: str, action: Action, params: Mapping[str, str] | None = None, *, idle: float | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the lines of a streamed response, such as a watch or a log, without line ends.

        Args:
            path: URL path.
            action: for messages.
            params: query.
            idle: seconds without data after which the stream ends with an error. None: unlimited.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=idle)
        try:
            session, more = await self._prepared()
            url = self.connection.url + path
            async with session.get(url, params=params, timeout=timeout, **more) as response:
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise self._error(response.status, await response.read(), action)
                rest = b""
                async for chunk in response.content.iter_any():
                    *complete, rest = (rest + chunk).split(b"\n")
                    for line in complete:
                        yield line
                if rest:
                    yield rest
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def messages(
        self, path: str, action: Action, params: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> AsyncIterator[bytes]:
        """Yield the binary messages that a WebSocket receives until the server closes it."""
        try:
            session, more = await self._prepared()
            url = self.connection.url + path
            connecting = session.ws_connect(
                url, params=params, protocols=protocols, max_msg_size=0, headers=_ANYTHING, **more
            )
            async with connecting as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        yield message.data
        except aiohttp.WSServerHandshakeError as error:
            content = json.dumps({"message": f"cannot {action}: HTTP status {error.status}"}).encode()
            if error.status == HTTPStatus.FORBIDDEN:
                text = f"you may not {action}: ask an administrator for a role that allows it"
                raise ForbiddenError(text, action.verb, action.resource, action.namespace) from error
            raise self._error(error.status, content, action) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> KubeObject:
        """One object.

        Raises:
            NotFoundError: it does not exist.
        """
        action = Action("get", kind, namespace if kind.namespaced else None, name)
        found: KubeObject = await self.request("GET", kind.path(namespace, name), action)
        return found

    async def find(self, kind: Kind, name: str, namespace: str | None = None) -> KubeObject | None:
        """One object, or None if it, or its kind, does not exist."""
        try:
            return await self.get(kind, name, namespace)
        except (NotFoundError, DefinitionMissingError):
            return None

    async def collect(
        self, kind: Kind, namespace: str | None = None, *, selector: str = "", fields: str = ""
    ) -> tuple[list[KubeObject], str]:
        """All matching objects, fetched in pages, and the revision to watch from."""
        params = {"limit": _PAGE}
        params |= {"labelSelector": selector} if selector else {}
        params |= {"fieldSelector": fields} if fields else {}
        items: list[KubeObject] = []
        action = Action("list", kind, namespace if kind.namespaced else None)
        while True:
            page = await self.request("GET", kind.path(namespace), action, params=params)
            items += [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page.get("items") or ()]
            if not (token := page["metadata"].get("continue")):
                return items, str(page["metadata"].get("resourceVersion") or "")
            params["continue"] = token

    async def watch(
        self, kind: Kind, revision: str, namespace: str | None = None, *, fields: str = "", selector: str = ""
    ) -> AsyncIterator[tuple[str, KubeObject]]:
        """Yield type and object of every event after a revision, until the server ends the stream.

        Raises:
            RejectedError: status 410 if the revision is too old: list again.
        """
        params = {"watch": "true", "resourceVersion": revision, "timeoutSeconds": str(_WATCH_SECONDS)}
        params |= {"fieldSelector": fields} if fields else {}
        params |= {"labelSelector": selector} if selector else {}
        action = Action("watch", kind, namespace if kind.namespaced else None)
        async for line in self.lines(kind.path(namespace), action, params, idle=_WATCH_SECONDS + 30):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise self._error(int(event["object"].get("code") or 500), json.dumps(event["object"]).encode(), action)
            yield event["type"], event["object"]

    @contextlib.asynccontextmanager
    async def exec(
        self, namespace: str, pod: str, command: Sequence[str]
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Run a command in a pod's only container: a WebSocket with the streams of `v5.channel.k8s.io`.

        Raises:
            ForbiddenError: the user may not create `pods/exec`.
            RejectedError: the container does not run, or cannot run the command.
        """
        action = Action("create", PODS, namespace, pod, "exec")
        query = [("command", word) for word in command] + [("stdout", "true"), ("stderr", "true")]
        try:
            session, more = await self._prepared()
            url = self.connection.url + PODS.path(namespace, pod, "exec")
            async with session.ws_connect(
                url,
                params=query,
                protocols=EXEC_PROTOCOLS,
                max_msg_size=0,
                heartbeat=_PING_SECONDS,
                headers=_ANYTHING,
                **more,
            ) as socket:
                yield socket
        except aiohttp.WSServerHandshakeError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                raise ForbiddenError(
                    f"you may not {action}: ask an administrator for a role that allows `get` and `create` on "
                    f"`{action.resource}`", action.verb, action.resource, namespace,
                ) from error  # fmt: skip
            raise RejectedError(f"cannot {action}: HTTP status {error.status} {error.message}", error.status) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    async def _prepared(self) -> tuple[aiohttp.ClientSession, dict[str, Any]]:
        """The session, and the arguments of each request that depend on the connection."""
        credential = await self.connection.credentials.current()
        if self._session is not None and credential.client_pem != self._pem:
            await self.close()  # a plugin issued another client certificate
        if self._session is None:
            context = self.connection.ssl_context(credential.client_pem)
            self._pem = credential.client_pem
            headers = [("User-Agent", "meshwright-cli"), ("Accept", "application/json"), *self.connection.headers]
            # Not `trust_env`: kubectl uses no passwords of ~/.netrc, and knows more forms of NO_PROXY.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=context or False), headers=headers
            )
        more: dict[str, Any] = {}
        if credential.authorization:
            self._session.headers["Authorization"] = credential.authorization
        if proxy := self.connection.proxy or environment_proxy(self.connection.url):
            more["proxy"] = proxy
        if self.connection.server_name:
            more["server_hostname"] = self.connection.server_name
        return self._session, more

    def _error(self, status: int, content: bytes, action: Action) -> MeshwrightError:
        reason, message, named = _read_status(content)
        if status == HTTPStatus.UNAUTHORIZED:
            self.connection.credentials.forget()
            return UnauthorizedError(
                f"{self.connection.where} does not accept your credentials: log in again, or choose another context "
                "with --context"
            )
        if status == HTTPStatus.FORBIDDEN and reason != "Invalid" and action.kind is not None and _is_rbac(message):
            return ForbiddenError(
                f"you may not {action}: ask an administrator for a role that allows `{action.verb}` on "
                f"`{action.resource}`. The API server says: {message}",
                action.verb,
                action.resource,
                action.namespace,
            )
        if status == HTTPStatus.NOT_FOUND:
            if action.kind is JOBS and not named:
                return DefinitionMissingError(missing_definition(self.connection.where))
            return NotFoundError(message or f"cannot {action}: not found")
        return RejectedError(message or f"cannot {action}: HTTP status {status}", status, reason)

    def _unreachable(self, error: Exception) -> UnreachableError:
        return UnreachableError(f"{self.connection.where} cannot be reached: {_cause(error)}. {_advice(error)}")


def missing_definition(where: str) -> str:
    """The message for a cluster without the CustomResourceDefinition."""
    return (
        f"{where} has no `{labels.DEFINITION}`: Meshwright is not installed there. Install the chart, or only the "
        "definition with `meshwright crd | kubectl apply --server-side -f -`"
    )


def _read_status(content: bytes) -> tuple[str, str, bool]:
    """Reason and message of a Status object, and whether it is about a named object."""
    try:
        status = json.loads(content)
        details = status.get("details") or {}
        return str(status.get("reason") or ""), str(status.get("message") or ""), bool(details.get("name"))
    except (ValueError, AttributeError):
        return "", content.decode(errors="replace").strip()[:500], False


def _is_rbac(message: str) -> bool:
    """Whether a 403 is about the user's roles, and not an admission rule about the object."""
    return "cannot" in message and " is forbidden: User " in message


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "it does not answer"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error.strerror or error.os_error)
    return str(error) or type(error).__name__


def _advice(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError | aiohttp.ClientConnectorCertificateError):
        return "Check `certificate-authority` of the cluster in the kubeconfig file"
    return "Check that the cluster runs, and that this is the right context: `kubectl config get-contexts`"
