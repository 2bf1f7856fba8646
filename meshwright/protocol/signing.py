"""Signs requests to the coordinator and its responses. Both sides have the job's token, which is never sent.

TLS verifies the coordinator, but can be disabled, and an agent whose CAs are outdated asks for new ones over a
connection that it cannot verify. Anyone on the network path could then read and reuse a bearer token, and a forged mesh
document could run any command in a pod. A request therefore carries an HMAC-SHA256 with the token over its method,
path, time and body. The response carries one over the request's signature, its status, its time and its body. A request
is valid for `WINDOW_SECONDS`. A receiver that stores the last time of each sender accepts it once.

A request is good for `WINDOW_SECONDS` and, at a receiver that remembers the last time of each sender, once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping

SCHEME = "Meshwright-HMAC-SHA256"
AUTHORIZATION = "Authorization"
DATE = "Meshwright-Date"
"""Header of the sender's time, in microseconds since 1970."""
SIGNATURE = "Meshwright-Signature"
"""Header of a response's signature."""

WINDOW_SECONDS = 300.0
"""Largest difference between the clocks of the two sides, and therefore how long a captured request can be replayed."""
LARGEST_DATE = 1 << 62


class SignatureError(Exception):
    """A message is not signed with the token. The error says what is wrong, but not the expected value."""


class ClockError(SignatureError):
    """The signature is valid, but the clocks of the two sides differ too much."""


class Signer:
    """Signs requests as one sender. Each has a later time than the previous one."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._last = 0
        self._offset = 0

    def request(self, method: str, path: str, body: bytes) -> dict[str, str]:
        """Return the headers of a request."""
        self._last = max(self._last + 1, time.time_ns() // 1000 + self._offset)
        signature = request_signature(self._token, method, path, self._last, body)
        return {DATE: str(self._last), AUTHORIZATION: f"{SCHEME} {signature}"}

    def check_answer(self, sent: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes) -> int:
        """Verify the response to the request with the headers `sent`, and return the receiver's time.

        Raises:
            SignatureError: the response is not signed for this request.
        """
        date = _date(headers.get(DATE))
        signature = sent[AUTHORIZATION].partition(" ")[2]
        expected = answer_signature(self._token, signature, status, date, body)
        if not hmac.compare_digest(headers.get(SIGNATURE, "").encode(), expected.encode()):
            raise SignatureError("the answer does not carry the coordinator's signature")
        return date

    def set_clock(self, date: int) -> None:
        """Follow the receiver's clock, whose time is `date` now."""
        self._offset = date - time.time_ns() // 1000
        # The receiver rejected times ahead of its clock, so they can be used again.
        self._last = min(self._last, date)


def check_request(token: str, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str]:
    """Verify a request, and return its time and signature.

    Raises:
        SignatureError: the request is not signed with this token.
        ClockError: the signature is valid, but the time differs too much from now.
    """
    scheme, _, signature = headers.get(AUTHORIZATION, "").partition(" ")
    if scheme.lower() != SCHEME.lower():
        raise SignatureError(f"the request is not signed: it needs `{AUTHORIZATION}: {SCHEME} ...`")
    date = _date(headers.get(DATE))
    expected = request_signature(token, method, path, date, body)
    if not hmac.compare_digest(signature.strip().encode(), expected.encode()):
        raise SignatureError("the signature is wrong: another token, or the request was changed on its way")
    if abs(time.time_ns() // 1000 - date) > WINDOW_SECONDS * 1e6:
        raise ClockError(f"the clocks differ by more than {WINDOW_SECONDS:g} s")
    return date, signature.strip()


def request_signature(token: str, method: str, path: str, date: int, body: bytes) -> str:
    """Return the signature of a request, 43 URL-safe characters."""
    return _sign(token, "request", method.upper(), path, str(date), hashlib.sha256(body).hexdigest())


def answer_signature(token: str, signature: str, status: int, date: int, body: bytes) -> str:
    """Return the signature of the response to the request with `signature`. It is not valid for any other request."""
    return _sign(token, "answer", signature, str(status), str(date), hashlib.sha256(body).hexdigest())


def answer_headers(token: str, signature: str, status: int, body: bytes) -> dict[str, str]:
    """Return the headers of a response that is sent now."""
    date = time.time_ns() // 1000
    return {DATE: str(date), SIGNATURE: answer_signature(token, signature, status, date, body)}


def _sign(token: str, *parts: str) -> str:
    message = "\n".join(("meshwright-1", *parts)).encode()
    return base64.urlsafe_b64encode(hmac.digest(token.encode(), message, hashlib.sha256)).decode().rstrip("=")


def _date(text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > LARGEST_DATE:
        raise SignatureError(f"{DATE} must be microseconds since 1970")
    return int(text)
