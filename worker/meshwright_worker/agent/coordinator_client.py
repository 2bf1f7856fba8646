"""The agent's side of the protocol with the operator's coordinator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

import aiohttp

from meshwright.api.base import ApiModel
from meshwright.protocol import signing
from meshwright.protocol.messages import (
    MeshDocument,
    MeshRequest,
    ReportReply,
    WorkerReport,
    parse_mesh_document,
    parse_message,
)
from meshwright.protocol.versions import VERSION_HEADER, supported
from meshwright_worker.agent.settings import Settings

# Added to the coordinator's maximum poll time, for the response to travel.
ANSWER_SECONDS = 10.0
LONGEST_RETRY_AFTER = 60.0
HEADERS = {"Content-Type": "application/json", VERSION_HEADER: supported()}

Model = TypeVar("Model", bound=ApiModel)


class SupersededError(Exception):
    """410: a newer incarnation of this worker exists, or the job does not need this pod."""


class RejectedError(Exception):
    """401 or 404: the coordinator does not know this token or this job."""


class IncompatibleError(Exception):
    """426: the coordinator does not speak this agent's version of the protocol."""


class UnavailableError(Exception):
    """The coordinator cannot be reached, is overloaded, or its response is invalid or not signed correctly. Retry."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds to wait before the next request."""


class _OtherSessionError(Exception):
    """409: the signer now follows the coordinator's session and counter. Send the request again."""


class CoordinatorClient:
    """Typed calls of the coordinator. The token signs requests; it is never sent, nor part of an exception's
    message.
    """

    def __init__(self, settings: Settings) -> None:
        self._base = settings.coordinator_url
        self._path = f"/v1/jobs/{settings.namespace}/{settings.job}/{settings.uid}"
        sender = signing.Sender(settings.worker, settings.incarnation, settings.pod_uid)
        self._signer = signing.Signer(settings.token, sender)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CoordinatorClient:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def mesh(self, request: MeshRequest) -> MeshDocument | None:
        """Poll for a mesh newer than `request.generation`; None if the poll timed out.

        Raises:
            SupersededError, RejectedError, IncompatibleError, UnavailableError: see each class.
        """
        body = await self._post("mesh", request, request.wait_seconds + ANSWER_SECONDS)
        if body is None:
            return None
        try:
            return parse_mesh_document(body)
        except ValueError as error:
            raise UnavailableError(f"cannot read the coordinator's MeshDocument: {error}") from error

    async def report(self, report: WorkerReport, seconds: float = ANSWER_SECONDS) -> ReportReply:
        """Send a heartbeat, with a timeout of `seconds`.

        Raises:
            SupersededError, RejectedError, IncompatibleError, UnavailableError: see each class.
        """
        body = await self._post("report", report, seconds)
        if body is None:
            raise UnavailableError("the coordinator answered a report with 204")
        return _parse(ReportReply, body)

    async def _post(self, endpoint: str, message: WorkerReport | MeshRequest, seconds: float) -> bytes | None:
        try:
            return await self._send(endpoint, message, seconds)
        except _OtherSessionError:
            pass  # the coordinator has restarted, or this is the first request
        try:
            return await self._send(endpoint, message, seconds)
        except _OtherSessionError as error:
            raise UnavailableError(str(error)) from None

    async def _send(self, endpoint: str, message: WorkerReport | MeshRequest, seconds: float) -> bytes | None:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=ANSWER_SECONDS)
        sent = json.dumps(message.wire(), separators=(",", ":")).encode()
        headers = self._signer.request("POST", f"{self._path}/{endpoint}", sent)
        url = f"{self._base}{self._path}/{endpoint}"
        try:
            async with self._session.post(
                url, data=sent, headers={**HEADERS, **headers}, timeout=limit, allow_redirects=False
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        return self._handle_response(f"{response.status} from {url}", response.status, headers, response.headers, body)

    def _handle_response(
        self, source: str, status: int, sent: Mapping[str, str], received: Mapping[str, str], body: bytes
    ) -> bytes | None:
        """Return the body of a successful response. Only a signed response may start, stop or delay anything."""
        if status in (200, 204, 409, 410):
            self._verify_signature(source, status, sent, received, body)
        match status:
            case 200:
                return body
            case 204:
                return None
            case 410:
                raise SupersededError
            case 409:
                self._follow_session(source, received)
                raise _OtherSessionError(f"{source}: {_text(body)}")
            case 401 | 404:
                raise RejectedError(f"{source}: {_text(body)}")
            case 426:
                raise IncompatibleError(f"{source}: {_text(body)}")
            case _:
                raise UnavailableError(f"{source}: {_text(body)}", _retry_after(received))

    def _verify_signature(
        self, source: str, status: int, sent: Mapping[str, str], received: Mapping[str, str], body: bytes
    ) -> None:
        try:
            self._signer.check_answer(sent, status, received, body)
        except signing.SignatureError as error:
            raise UnavailableError(f"{source}: {error}") from None

    def _follow_session(self, source: str, received: Mapping[str, str]) -> None:
        """Sign the next requests for the coordinator's session."""
        try:
            self._signer.follow(received)
        except signing.SignatureError as error:
            raise UnavailableError(f"{source}: {error}") from None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait before the next request; 0 if the response does not contain a valid number."""
    text = headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER) if text.isascii() and text.isdigit() else 0.0


def _text(body: bytes) -> str:
    return body[:200].decode(errors="replace")


def _parse(model: type[Model], body: bytes) -> Model:
    try:
        return parse_message(model, body)
    except ValueError as error:
        raise UnavailableError(f"cannot read the coordinator's {model.__name__}: {error}") from error
