"""String formats and patterns that schemas may ask for."""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

_DURATION = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+")
_HOSTNAME = re.compile(r"([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*")
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+")
_MAC = re.compile(r"([0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}")


def _date_time(text: str) -> object:
    if "T" not in text.upper() or datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError(text)
    return text


def _uri(text: str) -> object:
    if not urlsplit(text).scheme:
        raise ValueError(text)
    return text


def _matching(pattern: re.Pattern[str]) -> Callable[[str], object]:
    def check(text: str) -> object:
        if text != "0" and pattern.fullmatch(text) is None:
            raise ValueError(text)
        return text

    return check


_CHECKS: dict[str, Callable[[str], object]] = {
    "date-time": _date_time,
    "datetime": _date_time,
    "date": datetime.date.fromisoformat,
    "duration": _matching(_DURATION),
    "byte": lambda text: base64.b64decode(text, validate=True),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "cidr": lambda text: ipaddress.ip_network(text, strict=False),
    "uuid": uuid.UUID,
    "hostname": _matching(_HOSTNAME),
    "email": _matching(_EMAIL),
    "mac": _matching(_MAC),
    "uri": _uri,
}


def fits_format(form: str, text: str) -> bool:
    """Whether a string has a format; formats that are not known check nothing, as OpenAPI says."""
    check = _CHECKS.get(form)
    if check is None:
        return True
    try:
        check(text)
    except (ValueError, binascii.Error):
        return False
    return True


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    r"""A pattern with Go's meaning: classes are ASCII, `$` is the end of the text and not before a last newline.

    Raises:
        re.error: the pattern cannot be compiled.
    """
    out, in_class, escaped = [], False, False
    for char in pattern:
        if not escaped and not in_class and char == "$":
            out.append(r"\Z")
            continue
        if not escaped:
            in_class = char == "[" or (in_class and char != "]")
        out.append("Z" if escaped and char == "z" else char)
        escaped = char == "\\" and not escaped
    return re.compile("".join(out), re.ASCII)
