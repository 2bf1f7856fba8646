"""The checksum of a manifest, in the manifest: a flipped bit in it is an error, and never another content.

It is the SHA-256 of the manifest's JSON without the checksum, with sorted keys and no spaces. It covers fields that a
reader does not know. Every format of a manifest has it, so that damage and a later format are told apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its checksum as the last field."""
    return {**fields, CHECKSUM: _checksum(fields)}


def checksum_error(fields: Mapping[str, Any]) -> str:
    """Why a manifest is damaged; empty if it is intact."""
    actual = fields.get(CHECKSUM)
    if actual is None:
        return "it has no checksum"
    return "" if actual == _checksum(fields) else "its content differs from its checksum"


def _checksum(fields: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in fields.items() if key != CHECKSUM}
    content = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()}"
