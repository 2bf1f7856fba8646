"""Tokens of the coordinator: an HMAC of the job's identity, so that the operator stores none.

Pods get the job's token from a Secret that the operator writes and never reads. A restarted operator with the same key
computes the same tokens. The key is in the operator's Secret (`credentials.py`), or in a file for local use.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from functools import lru_cache
from pathlib import Path

KEY_BYTES = 32
CACHED_TOKENS = 1024


class KeyFileError(Exception):
    """The key file cannot be used. The message names the file and the fix."""


class Tokens:
    """Derives and checks the tokens of all jobs from one key."""

    def __init__(self, key: bytes = b"") -> None:
        self.use(key)

    def use(self, key: bytes) -> None:
        """Set the key. A process reads it before it serves agents."""
        self._key = key
        # Every request needs its job's token.
        self._cached = lru_cache(CACHED_TOKENS)(self._derive)

    def token(self, namespace: str, name: str, uid: str) -> str:
        """The token of this job: 43 URL-safe characters."""
        return self._cached(namespace, name, uid)

    def _derive(self, namespace: str, name: str, uid: str) -> str:
        if not self._key:
            raise RuntimeError("tokens are used before their key was read")
        message = "\0".join(("meshwright-coordinator-v1", namespace, name, uid)).encode()
        return base64.urlsafe_b64encode(hmac.digest(self._key, message, hashlib.sha256)).decode().rstrip("=")

    def seal(self, namespace: str, name: str, uid: str, text: str) -> str:
        """Prove that the operator has written `text` about this job: 43 URL-safe characters."""
        if not self._key:
            raise RuntimeError("tokens are used before their key was read")
        message = "\0".join(("meshwright-profile-v1", namespace, name, uid, text)).encode()
        return base64.urlsafe_b64encode(hmac.digest(self._key, message, hashlib.sha256)).decode().rstrip("=")

    def valid(self, token: str, namespace: str, name: str, uid: str) -> bool:
        """Whether `token` is the job's token, compared in constant time."""
        return hmac.compare_digest(token.encode(), self.token(namespace, name, uid).encode())


def load_key(path: Path) -> bytes:
    """The key in `path`. If the file does not exist, it is created with a random key and mode 0600.

    Raises:
        KeyFileError: The file cannot be read or created, or contains fewer than 32 bytes.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise KeyFileError(f"cannot create key file {path}: {error.strerror}: set another --key-file") from None
    else:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(KEY_BYTES).encode())
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"cannot read key file {path}: {error.strerror}") from None
    if len(key) < KEY_BYTES:
        raise KeyFileError(f"key file {path} must contain at least {KEY_BYTES} bytes, got {len(key)}")
    return key
