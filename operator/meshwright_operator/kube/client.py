"""The client of the API server. Calls have a timeout and a concurrency limit, back off when the server asks, and are
counted in metrics.

Objects are raw JSON, because typed models of thousands of pods block the event loop for seconds. The operator's role
allows exactly the verbs used here: jobs get/list/watch/delete, and patch of their `/status`; pods
get/list/watch/create/patch/delete; services create/get; secrets create (the operator neither reads nor changes them);
events create/patch; leases get/create/update; nodes list/watch.

Calls about leases skip the concurrency limit and the backoff, because leadership must not depend on other traffic. All
other writes check the fence. Calls about events have a limit and a backoff of their own, because no job may wait for
events: API servers limit their rate separately (admission plugin EventRateLimit), and may store them elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from meshwright.api.labels import FIELD_MANAGER
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.paths import LEASES, is_safe, resource_of
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.text import shortened

PAGE_SIZE = 500
IDENTITY_ENCODING = "identity"
"""No compression: inside a cluster the network costs less than the API server's time to compress each page."""
EVENTS = "events"
EVENTS_IN_FLIGHT = 8
"""Concurrent calls about events."""
ATTEMPTS = 4
RETRIED_CODES = (429, 503)
KEEP_ALIVE_SECONDS = 75.0
"""Idle time after which a connection is closed. The API server closes it after 90 s."""
REFRESH_SECONDS = 60.0
"""Time between two requests on connections that are kept open."""
CHEAP_PATH = "/version"
"""Answered from memory, and allowed to everybody."""
REASON_LIMIT = 64
MESSAGE_LIMIT = 600
"""Length of an error's message: webhooks answer with any text, and it gets into conditions and events."""
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0

log = logging.getLogger(__name__)


class ApiError(Exception):
    """The API server answered with an error, or could not be reached (code 0)."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds from the server's `Retry-After` header; None without one."""


class FencedError(ApiError):
    """The write was not sent, because this process may no longer be the leader."""

    def __init__(self, verb: str, path: str) -> None:
        super().__init__(0, "Fenced", f"{verb} {path}: not sent, because another operator may hold the lease")


class _Lane:
    """Calls that share a concurrency limit and a backoff."""

    def __init__(self, most: int) -> None:
        self.in_flight = asyncio.Semaphore(most)
        self.backoff_until = 0.0

    async def wait_for_backoff(self) -> None:
        """Wait for as long as the server asked."""
        seconds_left = self.backoff_until - time.monotonic()
        if seconds_left > 0:
            await asyncio.sleep(seconds_left)

    def back_off(self, error: ApiError, delay: float) -> None:
        """Delay all calls for as long as the server asked, or for `delay`, because the server is overloaded."""
        seconds = min(error.retry_after if error.retry_after is not None else delay, LONGEST_RETRY_SECONDS)
        until = time.monotonic() + seconds * random.uniform(1.0, 1.1)
        if until > self.backoff_until:
            self.backoff_until = until
            log.info(
                "API server is overloaded; delaying requests", extra={"code": error.code, "seconds": round(seconds, 1)}
            )


class Page(NamedTuple):
    """One page of a collection, and the resourceVersion of the collection, which all its pages have in common."""

    items: list[KubeObject]
    version: str


