"""How an agent and the coordinator name a CA bundle, so that an agent notices a new one."""

from __future__ import annotations

import hashlib

MAX_BUNDLE_BYTES = 64 << 10
"""Largest bundle. The environment of a pod contains it, so it should be a few certificates."""


def bundle_id(bundle: str) -> str:
    """The name of a bundle of PEM certificates: 16 hexadecimal digits, or an empty string if there is no bundle."""
    text = bundle.strip()
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
