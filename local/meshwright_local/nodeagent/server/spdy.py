"""The part of SPDY/3.1 that `kubectl port-forward` speaks, for the server's side: streams with headers and data.

The format is that of the draft `draft-mbelshe-httpbis-spdy-00`. Kubernetes' clients know no flow control.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

FIN = 1
DATA, SYN_STREAM, SYN_REPLY, RST_STREAM, PING, GO_AWAY = 0, 1, 2, 3, 6, 7
_CONTROL = 0x80000000
_VERSION = 3
_LONGEST = 1 << 24

# The dictionary of header compression: words with their lengths, then text without.
_WORDS = """
options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow
authorization cache-control connection content-base content-encoding content-language content-length content-location
content-md5 content-range content-type date etag expect expires from host if-match if-modified-since if-none-match
if-range if-unmodified-since last-modified location max-forwards pragma proxy-authenticate proxy-authorization range
referer retry-after server te trailer transfer-encoding upgrade user-agent vary via warning www-authenticate method get
status 200_OK version HTTP/1.1 url public set-cookie keep-alive origin
"""
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug "
    "Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _prefixed(text: str) -> bytes:
    return len(text).to_bytes(4) + text.encode()


DICTIONARY = b"".join(_prefixed(word.replace("_", " ")) for word in _WORDS.split()) + _TEXT.encode()


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. Only SYN_STREAM has headers, only DATA and PING have data."""

    kind: int
    stream: int
    flags: int = 0
    headers: Mapping[str, str] | None = None
    data: bytes = b""


class Spdy:
    """The state of one connection: the rest of what was received, and the compression of headers in both ways."""

    def __init__(self) -> None:
        self._rest = b""
        self._unpacker = zlib.decompressobj(zdict=DICTIONARY)
        self._packer = zlib.compressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> list[Frame]:
        """Return the complete frames after more data; raises ValueError for what is no SPDY."""
        self._rest += data
        frames = []
        while len(self._rest) >= 8:
            head, size = int.from_bytes(self._rest[:4]), int.from_bytes(self._rest[5:8])
            if len(self._rest) < 8 + size:
                break
            flags, payload = self._rest[4], self._rest[8 : 8 + size]
            self._rest = self._rest[8 + size :]
            if not head & _CONTROL:
                frames.append(Frame(DATA, head, flags, data=payload))
            elif (head >> 16) & 0x7FFF != _VERSION:
                raise ValueError("not a frame of SPDY/3.1")
            else:
                frames.append(self._control(head & 0xFFFF, flags, payload))
        return frames

    def _control(self, kind: int, flags: int, payload: bytes) -> Frame:
        number = int.from_bytes(payload[:4])
        if kind == SYN_STREAM:
            return Frame(kind, number & 0x7FFFFFFF, flags, self._headers(payload[10:]))
        if kind == PING:
            return Frame(kind, 0, flags, data=payload)
        return Frame(kind, number & 0x7FFFFFFF, flags)

    def _headers(self, packed: bytes) -> dict[str, str]:
        try:
            raw = self._unpacker.decompress(packed, _LONGEST)
        except zlib.error as error:
            raise ValueError(f"headers cannot be decompressed: {error}") from error
        texts, at = [], 4
        for _ in range(2 * int.from_bytes(raw[:4])):
            size = int.from_bytes(raw[at : at + 4])
            texts.append(raw[at + 4 : at + 4 + size].decode(errors="replace"))
            at += 4 + size
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def reply(self, stream: int) -> bytes:
        """Return the frame that accepts a stream."""
        packed = self._packer.compress(bytes(4)) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        return _frame(_CONTROL | _VERSION << 16 | SYN_REPLY, 0, stream.to_bytes(4) + packed)


def data_frame(stream: int, data: bytes, *, end: bool = False) -> bytes:
    """Return a frame with data of a stream."""
    return _frame(stream, FIN if end else 0, data)


def pong(payload: bytes) -> bytes:
    """Return the answer to a ping."""
    return _frame(_CONTROL | _VERSION << 16 | PING, 0, payload)


def _frame(head: int, flags: int, payload: bytes) -> bytes:
    return head.to_bytes(4) + bytes((flags,)) + len(payload).to_bytes(3) + payload