class _Connections(RESTClientObject):
    """The client's connections. They stay open between the starts of jobs: a new one costs as much as three calls."""

    def _create_connector(self) -> aiohttp.TCPConnector:
        return aiohttp.TCPConnector(limit=self.maxsize, ssl=self.ssl_context, keepalive_timeout=KEEP_ALIVE_SECONDS)

    async def send(
        self,
        verb: str,
        url: str,
        headers: Mapping[str, str],
        data: bytes | None,
        timeout_options: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request whose body is encoded already."""
        if self.pool_manager is None:
            self.pool_manager = self._create_pool_manager()
        options = {
            "server_hostname": self.configuration.tls_server_name,
            "proxy": self.proxy,
            "proxy_headers": self.proxy_headers,
        }
        given: dict[str, Any] = {name: value for name, value in options.items() if value}
        return await self.pool_manager.request(verb, url, headers=headers, data=data, timeout=timeout_options, **given)


class KubeClient:
    """Calls to the API server. Bodies and answers are plain dicts.

    Args:
        configuration: The server's address and the credentials.
        metrics: Counts the calls.
        fence: Limits writes; None for no limit.
        max_in_flight: Number of concurrent calls, without those about events.
        timeout: Seconds for one call.
        on_create: Called with the resource and the seconds of every object that was created, except leases and events.
    """

    def __init__(
        self,
        configuration: Configuration,
        metrics: OperatorMetrics,
        fence: Fence | None = None,
        *,
        max_in_flight: int = 32,
        timeout: float = 30.0,
        on_create: Callable[[str, float], None] = lambda resource, seconds: None,
    ) -> None:
        self._configuration = configuration
        self._metrics = metrics
        self._fence = fence
        self._connections = _Connections(configuration)
        self._max_in_flight = max_in_flight
        self._lane, self._event_lane = _Lane(max_in_flight), _Lane(EVENTS_IN_FLIGHT)
        self._timeout = timeout
        self._on_create = on_create

    async def close(self) -> None:
        """Closes all connections."""
        await self._connections.close()

    async def keep_connections(self) -> None:
        """Keep a connection open for each concurrent call, until cancelled.

        The pods of a gang are created all at once. The handshakes of new connections would take as long as the pods.
        """
        while True:
            if time.monotonic() >= self._lane.backoff_until:
                await asyncio.gather(*(self._refresh_connection() for _ in range(self._max_in_flight)))
            await asyncio.sleep(REFRESH_SECONDS)

    async def _refresh_connection(self) -> None:
        """Use a connection that is idle, or open one. Whatever the server answers, it stays open."""
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with (
                self._lane.in_flight,
                await self._open("GET", CHEAP_PATH, None, "application/json", timeout) as answer,
            ):
                await answer.read()

    async def get(self, path: str) -> KubeObject:
        """Get one object.

        Raises:
            ApiError: As every call of this class.
        """
        return await self._call("GET", path)

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        """List a collection, page by page. The list is consistent and includes everything written before the call.

        The API server prepares the next page while the caller reads one.
        """

        def request(token: str) -> asyncio.Task[KubeObject]:
            return asyncio.create_task(
                self._call("GET", path, {**query, "limit": str(PAGE_SIZE), "continue": token}), name=f"page of {path}"
            )

        token, requested = "", request("")
        try:
            while True:
                answer = await requested
                if "items" not in answer:
                    raise ApiError(0, "InvalidResponse", f"GET {path}: the response is not a list")
                metadata = answer.get("metadata") or {}
                if token := metadata.get("continue") or "":
                    requested = request(token)
                yield Page(answer["items"] or [], str(metadata.get("resourceVersion") or ""))
                if not token:
                    return
        finally:
            requested.cancel()
            requested.add_done_callback(_ignore_result)

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], idle: float) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a streaming GET, such as a watch. It does not count toward the concurrency limit.

        Raises:
            ApiError: The server answered with an error, the connection broke, or nothing arrived for `idle` seconds.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=idle)
        try:
            async with await self._open(
                "GET", f"{path}?{urlencode(query)}", None, "application/json", timeout
            ) as response:
                if response.status != 200:
                    _decode_response(response.status, await response.read(), response.headers)
                yield response.content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "Unreachable", f"GET {path}: {error or type(error).__name__}") from None

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        """POST to a collection."""
        return await self._call("POST", path, {"fieldManager": FIELD_MANAGER}, body)

    async def replace(self, path: str, body: KubeObject) -> KubeObject:
        """PUT, with the object's resourceVersion as precondition."""
        return await self._call("PUT", path, {"fieldManager": FIELD_MANAGER}, body)

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        """JSON merge patch (RFC 7386); `metadata.resourceVersion` or `uid` in it is a precondition."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("PATCH", path, query, body, "application/merge-patch+json")

    async def delete(self, path: str, uid: str, version: str = "") -> KubeObject | None:
        """Delete the object with this uid, with its own grace period. With `version`, only if that is its version.

        Returns:
            The server's answer. None if there is no object with this uid any more, or if it changes at the same time.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, **({"resourceVersion": version} if version else {})},
            "propagationPolicy": "Background",
        }
        try:
            return await self._call("DELETE", path, None, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            return None

    async def _call(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: KubeObject | None = None,
        content_type: str = "application/json",
    ) -> KubeObject:
        if not is_safe(path):
            raise ApiError(404, "NotFound", f"{resource_of(path)}: no object can have this name")
        present = {k: v for k, v in (query or {}).items() if v}
        url = path + (f"?{urlencode(present)}" if present else "")
        if path.startswith(LEASES):
            return await self._send(verb, path, url, body, content_type, self._timeout)
        lane = self._event_lane if resource_of(path) == EVENTS else self._lane
        delay = FIRST_RETRY_SECONDS
        for attempt in range(ATTEMPTS):
            try:
                async with lane.in_flight:
                    await lane.wait_for_backoff()
                    return await self._send(verb, path, url, body, content_type, self._timeout_for(verb, path))
            except ApiError as error:
                if error.code not in RETRIED_CODES or attempt == ATTEMPTS - 1:
                    raise
                lane.back_off(error, delay)
                delay *= 2
        raise AssertionError("unreachable")

    def _timeout_for(self, verb: str, path: str) -> float:
        """Seconds that the call may take."""
        if verb == "GET" or self._fence is None:
            return self._timeout
        seconds_left = self._fence.seconds_left()
        if seconds_left <= 0:
            raise FencedError(verb, path)
        return min(self._timeout, seconds_left)

    async def _send(
        self, verb: str, path: str, url: str, body: KubeObject | None, content_type: str, seconds: float
    ) -> KubeObject:
        code, started = 0, time.monotonic()
        try:
            async with await self._open(
                verb, url, body, content_type, aiohttp.ClientTimeout(total=seconds)
            ) as response:
                code = response.status
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "Unreachable", f"{verb} {path}: {error or type(error).__name__}") from None
        finally:
            resource, took = resource_of(path), time.monotonic() - started
            self._metrics.api_requests.labels(verb, resource, str(code)).inc()
            self._metrics.api_request_seconds.labels(verb, resource).observe(took)
            if code == 201 and verb == "POST" and not path.startswith(LEASES) and resource != EVENTS:
                self._on_create(resource, took)
        return _decode_response(code, data, response.headers)

    async def _open(
        self, verb: str, url: str, body: KubeObject | None, content_type: str, timeout_options: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": IDENTITY_ENCODING,
            "Content-Type": content_type,
            "User-Agent": FIELD_MANAGER,
        }
        token = await self._configuration.get_api_key_with_prefix("BearerToken")
        if token:
            headers["Authorization"] = token
        data = _encode(body) if body is not None else None
        return await self._connections.send(verb, self._configuration.host + url, headers, data, timeout_options)


