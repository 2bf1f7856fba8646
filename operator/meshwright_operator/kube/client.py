"""The API server, as raw JSON: every call bounded in time and number, counted, and patient when the server asks for it.

Raw because typed models of thousands of pods block the event loop for seconds. The verbs used here, and no others, are
what the operator's role allows: jobs get/list/watch/delete, their `/status` patch; pods get/list/watch/create/patch/
delete; services and secrets create/patch (server-side apply; neither is ever read); events create/patch; leases
get/create/update; nodes list/watch.

Calls about leases go first: they wait for no slot and for no patience, since leadership must not hang on traffic. Every
other write checks the fence.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from meshwright.api.labels import FIELD_MANAGER
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.paths import LEASES, resource_of
from meshwright_operator.metrics.operator_metrics import OperatorMetrics

PAGE_SIZE = 500
IDENTITY_ENCODING = "identity"
"""Inside of a cluster the network is cheaper than the API server's time for compressing every page of a list."""
ATTEMPTS = 4
RETRIED_CODES = (429, 503)
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 60.0

log = logging.getLogger(__name__)


class ApiError(Exception):
    """The API server refused, or could not be reached (code 0)."""

    def __init__(self, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds after which the server wants to be asked again; None when it did not say."""


class FencedError(ApiError):
    """The write was not sent: this process may not be the leader any more."""

    def __init__(self, verb: str, path: str) -> None:
        super().__init__(0, "Fenced", f"{verb} {path}: not sent, since the lease may be another operator's by now")


class Page(NamedTuple):
    """Part of a collection, and the version of the collection that all its pages show."""

    items: list[KubeObject]
    version: str


class KubeClient:
    """Calls to the API server. Bodies and answers are plain dicts.

    Args:
        configuration: where the server is and as whom to ask.
        metrics: counts the calls.
        fence: bounds writes; None: they are not bounded.
        max_in_flight: calls at the same time.
        timeout: seconds of one call.
    """

    def __init__(
        self,
        configuration: Configuration,
        metrics: OperatorMetrics,
        fence: Fence | None = None,
        *,
        max_in_flight: int = 32,
        timeout: float = 30.0,
    ) -> None:
        self._configuration = configuration
        self._metrics = metrics
        self._fence = fence
        self._rest = RESTClientObject(configuration)
        self._slots = asyncio.Semaphore(max_in_flight)
        self._timeout = timeout
        self._backoff_until = 0.0

    async def close(self) -> None:
        """Closes all connections."""
        await self._rest.close()

    async def get(self, path: str) -> KubeObject:
        """One object.

        Raises:
            ApiError: as every call here.
        """
        return await self._call("GET", path)

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        """A collection, page by page, read consistently: all that was written before the call is in it."""
        token = ""
        while True:
            answer = await self._call("GET", path, {**query, "limit": str(PAGE_SIZE), "continue": token})
            metadata = answer.get("metadata") or {}
            yield Page(answer.get("items") or [], str(metadata.get("resourceVersion") or ""))
            token = metadata.get("continue") or ""
            if not token:
                return

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], idle: float) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of a GET that goes on, such as a watch. It holds no slot.

        Raises:
            ApiError: refused; broken off; or nothing came for `idle` seconds.
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

    async def apply(self, path: str, body: KubeObject) -> KubeObject:
        """Server-side apply: makes the object or brings the operator's fields of it in line."""
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._call("PATCH", path, query, body, "application/apply-patch+yaml")

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        """JSON merge patch (RFC 7386); `metadata.resourceVersion` or `uid` in it is a precondition."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call("PATCH", path, query, body, "application/merge-patch+json")

    async def delete(self, path: str, uid: str) -> None:
        """Deletes that very object, with its own grace period; one that is gone already is fine."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._call("DELETE", path, None, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    async def _call(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: KubeObject | None = None,
        content_type: str = "application/json",
    ) -> KubeObject:
        present = {k: v for k, v in (query or {}).items() if v}
        url = path + (f"?{urlencode(present)}" if present else "")
        if path.startswith(LEASES):
            return await self._send(verb, path, url, body, content_type, self._timeout)
        delay = FIRST_RETRY_SECONDS
        for attempt in range(ATTEMPTS):
            try:
                async with self._slots:
                    await self._wait_for_backoff()
                    return await self._send(verb, path, url, body, content_type, self._timeout_for(verb, path))
            except ApiError as error:
                if error.code not in RETRIED_CODES or attempt == ATTEMPTS - 1:
                    raise
                self._back_off(error, delay)
                delay *= 2
        raise AssertionError("unreachable")

    def _timeout_for(self, verb: str, path: str) -> float:
        """Seconds that the call may last."""
        if verb == "GET" or self._fence is None:
            return self._timeout
        seconds_left = self._fence.seconds_left()
        if seconds_left <= 0:
            raise FencedError(verb, path)
        return min(self._timeout, seconds_left)

    def _back_off(self, error: ApiError, delay: float) -> None:
        """Keeps every call back for as long as the server asked, or for `delay`: it is the server that is too busy."""
        seconds = min(error.retry_after if error.retry_after is not None else delay, LONGEST_RETRY_SECONDS)
        until = time.monotonic() + seconds * random.uniform(1.0, 1.1)
        if until > self._backoff_until:
            self._backoff_until = until
            log.info("the API server asks for patience", extra={"code": error.code, "seconds": round(seconds, 1)})

    async def _wait_for_backoff(self) -> None:
        seconds_left = self._backoff_until - time.monotonic()
        if seconds_left > 0:
            await asyncio.sleep(seconds_left)

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
            resource = resource_of(path)
            self._metrics.api_requests.labels(verb, resource, str(code)).inc()
            self._metrics.api_request_seconds.labels(verb, resource).observe(time.monotonic() - started)
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
        answer = await self._rest.request(  # type: ignore[no-untyped-call]
            verb, self._configuration.host + url, headers=headers, body=body, _request_timeout=timeout_options
        )
        response: aiohttp.ClientResponse = answer.response
        return response


def _decode_response(code: int, data: bytes, headers: Mapping[str, str]) -> KubeObject:
    try:
        answer = orjson.loads(data) if data else {}
    except json.JSONDecodeError:
        answer = {"message": data[:200].decode(errors="replace")}
    if not isinstance(answer, dict):
        answer = {}
    if not 200 <= code < 300:
        retry_after = _retry_after(headers.get("Retry-After", ""))
        raise ApiError(code, str(answer.get("reason", "")), str(answer.get("message", "")), retry_after)
    return answer


def _retry_after(text: str) -> float | None:
    """Seconds in a Retry-After header (RFC 9110, 10.2.3), which is a number of seconds or a date."""
    if text.isdigit():
        return float(text)
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
