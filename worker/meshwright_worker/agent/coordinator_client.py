"""The agent's side of the protocol with the operator's coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar

import aiohttp

from meshwright.api.base import ApiModel
from meshwright.protocol import signing
from meshwright.protocol.messages import (
    MeshDocument,
    MeshRequest,
    ReportReply,
    TrustBundle,
    TrustRequest,
    WorkerReport,
    parse_mesh_document,
    parse_message,
)
from meshwright.protocol.versions import VERSION_HEADER, supported
from meshwright_worker.agent.coordinator_trust import BundleError, CoordinatorTrust, unverified_context
from meshwright_worker.agent.settings import Settings

# Added to the coordinator's maximum poll time, for the response to travel.
ANSWER_SECONDS = 10.0
LONGEST_RETRY_AFTER = 60.0
MAX_ANSWER_BYTES = 16 << 20
"""Longest answer that is read. The mesh document of 65,536 workers has about 8 MB."""
READ_BYTES = 64 << 10
HEADERS = {"Content-Type": "application/json", VERSION_HEADER: supported()}

Model = TypeVar("Model", bound=ApiModel)
Request = WorkerReport | MeshRequest | TrustRequest

log = logging.getLogger(__name__)


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


class CertificateRejectedError(UnavailableError):
    """The coordinator's certificate does not come from a CA that this agent trusts, has expired, or has other names."""


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
        self._trust = CoordinatorTrust(settings.coordinator_ca)
        self._server_name = settings.coordinator_name or None
        self._session: aiohttp.ClientSession | None = None
        self.answered = asyncio.Event()
        """Set once the coordinator has answered a request."""
        self.clock_skew: float | None = None
        """Seconds that this clock is ahead of the coordinator's, as of the first answer with a time."""

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
        reply = _parse(ReportReply, body)
        if self._trust.differs(reply.trust):
            # Early: the certificate changes only after agents had time to ask. A later report asks again.
            with contextlib.suppress(UnavailableError, SupersededError, RejectedError, IncompatibleError):
                await self._renew_trust(self._trust.context)
        return reply

    async def _post(self, endpoint: str, message: WorkerReport | MeshRequest, seconds: float) -> bytes | None:
        """Send a request. If the coordinator's certificate is rejected, ask for its current CAs, and try again."""
        try:
            return await self._exchange(endpoint, message, seconds, self._trust.context)
        except CertificateRejectedError as rejected:
            try:
                renewed = self._trust.pinned and await self._renew_trust(unverified_context())
            except (RejectedError, IncompatibleError) as error:
                # Anyone can send these without the token, so over this connection they must not stop the agent.
                raise CertificateRejectedError(f"{rejected}; no signed CA bundle: {error}") from None
            if not renewed:
                raise
        return await self._exchange(endpoint, message, seconds, self._trust.context)

    async def _renew_trust(self, context: ssl.SSLContext | bool) -> bool:
        """Replace the CA bundle by that of the coordinator. Return whether it was another one.

        The connection may be unverified: nothing in the request is secret, and only who knows the job's token can sign
        the response to it.

        Raises:
            SupersededError, RejectedError, IncompatibleError, UnavailableError: see each class.
        """
        body = await self._exchange("trust", TrustRequest(), ANSWER_SECONDS, context)
        try:
            renewed = self._trust.replace(_parse(TrustBundle, body or b"").certificates)
        except BundleError as error:
            raise UnavailableError(f"the coordinator's CA bundle: {error}") from None
        if renewed:
            log.info("the coordinator has a new CA bundle; this agent uses it from now on")
        return renewed

    async def _exchange(
        self, endpoint: str, message: Request, seconds: float, context: ssl.SSLContext | bool
    ) -> bytes | None:
        """Send a request, and once more if it was signed for another session of the coordinator."""
        try:
            return await self._send(endpoint, message, seconds, context)
        except _OtherSessionError:
            pass  # the coordinator has restarted, or this is the first request
        try:
            return await self._send(endpoint, message, seconds, context)
        except _OtherSessionError as error:
            raise UnavailableError(str(error)) from None

    async def _send(
        self, endpoint: str, message: Request, seconds: float, context: ssl.SSLContext | bool
    ) -> bytes | None:
        if self._session is None:
            raise RuntimeError("the client is used outside its context")
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=ANSWER_SECONDS)
        sent = json.dumps(message.wire(), separators=(",", ":")).encode()
        headers = self._signer.request("POST", f"{self._path}/{endpoint}", sent)
        url = f"{self._base}{self._path}/{endpoint}"
        try:
            async with self._session.post(
                url,
                data=sent,
                headers={**HEADERS, **headers},
                timeout=limit,
                allow_redirects=False,
                ssl=context,
                server_hostname=self._server_name,
            ) as response:
                body = await _read(response)
        except aiohttp.ClientConnectorCertificateError as error:
            raise CertificateRejectedError(f"certificate rejected: {error.certificate_error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        return self._handle_response(f"{response.status} from {url}", response.status, headers, response.headers, body)

    def _compare_clocks(self, date: str) -> None:
        """Note the difference of the clocks. The header has whole seconds, so half a second is added."""
        if self.clock_skew is None and date:
            with contextlib.suppress(ValueError, TypeError):
                self.clock_skew = time.time() - (parsedate_to_datetime(date).timestamp() + 0.5)
        self.answered.set()

    def _handle_response(
        self, source: str, status: int, sent: Mapping[str, str], received: Mapping[str, str], body: bytes
    ) -> bytes | None:
        """Return the body of a successful response. Only a signed response may start, stop or delay anything."""
        if status in (200, 204, 409, 410):
            self._verify_signature(source, status, sent, received, body)
            self._compare_clocks(received.get("Date", ""))
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


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body, which is verified only afterwards.

    Raises:
        aiohttp.ClientPayloadError: it is longer than any message.
    """
    body = bytearray()
    async for part in response.content.iter_chunked(READ_BYTES):
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


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
