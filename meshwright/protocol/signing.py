"""Signs requests to the coordinator and its responses. Both sides have the job's token, which is never sent.

TLS verifies the coordinator, but can be disabled, and an agent whose CAs are outdated asks for new ones over a
connection that it cannot verify. Anyone on the network path could then read and reuse a bearer token, and a forged mesh
document could run any command in a pod. A request therefore carries an HMAC-SHA256 with the token over its method,
path, sender, session, counter, and the length and digest of its body. All of these are headers, so that a receiver
checks the signature before it reads the body. The response carries an HMAC over the request's signature, its status,
session, counter and body.

Replay protection uses no clock, so that it survives any step of a clock. The receiver has a random session, which is
new when it restarts. It accepts a request only in its session, and only with a larger counter than the last one of the
same sender and endpoint. Otherwise its signed response names the session and the last counter, and the sender follows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

SCHEME = "Meshwright-HMAC-SHA256"
AUTHORIZATION = "Authorization"
LENGTH = "Content-Length"
DIGEST = "Meshwright-Digest"
"""Header of the body's SHA-256, in hexadecimal digits."""
SENDER = "Meshwright-Sender"
"""Header of the sender: worker, incarnation and pod uid, joined by dots."""
SESSION = "Meshwright-Session"
"""Header of the receiver's session. Absent from a sender's first request."""
COUNTER = "Meshwright-Counter"
"""Header of a request's number. In a response, that of the last accepted request of the same sender and endpoint."""
SIGNATURE = "Meshwright-Signature"
"""Header of a response's signature."""

MAX_COUNTER = (1 << 53) - 1
MAX_COUNTER_STEP = 1 << 20
"""How much larger a counter may be than the last one. So no request uses up the numbers of later ones."""
MAX_WORKER = 65535
MAX_INCARNATION = (1 << 31) - 1

_POD_UID = re.compile(r"[A-Za-z0-9-]{1,64}")
_SESSION = re.compile(r"[A-Za-z0-9_-]{0,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class SignatureError(Exception):
    """A message is not signed with the token. The error says what is wrong, but not the expected value."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The pod that sends a request."""

    worker: int
    incarnation: int
    pod_uid: str

    def __str__(self) -> str:
        return f"{self.worker}.{self.incarnation}.{self.pod_uid}"

    @classmethod
    def parse(cls, text: str) -> Sender:
        """Parse the header.

        Raises:
            SignatureError: it has another format.
        """
        worker, _, rest = text.partition(".")
        incarnation, _, pod_uid = rest.partition(".")
        if not _POD_UID.fullmatch(pod_uid):
            raise SignatureError(f"{SENDER} must be WORKER.INCARNATION.POD-UID")
        return cls(_number(SENDER, worker, MAX_WORKER), _number(SENDER, incarnation, MAX_INCARNATION), pod_uid)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the headers of a request say, once their signature is verified."""

    sender: Sender
    session: str
    counter: int
    length: int
    """Bytes of the body."""
    digest: str
    signature: str

    def matches(self, body: bytes) -> bool:
        """Whether this is the body that the sender signed."""
        return len(body) == self.length and hmac.compare_digest(digest_of(body), self.digest)


class Signer:
    """Signs requests as one sender. Each has a larger counter than the previous one."""

    def __init__(self, token: str, sender: Sender) -> None:
        self._token = token
        self._sender = sender
        self._session = ""
        self._counter = 0

    def request(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """Return the headers of a request."""
        self._counter += 1
        head = [str(self._sender), self._session, str(self._counter), str(len(body)), digest_of(body)]
        signature = _sign(self._token, "request", method.upper(), path, *head)
        names = (SENDER, SESSION, COUNTER, LENGTH, DIGEST)
        return {**dict(zip(names, head, strict=True)), AUTHORIZATION: f"{SCHEME} {signature}"}

    def check_answer(self, sent: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Verify the response to the request with the headers `sent`.

        Raises:
            SignatureError: the response is not signed for this request.
        """
        signature = sent[AUTHORIZATION].partition(" ")[2]
        place = headers.get(SESSION, ""), headers.get(COUNTER, "")
        expected = answer_signature(self._token, signature, status, *place, digest_of(body))
        if not hmac.compare_digest(_bytes(headers.get(SIGNATURE, "")), expected.encode()):
            raise SignatureError("the answer does not carry the coordinator's signature")

    def follow(self, headers: Mapping[str, str]) -> None:
        """Continue in the session and after the counter of a response that `check_answer` has verified.

        Raises:
            SignatureError: the response does not name them.
        """
        session, counter = _session(headers), _number(COUNTER, headers.get(COUNTER, ""), MAX_COUNTER)
        self._counter = max(self._counter, counter) if session == self._session else counter
        self._session = session


def check_request(token: str, method: str, path: str, headers: Mapping[str, str]) -> RequestHead:
    """Verify the headers of a request.

    Raises:
        SignatureError: the request is not signed with this token.
    """
    scheme, _, signature = headers.get(AUTHORIZATION, "").partition(" ")
    signature = signature.strip()
    if scheme.lower() != SCHEME.lower():
        raise SignatureError(f"the request is not signed: it needs `{AUTHORIZATION}: {SCHEME} ...`")
    names = (SENDER, SESSION, COUNTER, LENGTH, DIGEST)
    expected = _sign(token, "request", method.upper(), path, *(headers.get(name, "") for name in names))
    if not hmac.compare_digest(_bytes(signature), expected.encode()):
        raise SignatureError("the signature is wrong: another token, or the request was changed on its way")
    digest = headers.get(DIGEST, "")
    if not _DIGEST.fullmatch(digest):
        raise SignatureError(f"{DIGEST} must be 64 hexadecimal digits")
    return RequestHead(
        sender=Sender.parse(headers.get(SENDER, "")),
        session=_session(headers),
        counter=_number(COUNTER, headers.get(COUNTER, ""), MAX_COUNTER),
        length=_number(LENGTH, headers.get(LENGTH, ""), MAX_COUNTER),
        digest=digest,
        signature=signature,
    )


def digest_of(body: bytes) -> str:
    """Return the SHA-256 of a body, in hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


def answer_signature(token: str, signature: str, status: int, session: str, counter: str, digest: str) -> str:
    """Return the signature of the response to the request with `signature`. It is not valid for any other request."""
    return _sign(token, "answer", signature, str(status), session, counter, digest)


def answer_headers(
    token: str, signature: str, status: int, digest: str, session: str = "", counter: int = 0
) -> dict[str, str]:
    """Return the headers of a response with a body of this digest."""
    signed = answer_signature(token, signature, status, session, str(counter), digest)
    return {SESSION: session, COUNTER: str(counter), SIGNATURE: signed}


def _sign(token: str, *parts: str) -> str:
    message = _bytes("\n".join(("meshwright-1", *parts)))
    return base64.urlsafe_b64encode(hmac.digest(token.encode(), message, hashlib.sha256)).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    # Headers may contain bytes that are not valid UTF-8.
    return text.encode("utf-8", "surrogateescape")


def _session(headers: Mapping[str, str]) -> str:
    session = headers.get(SESSION, "")
    if not _SESSION.fullmatch(session):
        raise SignatureError(f"{SESSION} must be at most 64 URL-safe characters")
    return session


def _number(name: str, text: str, largest: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 16 or int(text) > largest:
        raise SignatureError(f"{name} must be an integer of at most {largest}")
    return int(text)