def _ignore_result(call: asyncio.Task[KubeObject]) -> None:
    """Nobody reads a page that was requested before the list ended: its error must not be reported as forgotten."""
    if not call.cancelled():
        call.exception()


def _encode(body: KubeObject) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # text that is not valid Unicode, or a number of more than 64 bits
        return json.dumps(body).encode()


def _decode_response(code: int, data: bytes, headers: Mapping[str, str]) -> KubeObject:
    try:
        answer = orjson.loads(data)
    except json.JSONDecodeError:
        answer = None
    succeeded = 200 <= code < 300
    if not isinstance(answer, dict):
        text = shortened(data[:MESSAGE_LIMIT].decode(errors="replace"), MESSAGE_LIMIT)
        if succeeded:  # from a proxy: it must not count as a list without items
            raise ApiError(0, "InvalidResponse", f"the response with code {code} is not a JSON object: {text}")
        answer = {"message": text}
    if not succeeded:
        retry_after = _retry_after(headers.get("Retry-After", ""), headers.get("Date", ""))
        reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
        raise ApiError(code, reason[:REASON_LIMIT], shortened(message, MESSAGE_LIMIT), retry_after)
    return answer


def _retry_after(text: str, now: str) -> float | None:
    """Seconds in a Retry-After header (RFC 9110, section 10.2.3), which is a number of seconds or a date.

    A date counts from that of the response, because the clocks of server and operator may differ.
    """
    if text.isascii() and text.isdigit():
        return float(text)
    moment = _http_date(text)
    if moment is None:
        return None
    return max(0.0, (moment - (_http_date(now) or datetime.now(UTC))).total_seconds())


def _http_date(text: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC)
