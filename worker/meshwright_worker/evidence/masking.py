"""Masks secrets in logs before they leave the pod. Pure.

Masks the values of environment variables that come from Secrets or are named like a secret, and strings that have the
form of one: authorization headers, credentials in URLs, private keys, and tokens of well-known services. A pattern can
only find what looks like a secret, so values are masked too, in every encoding in which programs print them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Mapping
from urllib.parse import quote

MASK = "***"
MIN_SECRET = 6
"""Shorter values of variables are not masked: they would mask ordinary words and numbers."""
MAX_SECRET = 4096

_KEY = r"[\w.-]*(?:api[_-]?key|access[_-]?key|secret|password|passwd|passphrase|credentials?|token|auth)"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|SECRET(?:_?KEY)?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|TOKEN|AUTH|PRIVATE_?KEY)"
    r"(?:$|_)",
    re.IGNORECASE,
)
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    # The text may begin in the middle of a key, or end there.
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"\A(?:[A-Za-z0-9+/=\s]{0,8192})-----END [A-Z ]*PRIVATE KEY-----"), MASK),
    (re.compile(r"(?i)(authorization[\"']?\s*[:=]\s*[\"']?)(?:[a-z][\w-]{0,40}\s+)?[^\s\"',;]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b((?:bearer|basic|token)\s+)[A-Za-z0-9._~+/=-]{16,}"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/@:\"']{0,256}:[^\s/@\"']{1,1024}@"), rf"\1{MASK}@"),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/@:\"'?#]{16,1024}@"), rf"\1{MASK}@"),
    (re.compile(rf"(?i)([?&]{_KEY}=)[^&\s\"']+"), rf"\1{MASK}"),
    (re.compile(r"(?i)([?&](?:sig|signature|x-amz-(?:signature|credential|security-token))=)[^&\s\"']+"), rf"\1{MASK}"),
    (
        re.compile(
            rf"(?i)(?<![\w.-])({_KEY}[\"']?\s*[=:]\s*[\"']?)(?![\d.,]+(?:[\s\"',;)}}\]]|$))[^\s\"',;)}}\]]{{6,}}"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
            r"|xox[abeprs]-[\w-]{10,}|sk-[\w-]{16,}|AIza[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MASK,
    ),
)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name usually has a secret value."""
    return bool(_SECRET_NAME.search(name))


class Masker:
    """Replaces secrets by `***`."""

    def __init__(self, environment: Mapping[str, str], from_secrets: Collection[str] = ()) -> None:
        """Values of `environment` are masked if the name is in `from_secrets`, or is that of a secret."""
        found: set[str] = set()
        for name, value in environment.items():
            if name in from_secrets or is_secret_name(name):
                found |= _forms(value.strip())
        # The longest first: one secret may be a part of another.
        self._values = sorted(found, key=lambda value: (-len(value), value))

    def mask(self, text: str) -> str:
        """The text without secrets."""
        for value in self._values:
            text = text.replace(value, MASK)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text


def _forms(value: str) -> set[str]:
    """The forms in which programs print a value: as it is, line by line, quoted, escaped and in base64."""
    if not MIN_SECRET <= len(value) <= MAX_SECRET or value.isdecimal():
        return set()
    encoded = base64.b64encode(value.encode(errors="replace")).decode()
    forms = {value, quote(value, safe=""), repr(value)[1:-1], json.dumps(value)[1:-1], encoded, encoded.rstrip("=")}
    forms |= {line.strip() for line in value.splitlines()}
    return {form for form in forms if len(form) >= MIN_SECRET}
