"""What a signature covers: no part of a request or of its response can be changed on the way."""

from __future__ import annotations

import pytest

from meshwright.protocol import signing
from meshwright.protocol.signing import COUNTER, DIGEST, LENGTH, SENDER, SESSION, Sender, SignatureError, Signer

TOKEN = "token-of-the-job"
BODY = b'{"worker": 1}'
SENT_BY = Sender(1, 0, "pod-uid")


def signed() -> dict[str, str]:
    return Signer(TOKEN, SENT_BY).request("POST", "/v1/report", BODY)


def test_a_request_is_read_as_it_was_signed() -> None:
    head = signing.check_request(TOKEN, "post", "/v1/report", signed())
    assert (head.sender, head.counter, head.length) == (SENT_BY, 1, len(BODY))
    assert head.digest == signing.digest_of(BODY)


@pytest.mark.parametrize(
    ("token", "method", "path", "changes"),
    [
        ("another", "POST", "/v1/report", {}),
        (TOKEN, "PUT", "/v1/report", {}),
        (TOKEN, "POST", "/v1/mesh", {}),
        *((TOKEN, "POST", "/v1/report", {name: "2"}) for name in (SENDER, SESSION, COUNTER, LENGTH)),
        (TOKEN, "POST", "/v1/report", {DIGEST: "0" * 64}),
    ],
)
def test_a_request_with_another_part_is_rejected(token: str, method: str, path: str, changes: dict[str, str]) -> None:
    with pytest.raises(SignatureError, match="the signature is wrong"):
        signing.check_request(token, method, path, {**signed(), **changes})


def answer(request: dict[str, str], status: int = 200, body: bytes = b"ok", counter: int = 7) -> dict[str, str]:
    signature = signing.check_request(TOKEN, "POST", "/v1/report", request).signature
    return signing.answer_headers(TOKEN, signature, status, signing.digest_of(body), "a" * 32, counter)


def test_a_response_is_valid_for_its_request_status_and_body_only() -> None:
    signer = Signer(TOKEN, SENT_BY)
    first, second = (signer.request("POST", "/v1/report", BODY) for _ in range(2))
    headers = answer(first)
    signer.check_answer(first, 200, headers, b"ok")
    for request, status, changes, body in (
        (second, 200, {}, b"ok"),
        (first, 409, {}, b"ok"),
        (first, 200, {}, b"no"),
        (first, 200, {COUNTER: "8"}, b"ok"),
        (first, 200, {SESSION: "b" * 32}, b"ok"),
    ):
        with pytest.raises(SignatureError, match="the coordinator's signature"):
            signer.check_answer(request, status, {**headers, **changes}, body)
