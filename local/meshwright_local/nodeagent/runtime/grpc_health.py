"""One call of `grpc.health.v1.Health/Check`, without a gRPC library: the few frames of HTTP/2 that it needs.

Request headers are sent uncompressed. Headers of the answer are not decoded: whether a service is healthy is in the
message, and an answer without a message is an error.
"""

from __future__ import annotations

import asyncio
import struct

from meshwright_local.nodeagent.runtime.handlers import connect

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_STATES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


async def check(host: str, port: int, service: str) -> str:
    """Return why a service is not healthy, or an empty text."""
    place = f"{host}:{port}"
    try:
        reader, writer = await connect(host, port)
    except OSError as error:
        return f'error: failed to connect service at "{place}": {error}'
    try:
        writer.write(_PREFACE + _frame(_SETTINGS, b"", stream=0) + _request(place, service))
        message = await _answer(reader, writer)
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"error: health rpc probe failed: {error}"
    finally:
        writer.close()
    if message is None:
        return "error: health rpc probe failed: the server answered without a message"
    state = message[1] if message[:1] == b"\x08" else 0
    name = _STATES[state] if state < len(_STATES) else str(state)
    return "" if name == "SERVING" else f'service unhealthy (responded with "{name}")'


def _request(place: str, service: str) -> bytes:
    headers = {
        **{":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Check", ":authority": place},
        **{"content-type": "application/grpc", "te": "trailers", "user-agent": "kube-probe/1.36"},
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())
    text = service.encode()
    message = b"\x0a" + _varint(len(text)) + text if text else b""
    body = b"\x00" + struct.pack(">I", len(message)) + message
    return _frame(_HEADERS, block, _END_HEADERS) + _frame(_DATA, body, _END_STREAM)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
    """Return the message of the answer; None if the stream ends without one."""
    data = b""
    while True:
        head = await reader.readexactly(9)
        size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        payload = await reader.readexactly(size)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            writer.write(_frame(kind, payload if kind == _PING else b"", _ACK, stream=0))
        elif kind == _DATA:
            data += payload[1 : size - payload[0]] if flags & _PADDED else payload
            if len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[1:5]):
                return data[5:]
        if kind in (_RESET, _GO_AWAY) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            return None


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _text(text: str) -> bytes:
    """Encode a text of a header: HPACK's length has a prefix of seven bits."""
    length = bytes((len(text),)) if len(text) < 127 else b"\x7f" + _varint(len(text) - 127)
    return length + text.encode()


def _varint(number: int) -> bytes:
    parts = []
    while number >= 128:
        parts.append(number % 128 | 128)
        number //= 128
    return bytes((*parts, number))
